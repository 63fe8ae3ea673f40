"""Makes sandboxes on this machine: one long-lived bubblewrap each."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import posixpath
import secrets
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, get_args

from openforge.sandboxes import bwrap, cgroups
from openforge.sandboxes.images import default_cache
from openforge.sandboxes.isolation import held, isolation
from openforge.sandboxes.local_sandbox import LocalSandbox
from openforge.sandboxes.owner import Label, Owner
from openforge.sandboxes.protocol import Bind, Limits, Network, SandboxError
from openforge.sandboxes.requests import Spawner, close_all, readable
from openforge.sandboxes.roots import Roots

START_SECONDS = 60.0


class LocalBackend:
    """Makes sandboxes below `root`, each labelled with run, episode and owner.

    Use it from one event loop. The sandboxes die with the owner process however it ends; `owner.reap` removes what
    such a death leaves on disk.

    Args:
        keep: folder that the work folder of a deleted sandbox is moved to, under the sandbox's id (of the same file
            system, unless its disk was in memory: `Limits.disk_bytes`); None removes it.
        spawner: what starts the sandboxes and joins them, closed with the backend; None starts one of its own.
        images: folder that images are unpacked to, once for everybody; None is `images.default_cache()`.
    """

    def __init__(
        self,
        root: Path,
        run: str,
        owner: Owner,
        keep: Path | None = None,
        spawner: Spawner | None = None,
        images: Path | None = None,
    ) -> None:
        self.root = root.absolute()
        self.run = run
        self.owner = owner
        self.keep = keep
        self.spawner = spawner or Spawner()
        self.roots = Roots(self.root, images or default_cache())
        self.sandboxes: dict[str, LocalSandbox] = {}
        self._version: str | None = None

    async def create(
        self,
        episode_id: str,
        *,
        network: Network = "proxy",
        image: str | None = None,
        binds: Sequence[Bind] = (),
        limits: Limits | None = None,
    ) -> LocalSandbox:
        """Start a sandbox.

        Args:
            episode_id: the episode it serves; one episode may have several sandboxes.
            network: "none", "proxy" (the sandbox can `route` to the proxy; both reach nothing else), or "open".
            image: path of an image archive, see `images`; None is this host's system, read-only.
            binds: files and folders of the host to show read-only.
            limits: resource limits, else the defaults of `Limits`.

        Raises:
            SandboxError: it cannot be set up; the message says what is missing.
        """
        if network not in get_args(Network):
            raise SandboxError(f"network {network!r} must be one of {', '.join(get_args(Network))}")
        if not episode_id or posixpath.basename(episode_id) != episode_id or episode_id.startswith("."):
            raise SandboxError(f"episode id {episode_id!r} must be a plain name: it names a folder")
        base = None if image is None else await self.roots.image(Path(image))
        limits = limits or Limits()
        sandbox = LocalSandbox(self, f"{episode_id}-{secrets.token_hex(3)}", episode_id, network, limits, base)
        self.sandboxes[sandbox.sandbox_id] = sandbox
        try:
            await self._start(sandbox, binds)
        except BaseException:
            await asyncio.shield(sandbox.delete())
            raise
        return sandbox

    async def _start(self, sandbox: LocalSandbox, binds: Sequence[Bind]) -> None:
        folder, limits = self.root / sandbox.sandbox_id, sandbox.limits
        label = self.root / f"{sandbox.sandbox_id}.json"
        group = cgroups.plan(sandbox.sandbox_id, limits, cgroups.available())
        cgroups.check(limits, group)
        if self._version is None:
            self._version = bwrap.version()
        self.root.mkdir(parents=True, exist_ok=True)
        _write_label(label, Label(self.run, sandbox.episode_id, self.owner, None, tuple(group.paths())))
        folder.mkdir()
        sandbox.group = group  # from here on there may be something of it to remove
        group.make(limits)
        mounts = await self.roots.prepare(folder, limits.disk_bytes, sandbox.image)
        if sandbox.image is None:
            bwrap.write_etc(folder / "etc", sandbox.network)
        argv = bwrap.arguments(folder, binds, limits, 3, sandbox.network, sandbox.image, self.roots.tools)
        noted_r, noted_w = os.pipe()
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, noted_w)
            try:
                async with asyncio.timeout(START_SECONDS):
                    pid = await self._run({"argv": argv, "mounts": mounts, "groups": group.processes()}, noted_r)
            except TimeoutError:
                raise SandboxError(f"sandbox {sandbox.sandbox_id} did not start within {START_SECONDS:.0f} s") from None
            sandbox._holder = Owner.of(pid)
            _write_label(label, Label(self.run, sandbox.episode_id, self.owner, sandbox._holder, tuple(group.paths())))
            # From here on the reaper knows it; until here it ends by itself when this pipe does.
            os.write(noted_w, b"\n")
        sandbox._pidfd = os.pidfd_open(pid)
        sandbox.holder_pid = pid
        parts = [isolation(pid, f"bubblewrap {self._version}"), *self.roots.named(sandbox.image), held(limits, group)]
        sandbox.isolation = "; ".join(parts)

    async def _run(self, request: dict[str, Any], stdin: int) -> int:
        """Start bwrap on `stdin`, which is closed here; the pid of the first process once the sandbox is set up.

        Args:
            request: see `spawner.become`.
        """
        ours, theirs = [], [stdin]
        try:
            for _ in range(3):  # standard output, standard error, information: the spawner numbers them 0 to 3
                read_end, write_end = os.pipe()
                ours.append(read_end)
                theirs.append(write_end)
            child = await self.spawner.request(theirs)
            close_all(theirs)
            await child.send({"op": "bwrap", **request})
            child.close()
            if not await _read(ours[0]):
                error = b""
                while chunk := await _read(ours[1]):
                    error += chunk
                raise SandboxError(bwrap.explain(error.decode(errors="replace")))
            return int(json.loads(await _read(ours[2]))["child-pid"])  # written before anything ran inside
        finally:
            close_all(ours)
            close_all(theirs)

    async def close(self) -> None:
        """Delete every sandbox and end the spawner."""
        await asyncio.gather(*(s.delete() for s in list(self.sandboxes.values())))
        await self.spawner.close()

    async def __aenter__(self) -> LocalBackend:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _write_label(path: Path, label: Label) -> None:
    """Without flushing it to disk: a label matters only as long as the machine is up."""
    beside = path.with_suffix(".tmp")
    beside.write_text(label.text())
    beside.rename(path)


async def _read(fd: int) -> bytes:
    """What can be read, when something can; empty at the end."""
    await readable(fd)
    return os.read(fd, 1 << 16)
