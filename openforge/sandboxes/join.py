"""Join a running sandbox's namespaces from a forked child, and give up every privilege on the way in.

This file is self-contained (standard library only, Python >= 3.11), so that another Python environment, such as
a harness's own, can load it by path without this package:

    spec = importlib.util.spec_from_file_location("join", path)
    join = importlib.util.module_from_spec(spec); spec.loader.exec_module(join)

    pid = os.fork()                      # the caller stays outside
    if pid == 0:                         # a fresh child has one thread, which setns(2) demands
        os._exit(join.exit_status(join.run_in(holder_pid, main)))
    os.waitpid(pid, 0)

`enter` joins with one setns(2) on a pidfd (Linux >= 5.8). One call for all namespaces is not a convenience: bwrap
leaves its processes in a second user namespace below the one that owns the mounts and the network, so an ordinary
user who joined the inner one first would have lost the right to join the rest.

A joined process is not dumpable until it executes a program: it still maps its parent's memory, and the agent runs
under the same uid in the same pid namespace, where it could otherwise attach to it.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import os
import resource
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

WORK = "/workspace"  # the work folder inside every sandbox
CONNECT_SECONDS = 10.0  # a full backlog inside keeps no one for longer
HOME = "/home/agent"  # $HOME inside every sandbox
OOM_SCORE = 500  # of -1000 to 1000, see proc(5)
BASE_ENV: dict[str, str] = {
    "HOME": HOME,
    "LANG": "C.UTF-8",
    "LOGNAME": "agent",
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "SHELL": "/bin/bash",
    "TMPDIR": "/tmp",
    "USER": "agent",
}  # environment of every process inside: the same in all sandboxes, so that prompts of one group agree

_CLONE_NEWNS = 0x00020000
_CLONE_NEWCGROUP = 0x02000000
_CLONE_NEWUTS = 0x04000000
_CLONE_NEWIPC = 0x08000000
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWPID = 0x20000000
_CLONE_NEWNET = 0x40000000
_NAMESPACES = {
    **{"user": _CLONE_NEWUSER, "mnt": _CLONE_NEWNS, "net": _CLONE_NEWNET, "pid": _CLONE_NEWPID},
    **{"ipc": _CLONE_NEWIPC, "uts": _CLONE_NEWUTS, "cgroup": _CLONE_NEWCGROUP},
}

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_CAPABILITY_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


class JoinError(OSError):
    """The sandbox cannot be joined: it is gone, or the kernel refuses."""


class _CapHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _CapData(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


def _checked(result: int, what: str) -> None:
    if result != 0:
        errno = ctypes.get_errno()
        raise JoinError(errno, f"{what}: {os.strerror(errno)}")


def _prctl(option: int, *args: int) -> int:
    padded = [ctypes.c_ulong(a) for a in (*args, 0, 0, 0, 0)[:4]]
    return int(_libc.prctl(ctypes.c_int(option), *padded))


def _setns(holder_pid: int, namespaces: int) -> None:
    try:
        pidfd = os.pidfd_open(holder_pid)
    except ProcessLookupError as e:
        raise JoinError(e.errno, f"the sandbox of holder process {holder_pid} is gone") from None
    try:
        _checked(_libc.setns(pidfd, namespaces), f"setns to the sandbox of holder process {holder_pid}")
    finally:
        os.close(pidfd)


def _other_namespaces(pid: int) -> int:
    """The namespaces of a process that are not this one's: nobody may enter the one that it is in already."""
    flags = 0
    for name, flag in _NAMESPACES.items():
        try:
            theirs = os.stat(f"/proc/{pid}/ns/{name}")
        except FileNotFoundError as e:
            raise JoinError(e.errno, f"the sandbox of holder process {pid} is gone") from None
        ours = os.stat(f"/proc/self/ns/{name}")
        if (theirs.st_dev, theirs.st_ino) != (ours.st_dev, ours.st_ino):
            flags |= flag
    return flags


def be_killed_first() -> None:
    """Have the kernel take this process before others of the host, the sandbox's first one too, for want of memory."""
    with contextlib.suppress(OSError):
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        try:
            os.write(fd, b"%d" % OOM_SCORE)
        finally:
            os.close(fd)


