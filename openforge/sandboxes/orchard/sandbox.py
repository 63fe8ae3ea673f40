"""A sandbox at an Orchard service."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from openforge import tables
from openforge.sandboxes.join import WORK
from openforge.sandboxes.paths import inside, target
from openforge.sandboxes.protocol import (
    PORT,
    Adopter,
    Bind,
    ExecResult,
    FileEntry,
    Limits,
    Network,
    Sandbox,
    SandboxError,
    SandboxLost,
)

if TYPE_CHECKING:
    from openforge.sandboxes.orchard.backend import OrchardBackend

DOWNLOAD_BYTES = 256 << 20  # largest file taken out of a sandbox


class Inside(Protocol):
    """What goes on inside one sandbox: `plain.Plain` for any Orchard service, `extended.Extended` for our own."""

    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout: float | None,
        cwd: str,
        env: Mapping[str, str],
        stdin: bytes | None,
        log: Path | None,
        limits: Mapping[str, int],
    ) -> ExecResult:
        """See `Sandbox.exec`; `cwd` is absolute, `limits` are `Limits.rlimits`."""

    async def write(self, root: str, parts: Sequence[str], data: bytes, mode: int) -> None:
        """Write root/parts, replacing whatever is in its place."""

    async def read(self, path: str, limit: int) -> bytes:
        """A regular file of at most `limit` bytes."""

    async def entries(self, path: str) -> list[FileEntry]:
        """Entries of a folder, by name."""

    async def end_processes(self) -> None:
        """Kill every process of the agent's."""

    async def route(self, target: Adopter, episode_id: str, port: int) -> str:
        """See `Sandbox.route`."""

    async def connect(self, port: int) -> socket.socket:
        """See `Sandbox.connect`."""


