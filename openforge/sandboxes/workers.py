"""A keeper's side of the children that run jobs (`job.Worker`), standard library only."""

from __future__ import annotations

import select
import socket


class Workers:
    """A keeper's children that run jobs: one that is free takes the next of its sandbox.

    One a sandbox is kept, and ends by itself when the sandbox does.
    """

    def __init__(self, poll: select.poll) -> None:
        self._poll = poll
        self._workers: dict[int, tuple[socket.socket, str]] = {}  # by descriptor: our end, and its holder's pid
        self._free: dict[str, int] = {}

    def owns(self, fd: int) -> bool:
        return fd in self._workers

    def sockets(self) -> list[socket.socket]:
        return [sock for sock, _ in self._workers.values()]

    def add(self, ours: socket.socket, holder: str) -> None:
        self._workers[ours.fileno()] = ours, holder
        self._poll.register(ours, select.POLLIN)

    def heard(self, fd: int) -> None:
        """A worker is free or has ended."""
        sock, holder = self._workers[fd]
        if _received(sock) and holder not in self._free:
            self._free[holder] = fd
            return
        if self._free.get(holder) == fd:
            del self._free[holder]
        self._poll.unregister(fd)
        del self._workers[fd]
        sock.close()  # one more than is needed ends by that

    def hand_over(self, holder: str, fds: list[int]) -> bool:
        """Give a job's descriptors to a free worker; False: there is none."""
        fd = self._free.pop(holder, None)
        if fd is None:
            return False
        try:
            socket.send_fds(self._workers[fd][0], [b"+"], fds)
        except OSError:  # it has ended: its socket says so at the next poll
            return False
        return True


def _received(sock: socket.socket) -> bytes:
    try:
        return sock.recv(1)
    except ConnectionError:
        return b""