def open_groups(files: Sequence[str]) -> list[int]:
    """Descriptors of control groups' `cgroup.procs`, which have no name inside; `join_groups` takes them there."""
    return [os.open(name, os.O_WRONLY | os.O_CLOEXEC) for name in files]


def join_groups(fds: Sequence[int]) -> None:
    """Move this process into the groups."""
    for fd in fds:
        os.write(fd, b"0")
        os.close(fd)


def drop_privileges() -> None:
    """Drop every capability (bounding, ambient, inheritable, permitted, effective) and set no_new_privs."""
    for cap in range(64):
        if _prctl(_PR_CAPBSET_DROP, cap) != 0:
            break  # EINVAL: past the kernel's last capability
    with open("/proc/sys/kernel/cap_last_cap") as f:
        if cap != int(f.read()) + 1:
            raise JoinError(f"capability {cap} could not be dropped from the bounding set")
    _checked(_prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL), "clearing ambient capabilities")
    header, data = _CapHeader(_CAPABILITY_VERSION_3, 0), (_CapData * 2)()
    _checked(_libc.capset(ctypes.byref(header), ctypes.byref(data)), "dropping capabilities")
    _checked(_prctl(_PR_SET_NO_NEW_PRIVS, 1), "setting no_new_privs")


def set_limits(limits: Mapping[str, int]) -> None:
    """Set resource limits of this process, soft and hard: {"FSIZE": bytes, "CORE": 0, ...} (setrlimit(2)).

    A limit above the hard limit in force is lowered to it.
    """
    for name, value in limits.items():
        what = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(what)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(what, (value, value))


def close_others(keep: Sequence[int]) -> None:
    """Close every descriptor of this process that is not in `keep`: one of a host folder would lead out."""
    low = 0
    for fd in sorted(set(keep)):
        if low < fd:  # CPython 3.11's closerange(0, 0) closes everything
            os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, 1 << 30)


def enter(holder_pid: int, cwd: str = WORK, limits: Mapping[str, int] | None = None) -> None:
    """Join all namespaces of the sandbox, change to `cwd` inside, set limits, drop every privilege.

    Call it in a freshly forked child with one thread. The caller itself stays in its pid namespace: only the
    children that it forks AFTERWARDS are inside (setns(2)), so fork once more before running anything of the
    sandbox's; `run_in` does all of it. Descriptors stay open: see `close_others`.

    Args:
        holder_pid: pid (outside) of the sandbox's first process.
        cwd: folder inside the sandbox.
        limits: see `set_limits`.

    Raises:
        JoinError: the sandbox is gone or the kernel refuses.
        OSError: `cwd` is no folder inside; the process is inside then and must exit.
    """
    be_killed_first()  # before it stops being dumpable: its files in /proc are root's from then on
    _checked(_prctl(_PR_SET_DUMPABLE, 0), "clearing the dumpable flag")
    if os.geteuid() == 0:
        os.setgroups([])  # root's supplementary groups must not count inside; an ordinary user may not drop its own
    _setns(holder_pid, _other_namespaces(holder_pid))
    os.umask(0o022)
    set_limits(limits or {})
    drop_privileges()
    os.chdir(cwd)


def run_in(
    holder_pid: int,
    fn: Callable[[], int | None],
    *,
    cwd: str = WORK,
    limits: Mapping[str, int] | None = None,
    keep: Sequence[int] = (0, 1, 2),
    groups: Sequence[str] = (),
) -> int:
    """Run `fn` in a process inside the sandbox and wait for it. Call it in a freshly forked child.

    The process has its own session, default signal handlers, only the descriptors in `keep`, and dies with the
    calling process. TERM, INT and HUP sent to the caller are passed on to it. The environment is the caller's:
    set os.environ (see BASE_ENV) in `fn` or before. Flush sys.stdout before forking, or its buffer is written twice.
    `groups` are the sandbox's control groups (`LocalSandbox.groups`), whose limits then hold for it.

    Returns:
        `fn`'s value (None is 0; an exception prints its traceback and is 1), or -n if signal n ended it.
    """
    joined = open_groups(groups)
    enter(holder_pid, cwd, limits)
    close_others((*keep, *joined))
    self_fd = os.pidfd_open(os.getpid())
    child = os.fork()
    if child == 0:
        die_with(self_fd)
        os.close(self_fd)
        join_groups(joined)
        os.setsid()
        reset_signals()
        run_and_exit(fn)
    os.close(self_fd)
    for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(sig, lambda number, frame: os.kill(child, number))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def exit_status(code: int) -> int:
    """A `run_in` result as an exit status, as shells do: -n becomes 128 + n."""
    return code if code >= 0 else 128 - code