class OrchardSandbox:
    """A `Sandbox` at an Orchard service; made by `OrchardBackend.create`."""

    def __init__(
        self,
        backend: OrchardBackend,
        sandbox_id: str,
        episode_id: str,
        network: Network,
        limits: Limits,
        isolation: str,
        inside: Inside,
    ) -> None:
        self.sandbox_id = sandbox_id
        self.episode_id = episode_id
        self.network: str = network
        self.isolation = isolation
        self.limits = limits
        self._backend = backend
        self._inside = inside
        self._companions: list[Sandbox] = []
        self._heart: asyncio.Task[None] | None = None
        self._deleted = False
        self._lost: SandboxLost | None = None

    # ---- commands ----------------------------------------------------------------------------------------------
    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        log: Path | None = None,
    ) -> ExecResult:
        """See `Sandbox.exec`. Commands of one sandbox run side by side, each under a time limit of our own."""
        self._alive()
        if log is not None:
            log.touch()
        # NPROC counts a user's processes of the whole node, and the kernel is not this machine's.
        limits = {name: value for name, value in self.limits.rlimits().items() if name != "NPROC"}
        return await self._inside.exec(
            ["/bin/bash", "-c", command] if isinstance(command, str) else list(command),
            timeout=timeout,
            cwd=inside(cwd or WORK),
            env=env or {},
            stdin=stdin,
            log=log,
            limits=limits,
        )

    async def apply_patch(self, patch: str, timeout: float = 30) -> ExecResult:
        """`git apply` in the work folder; the service's own call would run it unnamed, twice if need be."""
        return await self.exec(["git", "apply", "-"], stdin=patch.encode(), timeout=timeout)

    async def end_processes(self) -> None:
        """Kill every process but those of the service itself; commands in flight end with exit code -9."""
        self._alive()
        await self._inside.end_processes()

    # ---- files -------------------------------------------------------------------------------------------------
    async def upload_content(self, data: bytes, remote: str, mode: int = 0o644) -> None:
        """Write a file below /workspace, /home/agent or /tmp, replacing whatever is in its place."""
        root, parts = target(remote)
        self._alive()
        await self._inside.write(root, parts, data, mode & 0o777)

    async def upload_file(self, local: Path, remote: str) -> None:
        """Copy a file of the host inside, with its permission bits."""
        data = await asyncio.to_thread(local.read_bytes)
        await self.upload_content(data, remote, local.stat().st_mode & 0o777)

    async def download_content(self, remote: str) -> bytes:
        """A regular file of the sandbox, at most DOWNLOAD_BYTES; links lead as they do inside."""
        path = inside(remote)
        self._alive()
        return await self._inside.read(path, DOWNLOAD_BYTES)

    async def download_file(self, remote: str, local: Path) -> int:
        """Copy a file of the sandbox to the host (written beside and renamed); its size in bytes."""
        data = await self.download_content(remote)
        await asyncio.to_thread(tables.write_beside, local, data)
        return len(data)

    async def list_files(self, path: str = "/") -> list[FileEntry]:
        """Entries of a folder inside, by name, not recursive."""
        where = inside(path)
        self._alive()
        return await self._inside.entries(where)

    # ---- life --------------------------------------------------------------------------------------------------
    async def start_heartbeat(self, interval: float = 60) -> None:
        """Tell the service every `interval` seconds that the sandbox is wanted. A service that has heard one deletes
        the sandbox when it hears no more, so it is started by whoever will stop it."""
        await self.stop_heartbeat()
        await self._beat()
        self._heart = asyncio.create_task(self._beats(interval))

    async def _beats(self, interval: float) -> None:
        while self._lost is None:
            await asyncio.sleep(interval)
            with contextlib.suppress(SandboxError):  # whoever uses the sandbox next hears of it
                await self._beat()

    async def _beat(self) -> None:
        path = f"/sandboxes/{self.sandbox_id}/heartbeat"
        response = await self._backend.service.ask("POST", path, sandbox=self.sandbox_id)
        if response.status_code == 404:
            self._lost = SandboxLost(f"sandbox {self.sandbox_id} of episode {self.episode_id} is gone")
            raise self._lost

    async def stop_heartbeat(self) -> None:
        """End `start_heartbeat`."""
        heart, self._heart = self._heart, None
        if heart is not None:
            heart.cancel()
            await asyncio.wait([heart])

    async def route(self, target: Adopter, port: int = PORT) -> str:
        """A way out to `target`: at 127.0.0.1:`port` inside on our own server, else its public address."""
        if self.network == "none":
            raise SandboxError(f"sandbox {self.sandbox_id} has network 'none'; a route takes 'proxy'")
        self._alive()
        return await self._inside.route(target, self.episode_id, port)

    async def connect(self, port: int) -> socket.socket:
        """A connection to 127.0.0.1:`port` inside; only our own server has a way in."""
        self._alive()
        return await self._inside.connect(port)

    async def companion(
        self,
        *,
        network: Network = "none",
        image: str | None = None,
        binds: Sequence[Bind] = (),
        limits: Limits | None = None,
    ) -> Sandbox:
        """Another sandbox of this episode; see `Sandbox.companion`."""
        self._alive()
        other = await self._backend.make(self.episode_id, network, image, binds, limits, companion_of=self.sandbox_id)
        self._companions.append(other)
        return other

    async def delete(self) -> None:
        """Have the service delete it and its companions; again is harmless. Orchard removes a pod in the background."""
        self._deleted = True
        await self.stop_heartbeat()
        deletes = (*(c.delete() for c in self._companions), self._backend.forget(self.sandbox_id))
        for end in await asyncio.gather(*deletes, return_exceptions=True):
            if end is not None:
                raise end

    async def __aenter__(self) -> OrchardSandbox:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.delete()

    def _alive(self) -> None:
        if self._deleted:
            raise SandboxLost(f"sandbox {self.sandbox_id} of episode {self.episode_id} is deleted")
        if self._lost is not None:
            raise self._lost
