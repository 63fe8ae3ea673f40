"""What every sandbox backend offers: the method names of Orchard's async client, plus the route to the proxy."""

from __future__ import annotations

import platform
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

Network = Literal["none", "proxy", "open"]
PORT = 8080  # of the proxy, on the sandbox's own loopback


class SandboxError(RuntimeError):
    """A sandbox could not be set up, or refused an operation; the message says what would be right."""


class SandboxLost(SandboxError):
    """The sandbox, or the process that keeps it, died under the caller."""


class SandboxFull(SandboxError):
    """There is no room for another sandbox now; `retry_after` says in how many seconds to ask again."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class SandboxUnsupported(SandboxError):
    """The backend does not offer what is asked of it, and never will as it stands: trying again is of no use."""


class SandboxFileError(SandboxError):
    """A file inside is missing, of another kind, or too large. `errno` is None for a limit of ours."""

    def __init__(self, message: str, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno


@dataclass(frozen=True)
class Bind:
    """A file or folder of the host, read-only inside, at the same path unless `inside` names another."""

    host: Path
    inside: str | None = None


@dataclass(frozen=True)
class Limits:
    """Limits of a sandbox; None is no limit.

    What is asked and cannot be had here is an error, unless `best_effort`; but `processes`, which has a default, is
    held by what there is. `Sandbox.isolation` names what holds each.

    Attributes:
        file_bytes: size of any one file written.
        cpu_seconds: CPU time of any one process.
        open_files: descriptors of any one process.
        processes: processes at once: a control group, else RLIMIT_NPROC (a sandbox's own count from Linux 5.14 on,
            not set before; the kernel does not apply it when the owner is root).
        tmp_bytes: each of /tmp and /dev/shm, which lie in memory.
        memory_bytes: memory of all its processes, files of /tmp and /dev/shm and (with `disk_bytes`) of the disk
            included: a control group. There is nothing else: a limit of the address space (RLIMIT_AS) stops node and
            chromium, which reserve far more than they use. The kernel kills a process of the sandbox that is over it.
        cpus: processors' worth of CPU time: a control group.
        disk_bytes: everything written outside of /tmp and /dev/shm. It then lies in memory (a tmpfs of this size),
            which is all that an ordinary user can be given a limit of, and needs that much less than it allows.
        best_effort: leave out what this machine cannot hold.
    """

    file_bytes: int | None = 1 << 30
    cpu_seconds: int | None = 3600
    open_files: int | None = 4096
    processes: int | None = 1024
    tmp_bytes: int = 512 << 20
    memory_bytes: int | None = None
    cpus: float | None = None
    disk_bytes: int | None = None
    best_effort: bool = False

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise SandboxError(f"limits.{name} = {value}: at least {least}")

    def rlimits(self) -> dict[str, int]:
        """For `join.set_limits`."""
        wanted = {"FSIZE": self.file_bytes, "CPU": self.cpu_seconds, "NOFILE": self.open_files}
        if kernel() >= (5, 14):
            wanted["NPROC"] = self.processes
        return {"CORE": 0, **{name: value for name, value in wanted.items() if value is not None}}


_LEAST = {
    **{"file_bytes": 1 << 12, "cpu_seconds": 1, "open_files": 16, "processes": 4, "tmp_bytes": 1 << 12},
    **{"memory_bytes": 4 << 20, "cpus": 0.01, "disk_bytes": 1 << 20},
}


def kernel() -> tuple[int, ...]:
    """Linux's release, (major, minor)."""
    return tuple(int(n) for n in platform.release().split("-")[0].split(".")[:2] if n.isdigit())


@dataclass(frozen=True)
class ExecResult:
    """The end of a command.

    Attributes:
        exit_code: exit status; -n if signal n ended it; None if it ran out of time.
        stdout: standard output; beyond the cap (1 MiB) its middle is replaced by a marker line.
        stderr: standard error, likewise.
        timed_out: it used up `timeout` and was killed with everything it had started.
        note: why it ended, where that is not the command's own doing: e.g. that the kernel killed a process of the
            sandbox at its limit of memory.
    """

    exit_code: int | None
    stdout: bytes
    stderr: bytes
    timed_out: bool
    note: str | None = None


@dataclass(frozen=True)
class FileEntry:
    """An entry of a folder inside: its type is file, directory, symlink or other; `modified` is epoch seconds."""

    name: str
    type: str
    size: int
    modified: float


