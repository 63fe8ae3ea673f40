"""Sandboxes on this machine: one long-lived bubblewrap each, joined for every exec and file operation.

The host never opens a file in a sandbox's folders by path: uploads, downloads and listings are carried out by a
process inside (`files.py`), where the links an agent plants lead nowhere that the agent cannot go itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import posixpath
import secrets
import select
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from openforge import tables
from openforge.sandboxes import bwrap
from openforge.sandboxes.join import BASE_ENV, HOME, WORK
from openforge.sandboxes.owner import Label, Owner, exiting, kill, kill_namespace, remove
from openforge.sandboxes.protocol import (
    PORT,
    Adopter,
    Bind,
    ExecResult,
    FileEntry,
    Limits,
    Network,
    SandboxError,
    SandboxFileError,
    SandboxLost,
    SandboxUnsupported,
)
from openforge.sandboxes.requests import Log, Output, Request, Spawner, checked, readable

DOWNLOAD_BYTES = 256 << 20  # largest file taken out of a sandbox
_NAMESPACES = ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup")
_WRITABLE = (WORK, HOME, "/tmp")
START_SECONDS = 60.0
KILL_SECONDS = 30.0
_GRACE = 15.0  # beyond a command's time limit: a supervisor that the agent has stopped cannot keep it


class LocalSandbox:
    """A `Sandbox` on this machine; made by `LocalBackend.create`.

    Attributes:
        holder_pid: pid outside of its first process, what `join.enter` and `join.run_in` take.
        limits: resource limits of what `exec` starts; hand `limits.rlimits()` to `join.run_in`.
    """

    def __init__(
        self, backend: LocalBackend, sandbox_id: str, episode_id: str, network: Network, limits: Limits
    ) -> None:
        self.sandbox_id = sandbox_id
        self.episode_id = episode_id
        self.network: str = network
        self.limits = limits
        self.isolation = ""
        self.holder_pid = -1
        self._holder: Owner | None = None
        self._pidfd: int | None = None
        self._backend = backend
        self._spawner = backend.spawner
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
        argv = ["/bin/bash", "-c", command] if isinstance(command, str) else list(command)
        request = {
            "op": "exec",
            "holder": self.holder_pid,
            "argv": argv,
            "cwd": _inside(cwd or WORK),
            "env": {**BASE_ENV, **(env or {})},
            "timeout": timeout,
            "limits": self.limits.rlimits(),
        }
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
                child = await self._spawner.request(fds)
            finally:
                _close(fds)
            exit_code, timed_out = await self._finished(child, request, timeout)
            return ExecResult(exit_code, out.finish(), err.finish(), timed_out)

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
            root, parts = _target(remote)
            entries.append({"root": root, "parts": parts, "mode": mode & 0o777, "bytes": len(data)})
            payloads.append(data)
        await self._call({"op": "write", "files": entries}, payloads)

    async def upload_file(self, local: Path, remote: str) -> None:
        """Copy a file of the host inside, with its permission bits."""
        data = await asyncio.to_thread(local.read_bytes)
        await self.upload_content(data, remote, local.stat().st_mode & 0o777)

    async def download_content(self, remote: str) -> bytes:
        """A regular file of the sandbox, at most DOWNLOAD_BYTES; links lead as they do inside."""
        _, data = await self._call({"op": "read", "path": _inside(remote), "limit": DOWNLOAD_BYTES})
        return data

    async def download_file(self, remote: str, local: Path) -> int:
        """Copy a file of the sandbox to the host (written beside and renamed); its size in bytes."""
        data = await self.download_content(remote)
        await asyncio.to_thread(tables.write_beside, local, data)
        return len(data)

    async def list_files(self, path: str = "/") -> list[FileEntry]:
        """Entries of a folder inside, by name, not recursive."""
        reply, _ = await self._call({"op": "list", "path": _inside(path)})
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
        if self.network != "proxy":
            raise SandboxError(f"sandbox {self.sandbox_id} has network {self.network!r}; a route takes 'proxy'")
        self._alive()
        listener = await self._spawner.listen(self.holder_pid, port)
        try:
            await target.adopt(self.episode_id, listener)
        except BaseException:
            listener.close()
            raise
        return f"http://127.0.0.1:{port}/s/{self.episode_id}"

    async def connect(self, port: int) -> socket.socket:
        """A connection to 127.0.0.1:`port` inside; see `Sandbox.connect`."""
        self._alive()
        return await self._spawner.connect(self.holder_pid, port)

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
        if holder is not None:
            await asyncio.to_thread(kill, holder)
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        folder = self._backend.root / self.sandbox_id
        if self._backend.keep is not None and (folder / "work").is_dir():
            # Renamed and not copied: what an agent has planted there is not followed.
            self._backend.keep.mkdir(parents=True, exist_ok=True)
            os.rename(folder / "work", self._backend.keep / self.sandbox_id)
        await asyncio.to_thread(remove, folder)
        (self._backend.root / f"{self.sandbox_id}.json").unlink(missing_ok=True)
        self._backend.sandboxes.pop(self.sandbox_id, None)

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
        return await self._spawner.call({"holder": self.holder_pid, "cwd": "/", **request}, payloads)


class LocalBackend:
    """Makes sandboxes below `root`, each labelled with run, episode and owner.

    Use it from one event loop. The sandboxes die with the owner process however it ends; `owner.reap` removes what
    such a death leaves on disk.

    Args:
        keep: folder (of the same file system) that the work folder of a deleted sandbox is moved to, under the
            sandbox's id; None removes it.
    """

    def __init__(self, root: Path, run: str, owner: Owner, keep: Path | None = None) -> None:
        self.root = root.absolute()
        self.run = run
        self.owner = owner
        self.keep = keep
        self.spawner = Spawner()
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
            network: "none", or "proxy" (the sandbox can `route` to the proxy); both reach nothing else.
            binds: files and folders of the host to show read-only.
            limits: resource limits, else the defaults of `Limits`.

        Raises:
            SandboxError: it cannot be set up; the message says what is missing.
        """
        if network not in ("none", "proxy"):
            raise SandboxUnsupported(f"network {network!r} is not offered by local sandboxes; use 'none' or 'proxy'")
        if image is not None:
            raise SandboxUnsupported(
                f"image {image!r}: local sandboxes have this host's system as their root file system"
            )
        if not episode_id or posixpath.basename(episode_id) != episode_id or episode_id.startswith("."):
            raise SandboxError(f"episode id {episode_id!r} must be a plain name: it names a folder")
        sandbox = LocalSandbox(self, f"{episode_id}-{secrets.token_hex(3)}", episode_id, network, limits or Limits())
        self.sandboxes[sandbox.sandbox_id] = sandbox
        try:
            await self._start(sandbox, binds)
        except BaseException:
            await asyncio.shield(sandbox.delete())
            raise
        return sandbox

    async def _start(self, sandbox: LocalSandbox, binds: Sequence[Bind]) -> None:
        folder = self.root / sandbox.sandbox_id
        label = self.root / f"{sandbox.sandbox_id}.json"
        self.root.mkdir(parents=True, exist_ok=True)
        _write_label(label, Label(self.run, sandbox.episode_id, self.owner, None))
        folder.mkdir()
        (folder / "work").mkdir()
        (folder / "home").mkdir()
        bwrap.write_etc(folder / "etc")
        if self._version is None:
            self._version = bwrap.version()
        argv = bwrap.arguments(folder, binds, sandbox.limits, info_fd=3)
        noted_r, noted_w = os.pipe()
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, noted_w)
            try:
                async with asyncio.timeout(START_SECONDS):
                    pid = await self._run(argv, noted_r)
            except TimeoutError:
                raise SandboxError(f"sandbox {sandbox.sandbox_id} did not start within {START_SECONDS:.0f} s") from None
            sandbox._holder = Owner.of(pid)
            _write_label(label, Label(self.run, sandbox.episode_id, self.owner, sandbox._holder))
            # From here on the reaper knows it; until here it ends by itself when this pipe does.
            os.write(noted_w, b"\n")
        sandbox._pidfd = os.pidfd_open(pid)
        sandbox.holder_pid = pid
        sandbox.isolation = isolation(pid, self._version)

    async def _run(self, argv: list[str], stdin: int) -> int:
        """Start bwrap on `stdin`, which is closed here; the pid of the first process once the sandbox is set up."""
        ours, theirs = [], [stdin]
        try:
            for _ in range(3):  # standard output, standard error, information: the spawner numbers them 0 to 3
                read_end, write_end = os.pipe()
                ours.append(read_end)
                theirs.append(write_end)
            child = await self.spawner.request(theirs)
            _close(theirs)
            await child.send({"op": "bwrap", "argv": argv})
            child.close()
            if not await _read(ours[0]):
                error = b""
                while chunk := await _read(ours[1]):
                    error += chunk
                raise SandboxError(bwrap.explain(error.decode(errors="replace")))
            return int(json.loads(await _read(ours[2]))["child-pid"])  # written before anything ran inside
        finally:
            _close(ours)
            _close(theirs)

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


