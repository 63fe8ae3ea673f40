"""The server's side of a spawner that outlives it: sandboxes and jobs go on while a killed server is started again."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from openforge.sandboxes.owner import Owner
from openforge.sandboxes.protocol import SandboxError
from openforge.sandboxes.requests import Spawner
from openforge.sandboxes.spawner import END, END_SECONDS

SOCKET = "keeper.sock"
_START_SECONDS = 30.0


class Keeper(Spawner):
    """The keeper of a folder: the one that runs there, else a new one.

    It ends, and every sandbox with it, when no server has been connected for `grace` seconds.
    """

    def __init__(self, folder: Path, grace: float) -> None:
        super().__init__()
        self.folder, self.grace = folder, grace
        self.owner: Owner | None = None

    def ensure(self) -> Owner:
        """The keeper's process, which is started where there is none (any more).

        Raises:
            SandboxError: it does not start.
        """
        if self.owner is None or not self.owner.alive() or (self._control is not None and _hung_up(self._control)):
            if self._control is not None:
                self._control.close()
            self._start()
        assert self.owner is not None
        return self.owner

    @property
    def pid(self) -> int | None:
        """The keeper's pid."""
        return None if self.owner is None else self.owner.pid

    def _start(self) -> socket.socket:
        control = self._met()
        if control is None:
            self._launch()
            control = self._met()
        if control is None:
            raise SandboxError(f"the keeper of {self.folder} does not start")
        self._control = control
        return control

    def _met(self) -> socket.socket | None:
        """A connection to the keeper that runs; it says its pid first."""
        control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.settimeout(_START_SECONDS)
        try:
            with _reached(self.folder) as path:
                control.connect(path)
            said = control.recv(32)
            self.owner = Owner.of(int(said))
        except (OSError, ValueError, SandboxError):  # none there, or it was just ending
            control.close()
            return None
        control.settimeout(None)
        return control

    def _launch(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, _reached(self.folder) as path:
            (self.folder / SOCKET).unlink(missing_ok=True)
            listener.bind(path)
            os.chmod(path, 0o600)
            listener.listen(16)
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "spawner.py", "keep", str(self.grace)],
                stdin=listener.fileno(),
                stdout=subprocess.DEVNULL,
                env={},
                cwd=Path(__file__).parent,
                start_new_session=True,
            )

    async def close(self) -> None:
        """End the keeper, and with it every sandbox and job that is still there."""
        control, self._control = self._control, None
        if control is None or self.owner is None:
            return
        with control, contextlib.suppress(OSError):
            pidfd = os.pidfd_open(self.owner.pid)
            try:
                control.send(END)
                select.select([pidfd], [], [], END_SECONDS)
            finally:
                os.close(pidfd)
        if self._process is not None:
            self._process.wait()
        self._process = self.owner = None
        (self.folder / SOCKET).unlink(missing_ok=True)


@contextlib.contextmanager
def _reached(folder: Path) -> Iterator[str]:
    """A short path of the socket: a socket's own holds 107 bytes."""
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{fd}/{SOCKET}"
    finally:
        os.close(fd)


def _hung_up(control: socket.socket) -> bool:
    """Whether the other end is closed: of a process that is being killed, before it counts as dead."""
    poll = select.poll()
    poll.register(control, select.POLLRDHUP)
    return bool(poll.poll(0))
