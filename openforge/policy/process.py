"""Identity of processes: a pid alone is reused, the pair (pid, start time) is not. Linux, standard library."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import NamedTuple


class Identity(NamedTuple):
    """A process: its pid and its start time in clock ticks since boot (field 22 of /proc/PID/stat)."""

    pid: int
    started: int

    def __str__(self) -> str:
        return f"{self.pid}:{self.started}"


class _Stat(NamedTuple):
    state: str
    session: int
    started: int


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command's name stands in parentheses and may hold spaces and parentheses of its own.
    fields = text[text.rindex(")") + 2 :].split()
    return _Stat(fields[0], int(fields[3]), int(fields[19]))


def identity(pid: int | None = None) -> Identity | None:
    """Identity of a live process (this one without `pid`); None if there is none."""
    pid = os.getpid() if pid is None else pid
    stat = _stat(pid)
    return None if stat is None or stat.state in "ZX" else Identity(pid, stat.started)


def this() -> Identity:
    """Identity of this process."""
    me = identity()
    assert me is not None
    return me


def parse(text: str) -> Identity:
    """The inverse of str(identity).

    Raises:
        ValueError: not of the form PID:STARTTIME.
    """
    pid, colon, started = text.partition(":")
    if not colon or not pid.isdecimal() or not started.isdecimal():
        raise ValueError(f"{text!r} is no process identity; PID:STARTTIME is expected")
    return Identity(int(pid), int(started))


def alive(who: Identity) -> bool:
    """Whether that very process still runs (a zombie does not)."""
    return identity(who.pid) == who


def session_of(who: Identity) -> list[Identity]:
    """Live processes of the session that `who` led, itself included; it may have ended already."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        stat = _stat(int(entry))
        if stat and stat.session == who.pid and stat.started >= who.started and stat.state not in "ZX":
            found.append(Identity(int(entry), stat.started))
    leader = identity(who.pid)
    # Another process with the leader's pid: the session is a stranger's.
    return [] if leader is not None and leader != who else found


def end_session(who: Identity, grace: float = 10.0) -> None:
    """End a leader and its session: SIGTERM, and SIGKILL for what is left after `grace` seconds."""
    for sig, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, 10.0)):
        deadline = time.monotonic() + seconds
        members = session_of(who)
        for member in members:
            # A leader that shuts down in order ends its own children; the rest follows only by SIGKILL.
            if sig is signal.SIGKILL or member == who or who not in members:
                _signal(member, sig)
        while members and time.monotonic() < deadline:
            time.sleep(0.05)
            members = session_of(who)
        if not members:
            return


def _signal(who: Identity, sig: signal.Signals) -> None:
    if alive(who):
        try:
            os.kill(who.pid, sig)
        except ProcessLookupError:
            return