def isolation(holder_pid: int, version: str) -> str:
    """What separates the sandbox from this process, read from the kernel.

    e.g. "bubblewrap 0.8.0: user,mnt,pid,net,ipc,uts,cgroup; caps none; no_new_privs". The first process is read;
    one that cannot drop its privileges does not join (`join.enter`).
    """
    own = [n for n in _NAMESPACES if _namespace("self", n) != _namespace(holder_pid, n)]
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{holder_pid}/status").read_text().splitlines() if ":\t" in line
    )
    caps = int(status["CapEff"], 16) | int(status["CapPrm"], 16)
    parts = [f"bubblewrap {version}: {','.join(own)}", f"caps {f'{caps:x}' if caps else 'none'}"]
    if status["NoNewPrivs"] == "1":
        parts.append("no_new_privs")
    if os.getuid() == 0:
        parts.append("uid 0 outside")  # RLIMIT_NPROC does not bind it, see Limits
    return "; ".join(parts)


def _namespace(pid: int | str, name: str) -> str:
    return os.readlink(f"/proc/{pid}/ns/{name}")


def _write_label(path: Path, label: Label) -> None:
    """Without flushing it to disk: a label matters only as long as the machine is up."""
    beside = path.with_suffix(".tmp")
    beside.write_text(label.text())
    beside.rename(path)


def _inside(path: str) -> str:
    """The absolute path inside; what is relative is so to the work folder."""
    if not path or "\0" in path:
        raise SandboxFileError(f"{path!r} is no path")
    return posixpath.join(WORK, path)


def _target(remote: str) -> tuple[str, list[str]]:
    """A path to write to, as a writable folder and the names below it."""
    path = _inside(remote)
    parts = [p for p in path.split("/") if p not in ("", ".")]
    for root in _WRITABLE:
        names = root.strip("/").split("/")
        if ".." not in parts and parts[: len(names)] == names and len(parts) > len(names):
            return root, parts[len(names) :]
    raise SandboxError(f"cannot write to {remote!r}: the path must lie below {', '.join(_WRITABLE)}, without '..'")


def _input(data: bytes | None) -> int:
    """A descriptor to read `data` from."""
    if data is None:
        return os.open("/dev/null", os.O_RDONLY)
    fd = os.memfd_create("stdin")
    with open(fd, "wb", closefd=False) as f:
        f.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


async def _read(fd: int) -> bytes:
    """What can be read, when something can; empty at the end."""
    await readable(fd)
    return os.read(fd, 1 << 16)


def _close(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())
