"""One sandbox on this machine: a long-lived first process, joined for every exec and file operation.

The host never opens a file in a sandbox's folders by path: uploads, downloads and listings are carried out by a
process inside (`files.py`), where the links an agent plants lead nowhere that the agent cannot go itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from openforge import tables
from openforge.sandboxes import cgroups
from openforge.sandboxes.cgroups import Group
from openforge.sandboxes.images import Image
from openforge.sandboxes.join import BASE_ENV, CONNECT_SECONDS, WORK
from openforge.sandboxes.owner import Owner, exiting, kill, kill_namespace, remove
from openforge.sandboxes.paths import inside, target
from openforge.sandboxes.protocol import (
    PORT,
    Adopter,
    Bind,
    ExecResult,
    FileEntry,
    Limits,
    Network,
    SandboxError,
    SandboxLost,
)
from openforge.sandboxes.requests import Log, Output, Request, checked, close_all

if TYPE_CHECKING:
    from openforge.sandboxes.local import LocalBackend

DOWNLOAD_BYTES = 256 << 20  # largest file taken out of a sandbox
KILL_SECONDS = 30.0
KILLED = (-9, 137)  # SIGKILL, and as a shell says it
_OURS = ("HOME", "LOGNAME", "TMPDIR", "USER")
_GRACE = 15.0  # beyond a command's time limit: a supervisor that the agent has stopped cannot keep it


class LocalSandbox:
    """A `Sandbox` on this machine; made by `LocalBackend.create`.

    Attributes:
        holder_pid: pid outside of its first process, what `join.enter` and `join.run_in` take.
        limits: resource limits of what `exec` starts; hand `limits.rlimits()` to `join.run_in`.
        image: its root file system; None is this host's.
        group: its control groups: hand `group.processes()` to `join.run_in`; `group.memory_kills()` tells whether the
            sandbox met its own limit of memory, or the machine's.
    """

    def __init__(
        self,
        backend: LocalBackend,
        sandbox_id: str,
        episode_id: str,
        network: Network,
        limits: Limits,
        image: Image | None = None,
    ) -> None:
        self.sandbox_id = sandbox_id
        self.episode_id = episode_id
        self.network: str = network
        self.limits = limits
        self.image = image
        self.group = Group(1, {})
        self.isolation = ""
        self.holder_pid = -1
        self._holder: Owner | None = None
        self._pidfd: int | None = None
        self._backend = backend
        self._companions: list[LocalSandbox] = []
        self._running: set[asyncio.Event] = set()  # one an exec in flight, set when it has ended

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
        """See `Sandbox.exec`. A command that ends leaves its daemons running; one that runs out of time, or whose
        caller is cancelled, is killed with all its descendants. A missing program is exit code 127, as in a shell.
        """
        self._alive()
        shell = "/bin/bash" if self.image is None else self.image.shell
        argv = [shell, "-c", command] if isinstance(command, str) else list(command)
        request = {
            "op": "exec",
            "holder": self.holder_pid,
            "argv": argv,
            "cwd": inside(cwd or WORK),
            "env": {**self.env, **(env or {})},
            "timeout": timeout,
            "limits": self.limits.rlimits(),
            "groups": self.group.processes(),
        }
        kills = self.group.memory_kills()
        ended = asyncio.Event()
        # Before anything is awaited: `end_processes` must know of a command that has not arrived inside yet.
        self._running.add(ended)
        with contextlib.ExitStack() as stack:
            stack.callback(self._running.discard, ended)
            stack.callback(ended.set)
            log_file = Log(log)
            stack.callback(log_file.close)
            fds: list[int] = []
            try:
                fds.append(_input(stdin))
                out = Output(log_file, fds)
                stack.callback(out.close)
                err = Output(log_file, fds)
                stack.callback(err.close)
                child = await self._backend.spawner.request(fds)
            finally:
                close_all(fds)
            exit_code, timed_out = await self._finished(child, request, timeout)
            note = self._note(kills) if exit_code in KILLED else None
            return ExecResult(exit_code, out.finish(), err.finish(), timed_out, note)

    @property
    def env(self) -> dict[str, str]:
        """The environment of every command, before its own: of the image only what is not the sandbox's to say."""
        if self.image is None:
            return dict(BASE_ENV)
        return {**BASE_ENV, "SHELL": self.image.shell, **{k: v for k, v in self.image.env.items() if k not in _OURS}}

    def _note(self, kills: int) -> str | None:
        if self.group.memory_kills() == kills:
            return None
        return f"the kernel killed a process of the sandbox at its limit of memory, {self.limits.memory_bytes} bytes"

    async def _finished(
        self, child: Request, request: dict[str, Any], timeout: float | None
    ) -> tuple[int | None, bool]:
        try:
            await child.send(request)
            patience = None if timeout is None else timeout + _GRACE
            answer = await asyncio.wait_for(child.answer(), patience)
        except TimeoutError:
            return None, True
        except asyncio.CancelledError:
            child.hang_up()
            with contextlib.suppress(TimeoutError):
                await asyncio.shield(asyncio.wait_for(child.answer(), _GRACE))
            raise
        finally:
            child.close()
        if answer is None:  # its supervisor was killed inside, and the command with it
            self._alive()
            return -9, False
        reply = checked(answer[0])
        return reply["exit"], reply["timed_out"]

    async def apply_patch(self, patch: str, timeout: float = 30) -> ExecResult:
        """`git apply` in the work folder; a patch that does not fit is an exit code, not an error."""
        return await self.exec(["git", "apply", "-"], stdin=patch.encode(), timeout=timeout)

    async def end_processes(self) -> None:
        """Kill every process inside but the first and return when all are dead; files and route stay.

        Execs in flight end with exit code -9. Whoever runs processes inside by `join.run_in` ends those first: one
        that is about to join cannot be seen yet.

        Raises:
            SandboxError: some would not die.
            SandboxLost: the sandbox is gone.
        """
        deadline = asyncio.get_running_loop().time() + KILL_SECONDS
        while True:
            pending = list(self._running)
            killed = await self._kill()
            if killed and not pending:
                return
            if asyncio.get_running_loop().time() > deadline:
                raise SandboxError(
                    f"the processes of sandbox {self.sandbox_id} did not die within {KILL_SECONDS:.0f} s"
                )
            # A command that was still on its way in when the others were killed shows by not having ended.
            waits = [asyncio.ensure_future(e.wait()) for e in pending]
            if waits:
                await asyncio.wait(waits, timeout=0.05)
            for w in waits:
                w.cancel()

    async def _kill(self) -> bool:
        """Kill once from inside, where one signal reaches all; whether all are dead."""
        try:
            reply, _ = await self._call({"op": "kill"})
            return bool(reply["left"] == 0)
        except SandboxLost:
            self._alive()
            # The agent killed the killer, perhaps in a loop; it cannot do so to this process.
            await asyncio.to_thread(kill_namespace, self.holder_pid)
            return False

    # ---- files -------------------------------------------------------------------------------------------------
    async def upload_content(self, data: bytes, remote: str, mode: int = 0o644) -> None:
        """Write a file below /workspace, /home/agent or /tmp, replacing whatever is in its place; see `Sandbox`."""
        await self.upload_contents([(remote, data, mode)])

    async def upload_contents(self, files: Iterable[tuple[str, bytes, int]]) -> None:
        """Write many files, (remote, data, mode) each, in one go.

        Raises:
            SandboxError: a path leads out of the writable folders, or through "..".
            SandboxFileError: a file cannot be written.
        """
        entries, payloads = [], []
        for remote, data, mode in files:
            root, parts = target(remote)
            entries.append({"root": root, "parts": parts, "mode": mode & 0o777, "bytes": len(data)})
            payloads.append(data)
        await self._call({"op": "write", "files": entries}, payloads)

    async def upload_file(self, local: Path, remote: str) -> None:
        """Copy a file of the host inside, with its permission bits."""
        data = await asyncio.to_thread(local.read_bytes)
        await self.upload_content(data, remote, local.stat().st_mode & 0o777)

    async def download_content(self, remote: str) -> bytes:
        """A regular file of the sandbox, at most DOWNLOAD_BYTES; links lead as they do inside."""
        _, data = await self._call({"op": "read", "path": inside(remote), "limit": DOWNLOAD_BYTES})
        return data

    async def download_file(self, remote: str, local: Path) -> int:
        """Copy a file of the sandbox to the host (written beside and renamed); its size in bytes."""
        data = await self.download_content(remote)
        await asyncio.to_thread(tables.write_beside, local, data)
        return len(data)

    async def list_files(self, path: str = "/") -> list[FileEntry]:
        """Entries of a folder inside, by name, not recursive."""
        reply, _ = await self._call({"op": "list", "path": inside(path)})
        return [FileEntry(**e) for e in reply["entries"]]

    # ---- life --------------------------------------------------------------------------------------------------
    async def start_heartbeat(self, interval: float = 60) -> None:
        """Nothing: a local sandbox dies with its owner, by the kernel's hand."""

    async def stop_heartbeat(self) -> None:
        """Nothing; see `start_heartbeat`."""

    async def route(self, target: Adopter, port: int = PORT) -> str:
        """Listen on 127.0.0.1:`port` of the sandbox's own network and hand the listener to `target`.

        Returns the base URL as seen from inside: no path leads out but these sockets.
        """
        if self.network == "none":
            raise SandboxError(f"sandbox {self.sandbox_id} has network 'none'; a route takes 'proxy'")
        self._alive()
        if self.network == "open":  # the host's loopback, where the port may be anybody's
            listener = socket.create_server(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        else:
            listener = await self._backend.spawner.listen(self.holder_pid, port)
        try:
            await target.adopt(self.episode_id, listener)
        except BaseException:
            listener.close()
            raise
        return f"http://127.0.0.1:{port}/s/{self.episode_id}"

    async def connect(self, port: int) -> socket.socket:
        """A connection to 127.0.0.1:`port` inside; see `Sandbox.connect`."""
        self._alive()
        if self.network == "open":
            return await asyncio.to_thread(socket.create_connection, ("127.0.0.1", port), CONNECT_SECONDS)
        return await self._backend.spawner.connect(self.holder_pid, port)

    async def companion(
        self,
        *,
        network: Network = "none",
        image: str | None = None,
        binds: Sequence[Bind] = (),
        limits: Limits | None = None,
    ) -> LocalSandbox:
        """Another sandbox of this episode; see `Sandbox.companion`."""
        self._alive()
        other = await self._backend.create(self.episode_id, network=network, image=image, binds=binds, limits=limits)
        self._companions.append(other)
        return other

    async def delete(self) -> None:
        """Kill everything inside and remove its files, its companions' too; again is harmless."""
        await asyncio.gather(*(c.delete() for c in self._companions))
        holder, self._holder = self._holder, None
        keep = None if self._backend.keep is None else self._backend.keep / self.sandbox_id
        if holder is not None:
            if keep is not None and self.limits.disk_bytes is not None:
                await asyncio.to_thread(self._copy_work, keep)
            await asyncio.to_thread(kill, holder)
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        folder = self._backend.root / self.sandbox_id
        if keep is not None and (folder / "disk/work").is_dir():
            # Renamed and not copied: what an agent has planted there is not followed.
            keep.parent.mkdir(parents=True, exist_ok=True)
            os.rename(folder / "disk/work", keep)
        await asyncio.to_thread(cgroups.remove, self.group.paths())
        await asyncio.to_thread(remove, folder)
        (self._backend.root / f"{self.sandbox_id}.json").unlink(missing_ok=True)
        self._backend.sandboxes.pop(self.sandbox_id, None)

    def _copy_work(self, keep: Path) -> None:
        """Copy the work folder out of memory; links are copied as links, by a program that enters none."""
        kill_namespace(self.holder_pid)
        keep.parent.mkdir(parents=True, exist_ok=True)
        source = f"/proc/{self.holder_pid}/root{WORK}"
        with contextlib.suppress(subprocess.CalledProcessError):  # a sandbox that is gone has nothing to keep
            subprocess.run(["cp", "-a", "--", source, str(keep)], check=True, capture_output=True)

    async def __aenter__(self) -> LocalSandbox:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.delete()

    def _alive(self) -> None:
        if self._pidfd is None or select.select([self._pidfd], [], [], 0)[0] or exiting(self.holder_pid):
            raise SandboxLost(f"sandbox {self.sandbox_id} of episode {self.episode_id} is gone")

    async def _call(self, request: dict[str, Any], payloads: Iterable[bytes] = ()) -> tuple[dict[str, Any], bytes]:
        self._alive()
        return await self._backend.spawner.call({"holder": self.holder_pid, "cwd": "/", **request}, payloads)


def _input(data: bytes | None) -> int:
    """A descriptor to read `data` from."""
    if data is None:
        return os.open("/dev/null", os.O_RDONLY)
    fd = os.memfd_create("stdin")
    with open(fd, "wb", closefd=False) as f:
        f.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