class Adopter(Protocol):
    """What a sandbox is given a way to: the recording proxy, or a service of the environment that runs outside.

    A sandbox of this host hands over a listener of its own network, whose connections belong to one episode; one that
    runs elsewhere connects to `public_url`.
    """

    def public_url(self, episode_id: str) -> str:
        """The episode's base URL for a sandbox off this host; raises an error of its own where there is none."""

    async def adopt(self, episode_id: str, listener: socket.socket) -> None:
        """Serve the connections of a listener, which is the adopter's to close."""


class Sandbox(Protocol):
    """A running sandbox.

    Paths inside are relative to the work folder /workspace, or absolute. Every method raises `SandboxLost` when
    the sandbox is gone and `SandboxError` when it refuses.
    """

    @property
    def sandbox_id(self) -> str:
        """Identity of the sandbox, unique within its backend."""

    @property
    def isolation(self) -> str:
        """What separates it from the host, as reached and not as asked for."""

    @property
    def network(self) -> str:
        """Network mode in force: none, proxy (what `route` opens and nothing else), or open (the host's network)."""

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
        """Run a command: a string by `bash -c`, a sequence as it stands.

        Args:
            timeout: seconds; None waits for ever.
            cwd: folder inside, else the work folder.
            env: laid over the sandbox's own environment.
            stdin: standard input, else empty.
            log: file outside that both outputs are appended to as they come.
        """

    async def upload_content(self, data: bytes, remote: str, mode: int = 0o644) -> None:
        """Write a file inside, replacing whatever is in its place; missing folders are made."""

    async def upload_file(self, local: Path, remote: str) -> None:
        """Copy a file of the host inside, with its permission bits."""

    async def download_content(self, remote: str) -> bytes:
        """A file of the sandbox; `SandboxFileError` if it is missing, no regular file, or too large."""

    async def download_file(self, remote: str, local: Path) -> int:
        """Copy a file of the sandbox to the host (written beside and renamed); its size in bytes."""

    async def list_files(self, path: str = "/") -> list[FileEntry]:
        """Entries of a folder inside, by name, not recursive."""

    async def apply_patch(self, patch: str, timeout: float = 30) -> ExecResult:
        """`git apply` in the work folder; a patch that does not fit is an exit code, not an error."""

    async def start_heartbeat(self, interval: float = 60) -> None:
        """Tell a remote backend from time to time that the sandbox is still wanted."""

    async def stop_heartbeat(self) -> None:
        """End `start_heartbeat`."""

    async def route(self, target: Adopter, port: int = PORT) -> str:
        """Open a way out to `target`, at 127.0.0.1:`port` inside where the backend can; returns the episode's base URL
        as seen from inside. Network `proxy` has no other ways out than these."""

    async def connect(self, port: int) -> socket.socket:
        """A connection to 127.0.0.1:`port` inside, for a service of the environment that runs there.

        Raises:
            ConnectionRefusedError: nobody listens there (yet).
            SandboxError: the backend has no way in.
        """

    async def companion(
        self,
        *,
        network: Network = "none",
        image: str | None = None,
        binds: Sequence[Bind] = (),
        limits: Limits | None = None,
    ) -> Sandbox:
        """Another sandbox of the same backend and episode, which the agent cannot reach: for services, for grading.
        It is deleted with this one at the latest."""

    async def end_processes(self) -> None:
        """Kill every process inside and return when all are dead; files and route stay."""

    async def delete(self) -> None:
        """Kill everything inside and remove its files; again is harmless."""


class Backend(Protocol):
    """Makes sandboxes of one kind."""

    async def create(
        self,
        episode_id: str,
        *,
        network: Network = "proxy",
        image: str | None = None,
        binds: Sequence[Bind] = (),
        limits: Limits | None = None,
    ) -> Sandbox:
        """Start a sandbox.

        Args:
            episode_id: the episode it serves; one episode may have several sandboxes.
            network: see `Sandbox.network`.
            image: root file system: an OCI image archive, or a reference where the backend has a registry; None is the
                backend's own default (of the local one, this host's system, read-only).
            binds: files and folders of the host that must stand inside, read-only; a backend that cannot bind copies.
            limits: resource limits, else the defaults of `Limits`.

        Raises:
            SandboxFull: there is no room now.
            SandboxUnsupported: the network, image, binds or limits are not to be had of this backend.
            SandboxError: it cannot be set up; the message says what is missing.
        """

    async def close(self) -> None:
        """Delete every sandbox that is left."""
