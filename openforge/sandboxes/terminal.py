"""A command on a pseudo-terminal of the sandbox: runs inside, in a joined process, standard library only.

The requester gets the terminal's other end as a descriptor (with one byte), then {"pid"}, and at the end {"exit"}. It
sends lines {"signal": N}, to the command's process group; when it hangs up, the command is killed with all it started.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import struct
import termios
from typing import TYPE_CHECKING

if TYPE_CHECKING or __package__:
    from openforge.sandboxes import join, spawner
else:
    import join
    import spawner


def run(channel: spawner.Channel, request: spawner.Request, groups: list[int]) -> None:
    """Run the request's argv in env, on a terminal of its rows and columns."""
    join.adopt_orphans()
    outer, inner = os.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", request["rows"], request["cols"], 0, 0))
    socket.send_fds(channel.sock, [b"+"], [outer])
    os.close(outer)
    wake = _wake_on_child()
    self_fd = os.pidfd_open(os.getpid())
    pid = os.fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        spawner.command(request, [inner, inner, inner], groups, self_fd, terminal=True)
    for fd in (inner, *groups):
        os.close(fd)
    channel.answer({"pid": pid})
    channel.answer({"exit": _wait(channel, pid, wake)})


def _wake_on_child() -> int:
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    return read_end


def _wait(channel: spawner.Channel, pid: int, wake: int) -> int:
    """Pass signals on until the command ends; its exit code."""
    poll = select.poll()
    poll.register(wake, select.POLLIN)
    poll.register(channel.sock, select.POLLIN)
    said = b""
    while True:
        ready = {fd for fd, _ in poll.poll()}
        with contextlib.suppress(BlockingIOError):
            os.read(wake, 4096)
        status = spawner.reap(pid)
        if status is not None:
            return os.waitstatus_to_exitcode(status)
        if channel.sock.fileno() in ready:
            data = channel.sock.recv(4096)
            if not data:
                spawner.kill_tree(pid)
                return -signal.SIGKILL
            *lines, said = (said + data).split(b"\n")
            for line in lines:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, json.loads(line)["signal"])