def die_with(parent_pidfd: int) -> None:
    """Have the kernel kill this process when its parent ends; exit at once if it has ended already."""
    _checked(_prctl(_PR_SET_PDEATHSIG, signal.SIGKILL), "setting the parent-death signal")
    # getppid() is 0 for any parent outside the pid namespace, so it cannot tell whether the parent is still there.
    poll = select.poll()
    poll.register(parent_pidfd, select.POLLIN)
    if poll.poll(0):
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants (child subreaper), so that daemons can be found and killed."""
    _checked(_prctl(_PR_SET_CHILD_SUBREAPER, 1), "becoming a subreaper")


def reset_signals() -> None:
    """Default action for every signal, none blocked: what a program expects at its start."""
    for sig in signal.valid_signals():
        with contextlib.suppress(OSError):  # KILL, STOP and libc's own cannot be set
            signal.signal(sig, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def run_and_exit(fn: Callable[[], int | None]) -> NoReturn:
    """Run `fn` and leave the process with its value, without the parent's exit handlers."""
    code = 1
    try:
        code = fn() or 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 0 if e.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code & 0xFF)


def listen(holder_pid: int, port: int, channel: socket.socket) -> None:
    """Send a listener on 127.0.0.1:`port` of the sandbox's network over `channel`. Call it in a forked child."""
    _checked(_prctl(_PR_SET_DUMPABLE, 0), "clearing the dumpable flag")
    _setns(holder_pid, _CLONE_NEWUSER | _CLONE_NEWNET)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(512)
        _send(channel, listener)


def connect(holder_pid: int, port: int, channel: socket.socket) -> None:
    """Send a connection to 127.0.0.1:`port` of the sandbox's network over `channel`. Call it in a forked child."""
    _checked(_prctl(_PR_SET_DUMPABLE, 0), "clearing the dumpable flag")
    _setns(holder_pid, _CLONE_NEWUSER | _CLONE_NEWNET)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as connection:
        connection.settimeout(CONNECT_SECONDS)
        connection.connect(("127.0.0.1", port))
        connection.settimeout(None)
        _send(channel, connection)


def _send(channel: socket.socket, sock: socket.socket) -> None:
    fds = array.array("i", [sock.fileno()])
    channel.sendmsg([b"+"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds.tobytes())])


def received(channel: socket.socket) -> socket.socket:
    """The socket that `listen` or `connect` sent.

    Raises:
        JoinError: what that failed with, with its errno.
    """
    data, fds, _, _ = socket.recv_fds(channel, 4096, 1)
    if not fds:
        number, _, text = data.decode(errors="replace").partition(" ")
        if number.isdigit():
            raise JoinError(int(number), text)
        raise JoinError("the process that should open a socket inside died")
    return socket.socket(fileno=fds[0])


def listen_inside(holder_pid: int, port: int) -> socket.socket:
    """A TCP listener on 127.0.0.1:`port` inside the sandbox, accepted from outside.

    It forks: call it where the process has one thread (asyncio programs go through `LocalSandbox.route`).

    Raises:
        JoinError: the sandbox is gone, or the port is taken there.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = os.fork()
        if child == 0:
            send_or_fail(theirs, lambda: listen(holder_pid, port, theirs))
        theirs.close()
        try:
            return received(ours)
        finally:
            os.waitpid(child, 0)


def send_or_fail(channel: socket.socket, fn: Callable[[], None]) -> NoReturn:
    """Run `fn`; on an error send its number and text over `channel`. Leaves the process."""
    try:
        fn()
    except OSError as e:
        channel.sendall(f"{e.errno or 0} {e.strerror or e}".encode())
        os._exit(1)
    os._exit(0)
