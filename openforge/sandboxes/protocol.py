"""What every sandbox backend offers: the method names of Orchard's async client, plus the route to the proxy."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

Network = Literal["none", "proxy"]


class SandboxError(RuntimeError):
    """A sandbox could not be set up, or refused an operation; the message says what would be right."""


class SandboxLost(SandboxError):
    """The sandbox, or the process that keeps it, died under the caller."""


class SandboxFileError(SandboxError):
    """A file inside is missing, of another kind, or too large. `errno` is None for a limit of ours."""

    def __init__(self, message: str, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno


@dataclass(frozen=True)
class ExecResult:
    """The end of a command.

    Attributes:
        exit_code: exit status; -n if signal n ended it; None if it ran out of time.
        stdout: standard output; beyond the cap (1 MiB) its middle is replaced by a marker line.
        stderr: standard error, likewise.
        timed_out: it used up `timeout` and was killed with everything it had started.
    """

    exit_code: int | None
    stdout: bytes
    stderr: bytes
    timed_out: bool


@dataclass(frozen=True)
class FileEntry:
    """An entry of a folder inside: its type is file, directory, symlink or other; `modified` is epoch seconds."""

    name: str
    type: str
    size: int
    modified: float


class Adopter(Protocol):
    """The proxy, as a sandbox sees it: it takes a listener whose connections belong to one episode."""

    async def adopt(self, episode_id: str, listener: socket.socket) -> None: ...


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
        """Network mode in force: none or proxy."""

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

    async def route(self, proxy: Adopter) -> str:
        """Open the sandbox's only way out, to the proxy; returns the episode's base URL as seen from inside."""

    async def end_processes(self) -> None:
        """Kill every process inside and return when all are dead; files and route stay."""

    async def delete(self) -> None:
        """Kill everything inside and remove its files; again is harmless."""
