"""The process that starts sandboxes and joins them: one a `LocalBackend`, standard library only, one thread.

It only waits and forks, so that an exec costs a few forks of a small process and no interpreter start, and so that
the parent of every bwrap (whose death kills it) is this process and not some thread of the owner's. It ends when its
control socket closes, which the kernel does when the owner dies, however it dies. As a keeper (`keep`) it listens for
owners instead, and ends when none has been there for a while: sandboxes and jobs outlive a server that is killed.

A message on the control socket (its standard input) is one byte with descriptors: first the request's own socket,
then what the operation needs. A job's message to a keeper goes on with the sandbox's holder pid, and the keeper hands
it to a child that has run a job there before (`job.Worker`), where one is free. The forked child ("outer") reads the
request from there: a line of JSON, then its payload. It joins the sandbox and forks the child that works inside
("inner"), which answers with a line of JSON and a payload. The outer child stays outside, where the agent cannot reach
it: it reaps the inner one and ends it when the requester hangs up. A socket that closes without an answer means that
the inner child was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import json
import os
import select
import signal
import socket
import sys
import termios
import time
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING or __package__:
    from openforge.sandboxes import files, job, join, layer, terminal
    from openforge.sandboxes.workers import Workers
else:  # started by path with -I -S, without the package and its dependencies
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    sys.modules["spawner"] = sys.modules[__name__]  # this module, and no second one of it
    import files
    import job
    import join
    import layer
    import terminal
    from workers import Workers

Request = dict[str, Any]
KILL_SECONDS = 5.0  # a killed process that is not dead by then is stuck in the kernel
END = b"."  # an owner's message: end now, and take everything along
_CHUNK = 1 << 16
END_SECONDS = 300.0  # at our own end: making a network namespace can keep a killed bwrap in the kernel for long


class Channel:
    """The child's end of a request: JSON lines and payloads over descriptors.

    Socket and file objects would cost a forked child more than all that it does with them: whatever Python touches is
    a page to copy.
    """

    def __init__(self, fd: int, out: int | None = None) -> None:
        """`out` is where answers go, if not to `fd`."""
        self.fd = fd
        self._out = fd if out is None else out
        self._said = b""

    def request(self) -> Request:
        while b"\n" not in self._said:
            data = os.read(self.fd, _CHUNK)
            if not data:
                os._exit(0)  # the requester died or was cancelled before it said what it wanted
            self._said += data
        line, _, self._said = self._said.partition(b"\n")
        request: Request = json.loads(line)
        return request

    def read(self, size: int) -> bytes:
        if self._said:
            data, self._said = self._said[:size], self._said[size:]
            return data
        return os.read(self.fd, size)

    def drain(self) -> None:
        """Read what is still being sent: closed with some of it unread, a socket can lose the answer."""
        with contextlib.suppress(OSError):
            while os.read(self.fd, _CHUNK):
                pass

    def more(self) -> bool:
        """Whether something came along with the request."""
        return bool(self._said)

    def answer(self, reply: Request, payload: bytes = b"") -> None:
        view = memoryview(json.dumps({**reply, "size": len(payload)}).encode() + b"\n" + payload)
        with contextlib.suppress(OSError):  # the requester hung up
            while view:
                view = view[os.write(self._out, view) :]


def main(control: socket.socket) -> None:
    """Fork one child a message until the control socket closes."""
    null, self_fd = prepared()
    os.dup2(null, 0)
    while served(control, self_fd, [control]):
        pass
    kill_children(END_SECONDS)


def keep(listener: socket.socket, grace: float) -> None:
    """Serve the owners that connect to `listener` until there has been none for `grace` seconds, or one says END."""
    null, self_fd = prepared()
    os.dup2(null, 0)
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    owners: dict[int, socket.socket] = {}
    workers = Workers(poll)
    deadline: float | None = time.monotonic() + grace
    while True:
        left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        ready = [fd for fd, _ in poll.poll(left)]
        # Workers first: one says that it is free before its job's owner can ask for the next.
        for fd in filter(workers.owns, ready):
            workers.heard(fd)
        for fd in ready:
            if fd == listener.fileno():
                owner, _ = listener.accept()
                with contextlib.suppress(OSError):  # it is gone already: the next poll says so
                    owner.send(str(os.getpid()).encode())
                owners[owner.fileno()] = owner
                poll.register(owner, select.POLLIN)
            elif fd in owners:
                more = served(owners[fd], self_fd, [listener, *owners.values()], workers)
                if not more:
                    poll.unregister(fd)
                    owners.pop(fd).close()
                if more is None:
                    return kill_children(END_SECONDS)
        if owners:
            deadline = None
        elif deadline is None:
            deadline = time.monotonic() + grace
        elif time.monotonic() >= deadline:
            return kill_children(END_SECONDS)


def prepared() -> tuple[int, int]:
    """Set this process up; descriptors of nothing and of itself."""
    # A bwrap that dies while it starts leaves a child behind that waits for it for ever: it becomes ours to end.
    join.adopt_orphans()
    # Once and not in every child. A handler that does nothing there is gone with its execve, and the signal then has
    # the default action that a program expects; one that is ignored would stay so.
    join.reset_signals()
    signal.signal(signal.SIGPIPE, _nothing)
    signal.signal(signal.SIGXFSZ, _nothing)
    signal.signal(signal.SIGTERM, functools.partial(_end, os.getpid()))
    # Reaped by hand: children that the kernel reaps for one who ignores SIGCHLD leave no CPU time in our account.
    signal.signal(signal.SIGCHLD, functools.partial(_reap_own, os.getpid()))
    join.own_namespaces()  # once for all children
    gc.disable()  # a collection would copy the pages that the children share
    gc.freeze()
    return os.open("/dev/null", os.O_RDONLY), os.pidfd_open(os.getpid())


def served(
    control: socket.socket, self_fd: int, sockets: list[socket.socket], workers: Workers | None = None
) -> bool | None:
    """Have a child take the next message of an owner, who may hold `sockets`; False: it is gone; None: it says END."""
    try:
        data, fds, _, _ = socket.recv_fds(control, 32, 8, socket.MSG_CMSG_CLOEXEC)
    except ConnectionError:
        return False
    if not data or data == END:
        return None if data else False
    holder = data[1:].decode()
    if workers is None or not holder or not workers.hand_over(holder, fds):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) if workers and holder else (None, None)
        if os.fork() == 0:
            try:
                join.die_with(self_fd)
                os.close(self_fd)
                for sock in (*sockets, *(workers.sockets() if workers else ()), *([ours] if ours else ())):
                    sock.close()
                outer(Channel(fds[0]), fds[1:], theirs)
            finally:
                os._exit(1)
        if workers is not None and ours is not None and theirs is not None:
            theirs.close()
            workers.add(ours, holder)
    for fd in fds:
        os.close(fd)
    return True


def _nothing(number: int, frame: object) -> None:
    """For a signal that is not to end us, and that a program is not to find ignored."""


def _end(spawner: int, number: int, frame: object) -> None:
    """The spawner's end; the kernel takes its children along. In them a signal only wakes who waits for it."""
    if os.getpid() == spawner:
        os._exit(0)


