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

    def close_write_end(self) -> None:
        """Leave the writing to the command; again is harmless."""
        self.write_end = _closed(self.write_end)

    def close(self) -> None:
        """Close what is open."""
        self.close_write_end()
        self.read_end = _closed(self.read_end)
        self._file = _closed(self._file)

    def _write(self, data: bytes) -> None:
        if data and self._file < 0:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            self._file = os.open(self._name, flags, 0o600, dir_fd=self._folder)
        view = memoryview(data)
        while view:
            view = view[os.write(self._file, view) :]


def run(channel: spawner.Channel, request: spawner.Request, fds: list[int], keeper: socket.socket | None) -> NoReturn:
    """Run the job of a request, and then those that `keeper` hands over.

    A job's descriptors are the record, the folder of the outputs, and standard input.
    """
    try:
        worker = Worker(request["holder"], request["groups"])
    except OSError as e:
        _finish(channel, fds[0], _refused(e), [])
        os._exit(0)
    while worker.run(channel, request, fds, keeper) and keeper is not None:
        channel_fd, *fds = worker.idle(keeper)
        channel = spawner.Channel(channel_fd)
        request = channel.request()
    os._exit(0)


class Worker:
    """A child outside that has joined a sandbox, and one inside that starts commands: for one job after another.

    Both are kept, because what makes a job dear is a forked interpreter that copies each page it touches, and joining.
    The one inside is the agent's to kill or to stop, also between two jobs: it is made anew or told to go on. It is not
    used again if the command has left anything running, which the sandbox's first process takes over by its end.
    """

    def __init__(self, holder: int, groups: list[str]) -> None:
        self._wake = _wake_on_term()
        self._start = _start_time()
        self._groups = join.open_groups(groups)
        try:
            self._holder = os.pidfd_open(holder)
        except ProcessLookupError as e:
            raise join.JoinError(e.errno, f"the sandbox of holder process {holder} is gone") from None
        join.enter(holder, "/")
        self._inside: Inside | None = None

    def run(
        self, channel: spawner.Channel, request: spawner.Request, fds: list[int], keeper: socket.socket | None
    ) -> bool:
        """Run a job and close its descriptors; whether the next may come."""
        record, folder, stdin = fds
        outputs: list[Output] = []
        whole = False
        try:
            os.chdir(request["cwd"])
            self._told_to_end()  # whoever said so meant an earlier job
            _note(record, {"pid": os.getpid(), "start": self._start, "started": time.time()})
            outputs += [Output(folder, f"{request['job']}.out"), Output(folder, f"{request['job']}.err")]
            end = self._supervise(channel, request, stdin, outputs)
            for output in outputs:
                output.finish()
            whole = True
        except OSError as e:  # our end, if it is in the middle, ends the command
            end = _refused(e)
        # A requester that is there knows how the job ended. Another that looks for this process by the record finds
        # it ended: it may not take the next job for this one.
        again = whole and keeper is not None and not _hung_up(channel.fd)
        _finish(channel, record, end, outputs, keeper if again else None)
        for output in outputs:
            output.close()
        for fd in (channel.fd, *fds):
            os.close(fd)
        return again

    def idle(self, keeper: socket.socket) -> list[int]:
        """The descriptors of the next job; leaves the process when the keeper or the sandbox has none."""
        poll = select.poll()
        poll.register(keeper, select.POLLIN)
        poll.register(self._holder, select.POLLIN)
        inside = self._inside
        if inside is not None:
            poll.register(inside.pidfd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if inside is not None and inside.pidfd in ready:
                # Reaped at once: the sandbox's first process cannot end before.
                poll.unregister(inside.pidfd)
                self._lose()
                inside = None
            if self._holder in ready:
                os._exit(0)
            if keeper.fileno() in ready:
                data, fds, _, _ = socket.recv_fds(keeper, 1, 8, socket.MSG_CMSG_CLOEXEC)
                if not data:
                    os._exit(0)
                return fds

    def _lose(self) -> None:
        if self._inside is not None:
            self._inside.close()
            self._inside = None

    def _told_to_end(self) -> bool:
        try:
            return signal.SIGTERM in os.read(self._wake, 4096)
        except BlockingIOError:
            return False

    def _supervise(
        self, channel: spawner.Channel, request: spawner.Request, stdin: int, outputs: list[Output]
    ) -> dict[str, Any]:
        """Have the command run inside; read its outputs until it has ended, ran out of time or is cancelled."""
        if self._inside is not None and self._inside.dead():
            self._lose()
        self._inside = inside = self._inside or Inside(self._groups)
        hang_up, answer = inside.begin(request, [stdin, *(o.write_end for o in outputs)])
        for output in outputs:
            output.close_write_end()
        poll = select.poll()
        for fd in (inside.pidfd, answer, self._wake, channel.fd, *(o.read_end for o in outputs)):
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
            if inside.pidfd in ready or answer in ready:
                break
            asked = asked or (self._wake in ready and self._told_to_end())
            if channel.fd in ready:
                with contextlib.suppress(OSError):
                    asked = bool(os.read(channel.fd, 1)) or asked
                poll.unregister(channel.fd)  # one byte is all that it says; or it is gone
            if asked:
                cancelled, asked = True, False
                hang_up = _closed(hang_up)  # its turn first: it kills the command's whole tree
                deadline = time.monotonic() + spawner.KILL_SECONDS + 1  # the agent may have stopped it, though
            if deadline is not None and time.monotonic() >= deadline:
                os.kill(inside.pid, signal.SIGKILL)
                deadline, late = None, True
        end = _answer(answer)
        if end is None or not end.pop("free"):
            self._lose()
        _closed(hang_up)
        _closed(answer)
        if end is not None and "error" in end:
            return end
        end = end or {"exit": None if late else -9, "timed_out": late}
        return {**end, "timed_out": end["timed_out"] and not cancelled, "cancelled": cancelled}


class Inside:
    """The child inside, from outside: it starts one command at a time and waits for it."""

    def __init__(self, groups: list[int]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.pid = os.fork()
            if self.pid == 0:
                os.setsid()
                signal.set_wakeup_fd(-1)
                join.close_others((0, 1, 2, theirs.fileno(), *groups))
                join.run_and_exit(lambda: _inside(theirs, groups))
        self.pidfd = os.pidfd_open(self.pid)

    def dead(self) -> bool:
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def begin(self, request: spawner.Request, fds: list[int]) -> tuple[int, int]:
        """Start the request's command in this process's folder; (what to close to end it, where its answer comes)."""
        hang_up_r, hang_up_w = os.pipe()
        answer_r, answer_w = os.pipe()
        # In memory and not through the socket: to one that the agent has stopped, a long request would not go.
        text = os.memfd_create("request")
        os.write(text, json.dumps({name: request[name] for name in ("argv", "env", "timeout", "limits")}).encode())
        folder = os.open(".", os.O_PATH | os.O_DIRECTORY)
        with contextlib.suppress(OSError):  # it has been killed: its pidfd says so
            socket.send_fds(self._control, [b"+"], [text, folder, hang_up_r, answer_w, *fds])
            os.kill(self.pid, signal.SIGCONT)
        for fd in (text, folder, hang_up_r, answer_w):
            os.close(fd)
        return hang_up_w, answer_r

    def close(self) -> None:
        """End it: the command has ended, or it is dead."""
        os.kill(self.pid, signal.SIGKILL)  # the agent may have stopped it; not reaped yet, it is still there
        os.waitpid(self.pid, 0)
        os.close(self.pidfd)
        self._control.close()


def _inside(control: socket.socket, groups: list[int]) -> None:
    """The child inside: one command after another, as long as none leaves anything behind."""
    while True:
        data, received, _, _ = socket.recv_fds(control, 1, 8, socket.MSG_CMSG_CLOEXEC)
        if not data:
            return
        text, folder, hang_up, answer, *fds = received
        with open(text, "rb") as f:
            f.seek(0)
            request = json.loads(f.read())
        os.fchdir(folder)
        os.close(folder)
        channel = spawner.Channel(hang_up, answer)
        try:
            end = spawner.execute(channel, request, fds, [os.dup(fd) for fd in groups])
            free = not end["timed_out"] and _childless()
        except OSError as e:
            end, free = {"error": f"starting the command: {e.strerror}", "errno": e.errno, "lost": False}, False
        channel.answer({**end, "free": free})
        os.close(hang_up)
        os.close(answer)
        if not free:
            return


def _childless() -> bool:
    """Whether nothing is left of a command: what its processes leave behind becomes ours, so all would hang on us."""
    spawner.reap()
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False


def _finish(
    channel: spawner.Channel,
    record: int,
    end: dict[str, Any],
    outputs: list[Output],
    keeper: socket.socket | None = None,
) -> None:
    """Write down how a job ended; tell `keeper` that the next may come, and the requester the end, in this order."""
    end["ended"] = time.time()
    end["stdout"], end["stderr"] = [output.total for output in outputs] or [0, 0]
    with contextlib.suppress(OSError):  # a full disk: the requester is told, if it is there
        _note(record, end)
    if keeper is not None:
        with contextlib.suppress(OSError):
            keeper.send(b".")
    channel.answer(end)


def _refused(error: OSError) -> dict[str, Any]:
    if isinstance(error, join.JoinError):
        return {"error": error.strerror or str(error), "errno": error.errno, "lost": True}
    where = f"{error.filename} inside the sandbox" if error.filename else "the job's files"
    return {"error": f"{where}: {error.strerror}", "errno": error.errno, "lost": False}


def _start_time() -> int:
    with open("/proc/self/stat", "rb") as f:
        return int(f.read().rpartition(b")")[2].split()[19])


def _note(record: int, line: dict[str, Any]) -> None:
    os.write(record, json.dumps(line).encode() + b"\n")


def _closed(fd: int) -> int:
    if fd >= 0:
        os.close(fd)
    return -1


def _hung_up(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLRDHUP)
    return bool(poll.poll(0))


def _wake_on_term() -> int:
    """A descriptor that can be read once SIGTERM has come, or a child's end."""
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    return read_end


def _answer(pipe: int) -> dict[str, Any] | None:
    """What the child inside said; killed before it could, it was the agent, the end of the sandbox, or our deadline."""
    said = b""
    while not said.endswith(b"\n") and (data := os.read(pipe, _CHUNK)):
        said += data
    if not said:
        return None
    reply: dict[str, Any] = json.loads(said)
    reply.pop("size")
    return reply
