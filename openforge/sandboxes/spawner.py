"""The process that starts sandboxes and joins them: one a `LocalBackend`, standard library only, one thread.

It only waits and forks, so that an exec costs a few forks of a small process and no interpreter start, and so that
the parent of every bwrap (whose death kills it) is this process and not some thread of the owner's. It ends when its
control socket closes, which the kernel does when the owner dies, however it dies.

A message on the control socket (its standard input) is one byte with descriptors: first the request's own socket,
then what the operation needs. The forked child ("outer") reads the request from there: a line of JSON, then its
payload. It joins the sandbox and forks the child that works inside ("inner"), which answers with a line of JSON and
a payload. The outer child stays outside, where the agent cannot reach it: it reaps the inner one and ends it when the
requester hangs up. A socket that closes without an answer means that the inner child was killed.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from openforge.sandboxes import files, join, layer
else:  # started by path with -I -S, without the package and its dependencies
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import files
    import join
    import layer

Request = dict[str, Any]
KILL_SECONDS = 5.0  # a killed process that is not dead by then is stuck in the kernel
END_SECONDS = 300.0  # at our own end: making a network namespace can keep a killed bwrap in the kernel for long


class Channel:
    """The child's end of a request: JSON lines and payloads over a stream socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._in = sock.makefile("rb")

    def request(self) -> Request:
        line = self._in.readline()
        if not line:
            os._exit(0)  # the requester died or was cancelled before it said what it wanted
        request: Request = json.loads(line)
        return request

    def read(self, size: int) -> bytes:
        return self._in.read(size)

    def answer(self, reply: Request, payload: bytes = b"") -> None:
        with contextlib.suppress(OSError):  # the requester hung up
            self.sock.sendall(json.dumps({**reply, "size": len(payload)}).encode() + b"\n" + payload)


def main(control: socket.socket) -> None:
    """Fork one child a message until the control socket closes."""
    self_fd = os.pidfd_open(os.getpid())
    # A bwrap that dies while it starts leaves a child behind that waits for it for ever: it becomes ours to end.
    join.adopt_orphans()
    # Reaped by hand: children that the kernel reaps for one who ignores SIGCHLD leave no CPU time in our account.
    signal.signal(signal.SIGCHLD, _reap_on_signal)
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    gc.disable()  # a collection would copy the pages that the children share
    gc.freeze()
    while True:
        data, fds, _, _ = socket.recv_fds(control, 16, 8)
        if not data:
            kill_children(END_SECONDS)
            return
        if os.fork() == 0:
            try:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                join.die_with(self_fd)
                os.close(self_fd)
                control.close()
                outer(Channel(socket.socket(fileno=fds[0])), fds[1:])
            finally:
                os._exit(1)
        for fd in fds:
            os.close(fd)


def _reap_on_signal(number: int, frame: object) -> None:
    reap()


def outer(channel: Channel, fds: list[int]) -> NoReturn:
    """The child outside: read the request and carry it out."""
    request = channel.request()
    try:
        if request["op"] == "bwrap":
            become(request, fds)
        if request["op"] in ("listen", "connect"):
            open_socket = join.listen if request["op"] == "listen" else join.connect
            join.send_or_fail(channel.sock, lambda: open_socket(request["holder"], request["port"], channel.sock))
        watch(channel, request, fds)
    except join.JoinError as e:
        channel.answer({"error": e.strerror or str(e), "errno": e.errno, "lost": True})
    except OSError as e:
        where = e.filename or "joining"
        channel.answer({"error": f"{where} inside the sandbox: {e.strerror}", "errno": e.errno, "lost": False})
    os._exit(0)


def become(request: Request, fds: list[int]) -> NoReturn:
    """Turn into bwrap with `fds` as its descriptors 0, 1, 2, ..., in the sandbox's groups and with its mounts."""
    high = [os.dup(fd) for fd in fds]
    for i, fd in enumerate(high):
        os.dup2(fd, i)
    join.close_others(range(len(fds)))
    join.reset_signals()
    try:
        join.join_groups(join.open_groups(request["groups"]))
        if request["mounts"] is not None:
            layer.mount(**request["mounts"])
        os.execv(request["argv"][0], request["argv"])
    except OSError as e:
        os.write(2, f"{e.filename}: {e.strerror}".encode())
    os._exit(1)


