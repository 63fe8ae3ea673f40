"""A command that outlives whoever asked for it: the spawner's child of a job, standard library only.

The child stays outside the sandbox. It reads the command's outputs, keeps their start and their end, and writes them
and the end of the command to files, so that a server that was killed finds them when it is back. It does not end when
the requester hangs up; it does on a byte from it or on SIGTERM.

The job's record is a file of JSON lines. The requester writes the first, holds a lock (flock) on it and hands it over
open: as long as the lock is held, somebody may still begin or end the job. This child adds {"pid", "start", "started"}
before anything of the command runs, and {"exit", "timed_out", "cancelled", "ended", "stdout", "stderr"} (or {"error",
"lost", "ended"}) after.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import time
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING or __package__:
    from openforge.sandboxes import join, spawner
else:
    import join
    import spawner

OUTPUT_BYTES = 1 << 20  # of each output kept: half from its start, half from its end
GRACE_SECONDS = 15.0  # beyond a command's time limit: a supervisor that the agent has stopped cannot keep it
_CHUNK = 1 << 16


class Output:
    """One output of a command: its start goes to a file as it comes, its end when it is over.

    The file is made with its first byte, below the folder that `folder` (a descriptor) names.
    """

    def __init__(self, folder: int, name: str) -> None:
        self.read_end, self.write_end = os.pipe()
        os.set_blocking(self.read_end, False)
        self.total = 0
        self._folder, self._name = folder, name
        self._file = -1
        self._head_room, self._tail = OUTPUT_BYTES // 2, bytearray()

    def read(self) -> bool:
        """Read once; whether there may be more."""
        try:
            data = os.read(self.read_end, _CHUNK)
        except BlockingIOError:
            return False
        self.total += len(data)
        head, rest = data[: self._head_room], data[self._head_room :]
        self._head_room -= len(head)
        self._write(head)
        self._tail += rest
        if len(self._tail) > OUTPUT_BYTES:  # cut now and then, not on every read
            del self._tail[: -OUTPUT_BYTES // 2]
        return bool(data)

    def finish(self) -> None:
        """Write the end, now that the command is over: a daemon that has the output open is not waited for."""
        for _ in range(1024):  # it could fill it for ever
            if not self.read():
                break
        tail = bytes(self._tail[-OUTPUT_BYTES // 2 :])
        left_out = self.total - (OUTPUT_BYTES // 2 - self._head_room) - len(tail)
        self._write(f"\n[... {left_out} bytes left out ...]\n".encode() if left_out else b"")
        self._write(tail)

    def _write(self, data: bytes) -> None:
        if data and self._file < 0:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            self._file = os.open(self._name, flags, 0o600, dir_fd=self._folder)
        view = memoryview(data)
        while view:
            view = view[os.write(self._file, view) :]


def run(channel: spawner.Channel, request: spawner.Request, fds: list[int]) -> NoReturn:
    """Run the job of a request: its descriptors are the record, the folder of the outputs, and standard input."""
    record, folder, stdin = fds
    wake = _wake_on_term()
    with open("/proc/self/stat", "rb") as f:
        start = int(f.read().rpartition(b")")[2].split()[19])
    outputs: list[Output] = []
    try:
        groups = join.open_groups(request["groups"])
        join.enter(request["holder"], request["cwd"])
        _note(record, {"pid": os.getpid(), "start": start, "started": time.time()})
        outputs += [Output(folder, f"{request['job']}.out"), Output(folder, f"{request['job']}.err")]
        end = _supervise(channel, request, stdin, outputs, groups, wake)
        for output in outputs:
            output.finish()
    except join.JoinError as e:
        end = {"error": e.strerror or str(e), "errno": e.errno, "lost": True}
    except OSError as e:
        where = f"{e.filename} inside the sandbox" if e.filename else "the job's files"
        end = {"error": f"{where}: {e.strerror}", "errno": e.errno, "lost": False}
    end["ended"] = time.time()
    end["stdout"], end["stderr"] = [output.total for output in outputs] or [0, 0]
    with contextlib.suppress(OSError):  # a full disk: the requester is told, if it is there
        _note(record, end)
    channel.answer(end)
    os._exit(0)


def _note(record: int, line: dict[str, Any]) -> None:
    os.write(record, json.dumps(line).encode() + b"\n")


def _wake_on_term() -> int:
    """A descriptor that can be read once SIGTERM has come."""
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    return read_end


def _supervise(
    channel: spawner.Channel,
    request: spawner.Request,
    stdin: int,
    outputs: list[Output],
    groups: list[int],
    wake: int,
) -> dict[str, Any]:
    """Run the command in a child inside; read its outputs until it has ended, ran out of time or is cancelled."""
    fds = [stdin, *(o.write_end for o in outputs)]
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        ours.close()
        channel.sock.close()
        join.run_and_exit(lambda: spawner.inner(spawner.Channel(theirs), request, fds, groups))
    theirs.close()
    for fd in (*fds, *groups):
        os.close(fd)
    pidfd = os.pidfd_open(pid)
    poll = select.poll()
    for fd in (pidfd, wake, channel.sock.fileno(), *(o.read_end for o in outputs)):
        poll.register(fd, select.POLLIN)
    reading = {o.read_end: o for o in outputs}
    deadline = None if request["timeout"] is None else time.monotonic() + request["timeout"] + GRACE_SECONDS
    late, cancelled, asked = False, False, channel.more()
    while True:
        left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        ready = {fd for fd, _ in poll.poll(0 if asked else left)}
        for fd in ready & reading.keys():
            if not reading[fd].read():
                poll.unregister(fd)
        if pidfd in ready:
            break
        asked = asked or wake in ready
        if channel.sock.fileno() in ready:
            with contextlib.suppress(OSError):
                asked = bool(channel.sock.recv(1)) or asked
            poll.unregister(channel.sock)  # one byte is all that it says; or it is gone
        if asked:
            cancelled, asked = True, False
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 4096)
            ours.shutdown(socket.SHUT_WR)  # its turn first: it kills the command's whole tree
            deadline = time.monotonic() + spawner.KILL_SECONDS + 1  # the agent may have stopped it, though
        if deadline is not None and time.monotonic() >= deadline:
            os.kill(pid, signal.SIGKILL)
            deadline, late = None, True
    os.waitpid(pid, 0)
    end = _answer(ours) or {"exit": None if late else -9, "timed_out": late}
    return {**end, "timed_out": end["timed_out"] and not cancelled, "cancelled": cancelled}


def _answer(sock: socket.socket) -> dict[str, Any] | None:
    """What the child inside said; killed before it could, it was the agent, the end of the sandbox, or our deadline."""
    sock.setblocking(False)
    said = b""
    with contextlib.suppress(OSError):
        while data := sock.recv(_CHUNK):
            said += data
    if said:
        reply: dict[str, Any] = json.loads(said)
        reply.pop("size")
        return reply
    return None