def _reap_own(spawner: int, number: int, frame: object) -> None:
    if os.getpid() == spawner:
        reap()


def outer(channel: Channel, fds: list[int], keeper: socket.socket | None = None) -> NoReturn:
    """The child outside: read the request and carry it out; one that runs jobs says to `keeper` when it is free."""
    request = channel.request()
    try:
        if request["op"] == "bwrap":
            become(request, fds)
        if request["op"] in ("listen", "connect"):
            open_socket = join.listen if request["op"] == "listen" else join.connect
            sock = socket.socket(fileno=channel.fd)
            join.send_or_fail(sock, lambda: open_socket(request["holder"], request["port"], sock))
        if request["op"] == "job":
            job.run(channel, request, fds, keeper)
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
    poll.register(channel.fd, select.POLLRDHUP)
    if not any(fd == pidfd for fd, _ in poll.poll()):
        poll.unregister(channel.fd)
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
        elif request["op"] == "terminal":
            terminal.run(channel, request, groups)
        elif request["op"] == "kill":
            channel.answer({"left": kill_all()})
        elif request["op"] == "write":
            for f in request["files"]:
                where = f"{f['root']}/{'/'.join(f['parts'])}"
                files.write(f["root"], f["parts"], f["mode"], f["bytes"], channel.read)
            channel.answer({})
        elif request["op"] == "read":
            channel.answer({}, files.read(where, request["limit"]))
        elif request["op"] == "write_at":
            size = files.write_at(request["root"], request["parts"], request["offset"], request["bytes"], channel.read)
            channel.answer({"file_bytes": size})
        elif request["op"] == "read_at":
            data, size = files.read_at(where, request["offset"], request["length"], request["limit"])
            channel.answer({"file_bytes": size}, data)
        elif request["op"] == "list":
            channel.answer({"entries": files.entries(where)})
    except OSError as e:
        channel.answer({"error": f"{where} inside the sandbox: {e.strerror or e}", "errno": e.errno, "lost": False})
        if request["op"] in ("write", "write_at"):
            channel.drain()