def watch(channel: Channel, request: Request, fds: list[int]) -> None:
    """Join the sandbox, fork the child inside, wait for it; end it if the requester hangs up."""
    groups = join.open_groups(request.get("groups", ()))
    join.enter(request["holder"], request.get("cwd", join.WORK))
    pid = os.fork()
    if pid == 0:
        os.setsid()
        join.run_and_exit(lambda: inner(channel, request, fds, groups))
    for fd in (*fds, *groups):
        os.close(fd)
    pidfd = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.register(channel.sock, select.POLLRDHUP)
    if not any(fd == pidfd for fd, _ in poll.poll()):
        poll.unregister(channel.sock)
        # Its turn first: it kills the command's whole tree. The agent may have stopped it, though.
        if not poll.poll((KILL_SECONDS + 1) * 1000):
            os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def inner(channel: Channel, request: Request, fds: list[int], groups: list[int]) -> None:
    """The child inside: one operation."""
    where = request.get("path", "a file")
    try:
        if request["op"] == "exec":
            channel.answer(execute(channel, request, fds, groups))
        elif request["op"] == "kill":
            channel.answer({"left": kill_all()})
        elif request["op"] == "write":
            for f in request["files"]:
                where = f"{f['root']}/{'/'.join(f['parts'])}"
                files.write(f["root"], f["parts"], f["mode"], f["bytes"], channel.read)
            channel.answer({})
        elif request["op"] == "read":
            channel.answer({}, files.read(where, request["limit"]))
        elif request["op"] == "list":
            channel.answer({"entries": files.entries(where)})
    except OSError as e:
        channel.answer({"error": f"{where} inside the sandbox: {e.strerror or e}", "errno": e.errno, "lost": False})


def execute(channel: Channel, request: Request, fds: list[int], groups: list[int]) -> Request:
    """Run a command with `fds` as its standard streams; wait for it, its time limit, or a hang-up."""
    join.adopt_orphans()
    wake_r, wake_w = os.pipe()
    os.set_blocking(wake_w, False)
    os.set_blocking(wake_r, False)
    signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    self_fd = os.pidfd_open(os.getpid())
    pid = os.fork()
    if pid == 0:
        command(request, fds, groups, self_fd)
    for fd in (*fds, *groups):
        os.close(fd)
    poll = select.poll()
    poll.register(wake_r, select.POLLIN)
    poll.register(channel.sock, select.POLLRDHUP)
    deadline = None if request["timeout"] is None else time.monotonic() + request["timeout"]
    while True:
        left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        ready = [fd for fd, _ in poll.poll(left)]
        with contextlib.suppress(BlockingIOError):
            os.read(wake_r, 4096)
        status = reap(pid)
        if status is not None:
            return {"exit": os.waitstatus_to_exitcode(status), "timed_out": False}
        hung_up = channel.sock.fileno() in ready
        if hung_up or (deadline is not None and time.monotonic() >= deadline):
            kill_tree(pid)
            return {"exit": None, "timed_out": True}


def command(request: Request, fds: list[int], groups: list[int], parent: int) -> NoReturn:
    """The command's own process, up to its execve."""
    try:
        os.setsid()
        join.die_with(parent)
        join.join_groups(groups)
        high = [os.dup(fd) for fd in fds]
        for i, fd in enumerate(high):
            os.dup2(fd, i)
        join.close_others((0, 1, 2))
        signal.set_wakeup_fd(-1)
        join.reset_signals()
        join.set_limits(request["limits"])
        os.execvpe(request["argv"][0], request["argv"], request["env"])
    except OSError as e:
        os.write(2, f"{request['argv'][0]}: {e.strerror}\n".encode())
        os._exit(127 if isinstance(e, FileNotFoundError) else 126)  # as a shell says it
    finally:
        os._exit(126)


def reap(pid: int = 0) -> int | None:
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


def kill_tree(pid: int) -> None:
    """Kill the command and all its descendants: their orphans become our children, whatever session they made."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    kill_children(KILL_SECONDS)


def kill_children(seconds: float) -> None:
    """Kill every child, and those that become ours by their parents' death, until there is none."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        reap()
        children = [p for p, parent, _ in processes() if parent == os.getpid()]
        if not children:
            return
        for p in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(p, signal.SIGKILL)
        time.sleep(0.001)


def kill_all() -> int:
    """Kill every other process of the sandbox but its first; how many are still alive after a while."""
    # kill(-1) is atomic against fork: a process being forked while the signal is sent is not born.
    end = time.monotonic() + KILL_SECONDS
    while True:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        alive = [p for p, _, state in processes() if p not in (1, os.getpid()) and state not in "ZX"]
        if not alive or time.monotonic() > end:
            return len(alive)
        time.sleep(0.001)


def processes() -> list[tuple[int, int, str]]:
    """(pid, parent, state) of every process of this pid namespace."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as f:
                # The second field is the command's name in brackets and may hold anything.
                state, parent = f.read().rpartition(b")")[2].split()[:2]
                found.append((int(name), int(parent), state.decode()))
    return found


if __name__ == "__main__":
    main(socket.socket(fileno=os.dup(0)))
