"""The process INSIDE a sandbox of an Orchard service that runs one command: standard library only, see `inside`."""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import socket
import time
from typing import Any, NoReturn

OUTPUT_BYTES = 1 << 20  # of each output kept: half from its start, half from its end
LOG_BYTES = 64 << 20  # of both outputs in a log
_LOG_PIECE = 256 << 10
_LOG_SECONDS = 1.0  # what was written reaches the log's files after so long at the latest
_INLINE = 48 << 10  # outputs as long as this together go into the state
_CHUNK = 1 << 16
_KILL_SECONDS = 5.0
_PR_SET_CHILD_SUBREAPER = 36


def replace(path: str, data: bytes) -> None:
    """Write a file beside and rename it; its folder is made if somebody removed it."""
    os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
    beside = f"{path}.{os.getpid()}"
    with open(beside, "wb") as f:
        f.write(data)
    os.replace(beside, path)


def state(folder: str) -> dict[str, Any] | None:
    """What is published of a command, None if nothing is."""
    try:
        with open(f"{folder}/state", "rb") as f:
            found: dict[str, Any] = json.loads(f.read())
            return found
    except FileNotFoundError:
        return None


def publish(
    folder: str, pieces: int, exit_code: int | None, timed_out: bool = False, out: bytes = b"", err: bytes = b""
) -> dict[str, Any]:
    """Write the state of a command that ended, its outputs before it."""
    ended: dict[str, Any] = {"exit": exit_code, "timed_out": timed_out}
    for name, data in (("out", out), ("err", err)):
        if len(out) + len(err) <= _INLINE:
            ended[name] = base64.b64encode(data).decode()
        else:
            replace(f"{folder}/{name}", data)
            ended[name] = None
    found = {"pieces": pieces, "ended": ended}
    replace(f"{folder}/state", json.dumps(found).encode())
    return found