def execute(channel: Channel, request: Request, fds: list[int], groups: list[int]) -> Request:
    """Run a command with `fds` as its standard streams; wait for it, its time limit, or a hang-up.

    Closes `fds` and `groups`.
    """
    join.adopt_orphans()
    wake_r, wake_w = os.pipe()
    os.set_blocking(wake_w, False)
    os.set_blocking(wake_r, False)
    signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
    self_fd = os.pidfd_open(os.getpid())
    pid = os.fork()
    if pid == 0:
        command(request, fds, groups, self_fd)
    for fd in (*fds, *groups, self_fd):
        os.close(fd)
    try:
        return _ended(channel, request, pid, wake_r)
    finally:
        signal.set_wakeup_fd(-1)
        os.close(wake_r)
        os.close(wake_w)


def _ended(channel: Channel, request: Request, pid: int, wake: int) -> Request:
    """How the command ended; `wake` can be read once a child has."""
    poll = select.poll()
    poll.register(wake, select.POLLIN)
    poll.register(channel.fd, select.POLLRDHUP)
    deadline = None if request["timeout"] is None else time.monotonic() + request["timeout"]
    while True:
        left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        ready = [fd for fd, _ in poll.poll(left)]
        with contextlib.suppress(BlockingIOError):
            os.read(wake, 4096)
        status = reap(pid)
        if status is not None:
            return {"exit": os.waitstatus_to_exitcode(status), "timed_out": False}
        hung_up = channel.fd in ready
        if hung_up or (deadline is not None and time.monotonic() >= deadline):
            kill_tree(pid)
            return {"exit": None, "timed_out": True}


def command(request: Request, fds: list[int], groups: list[int], parent: int, terminal: bool = False) -> NoReturn:
    """The command's own process, up to its execve; with `terminal` its first descriptor is the one it is to control."""
    try:
        os.setsid()
        join.die_with(parent)
        if terminal:
            fcntl.ioctl(fds[0], termios.TIOCSCTTY, 0)
        join.join_groups(groups)
        high = [os.dup(fd) for fd in fds]
        for i, fd in enumerate(high):
            os.dup2(fd, i)
        join.close_others((0, 1, 2))
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
    sock = socket.socket(fileno=os.dup(0))
    if sys.argv[1:2] == ["keep"]:
        keep(sock, float(sys.argv[2]))
    else:
        main(sock)