class Output:
    """One output of a command, its start and its end."""

    def __init__(self) -> None:
        self.fd, self.write_end = os.pipe()
        os.set_blocking(self.fd, False)
        self._head, self._tail, self._total = bytearray(), bytearray(), 0

    def read(self) -> bytes | None:
        """What can be read now: empty at the end, None if there is nothing."""
        try:
            data = os.read(self.fd, _CHUNK)
        except BlockingIOError:
            return None
        self._total += len(data)
        room = OUTPUT_BYTES // 2 - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > OUTPUT_BYTES:  # cut now and then, not on every read
            del self._tail[: -OUTPUT_BYTES // 2]
        return data

    def kept(self) -> bytes:
        """What is kept, with a line in the middle's place."""
        tail = bytes(self._tail[-OUTPUT_BYTES // 2 :])
        left_out = self._total - len(self._head) - len(tail)
        mark = f"\n[... {left_out} bytes left out ...]\n".encode() if left_out else b""
        return bytes(self._head) + mark + tail


class Log:
    """Both outputs as they come, in files of their own, which are whole when they are there."""

    def __init__(self, folder: str, wanted: bool) -> None:
        self.pieces = 0
        self._folder = folder
        self._left = LOG_BYTES if wanted else 0
        self._data = bytearray()
        self._since = 0.0

    def add(self, data: bytes) -> None:
        if self._left and data:
            self._since = self._since or time.monotonic()
            self._data += data[: self._left]
            self._left = max(0, self._left - len(data))
            if not self._left:
                self._data += f"\n[the log ends here: {LOG_BYTES} bytes]\n".encode()

    def due(self) -> float | None:
        """Seconds until a piece must go out."""
        if not self._data:
            return None
        return 0.0 if len(self._data) >= _LOG_PIECE else max(0.0, self._since + _LOG_SECONDS - time.monotonic())

    def flush(self) -> None:
        if self._data:
            replace(f"{self._folder}/log.{self.pieces}", bytes(self._data))
            self.pieces += 1
            self._data.clear()
            self._since = 0.0


class Supervisor:
    """Runs one command and publishes its end. A fresh process with one thread, in a session of its own."""

    def __init__(self, folder: str, request: dict[str, Any], stdin: bytes, listener: socket.socket) -> None:
        self._folder = folder
        self._listener = listener  # for whoever wants to know whether this process lives
        self._request = request
        self._log = Log(folder, request["log"])
        self._outputs = (Output(), Output())
        self._input = _input(folder, stdin)
        self._deadline = None if request["timeout"] is None else time.monotonic() + request["timeout"]

    def run(self) -> None:
        if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError("becoming a subreaper")
        replace(f"{self._folder}/state", b'{"pieces": 0, "ended": null}')
        wake_r, wake_w = os.pipe()
        os.set_blocking(wake_r, False)
        os.set_blocking(wake_w, False)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, lambda number, frame: None)
        pid = os.fork()
        if pid == 0:
            _command(self._request, (self._input, *(o.write_end for o in self._outputs)))
        for fd in (self._input, *(o.write_end for o in self._outputs)):
            os.close(fd)
        exit_code, timed_out = self._watch(pid, wake_r)
        for output in self._outputs:
            for _ in range(1024):  # the command is dead: its words are in the pipe; a daemon could fill it for ever
                data = output.read()
                if not data:
                    break
                self._log.add(data)
        self._log.flush()
        out, err = (o.kept() for o in self._outputs)
        publish(self._folder, self._log.pieces, exit_code, timed_out, out, err)

    def _watch(self, pid: int, wake_r: int) -> tuple[int | None, bool]:
        """Until the command ends, has used up its time, or is to be ended: exit code, and whether time ran out."""
        poll = select.poll()
        self._listener.setblocking(False)
        for fd in (wake_r, self._listener.fileno(), *(o.fd for o in self._outputs)):
            poll.register(fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll(self._patience())}
            for output in self._outputs:
                if output.fd in ready:
                    data = output.read()
                    if data == b"":
                        poll.unregister(output.fd)
                    self._log.add(data or b"")
            if self._listener.fileno() in ready:
                with contextlib.suppress(OSError):
                    self._listener.accept()[0].close()
            if self._log.due() == 0.0:
                self._log.flush()
                replace(f"{self._folder}/state", json.dumps({"pieces": self._log.pieces, "ended": None}).encode())
            numbers = b""
            with contextlib.suppress(BlockingIOError):
                numbers = os.read(wake_r, 4096)
            status = _reap(pid)
            if status is not None:
                return _exit_code(status), False
            if signal.SIGTERM in numbers:
                _kill_tree(pid)
                return -signal.SIGKILL, False
            if self._deadline is not None and time.monotonic() >= self._deadline:
                _kill_tree(pid)
                return None, True

    def _patience(self) -> float | None:
        """Milliseconds until something is due without an event."""
        left = [d for d in (self._log.due(),) if d is not None]
        if self._deadline is not None:
            left.append(max(0.0, self._deadline - time.monotonic()))
        return min(left) * 1000 + 1 if left else None


def _input(folder: str, data: bytes) -> int:
    """A descriptor to read `data` from."""
    if not data:
        return os.open("/dev/null", os.O_RDONLY)
    replace(f"{folder}/stdin", data)
    fd = os.open(f"{folder}/stdin", os.O_RDONLY)
    os.unlink(f"{folder}/stdin")
    return fd


def _command(request: dict[str, Any], fds: tuple[int, ...]) -> NoReturn:
    """The command's own process, up to its execve."""
    try:
        os.setsid()
        high = [os.dup(fd) for fd in fds]
        for i, fd in enumerate(high):
            os.dup2(fd, i)
        os.closerange(3, 1 << 16)
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            with contextlib.suppress(OSError):  # KILL, STOP and libc's own cannot be set
                signal.signal(number, signal.SIG_DFL)
        os.umask(0o022)
        for name, value in request["limits"].items():
            _limit(getattr(resource, f"RLIMIT_{name}"), value)
        os.chdir(request["cwd"])
        env = {**os.environ, **request["env"]}
        for name in ("PYTHONHOME", "PYTHONPATH", "LD_LIBRARY_PATH"):  # the service's own Python's
            if name not in request["env"]:
                env.pop(name, None)
        os.execvpe(request["argv"][0], request["argv"], env)
    except OSError as e:
        os.write(2, f"{request['argv'][0]}: {e.strerror}\n".encode())
        os._exit(127 if isinstance(e, FileNotFoundError) else 126)  # as a shell says it
    finally:
        os._exit(126)


def _limit(what: int, value: int) -> None:
    """A limit above the hard limit in force is lowered to it."""
    hard = resource.getrlimit(what)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(what, (value, value))


def _exit_code(status: int) -> int:
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _reap(pid: int) -> int | None:
    """Reap every dead child; the wait status of `pid` if it is among them."""
    status = None
    while True:
        try:
            child, child_status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if child == 0:
            return status
        if child == pid:
            status = child_status


def _kill_tree(pid: int) -> None:
    """Kill the command and all its descendants: their orphans become our children, whatever session they made."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    deadline = time.monotonic() + _KILL_SECONDS
    while (left := descendants(os.getpid())) and time.monotonic() < deadline:
        for child in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        _reap(pid)
        time.sleep(0.001)


def descendants(pid: int) -> list[int]:
    """The living descendants of a process."""
    children: dict[int, list[int]] = {}
    for p, parent, state, _ in processes():
        if state not in "ZX":
            children.setdefault(parent, []).append(p)
    found, todo = [], [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def processes() -> list[tuple[int, int, str, int]]:
    """(pid, parent, state, start) of every process of this pid namespace."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as f:
                # The second field is the command's name in brackets and may hold anything.
                fields = f.read().rpartition(b")")[2].split()
                found.append((int(name), int(fields[1]), fields[0].decode(), int(fields[19])))
    return found
