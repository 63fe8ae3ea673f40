"""What the machine may lack while an episode runs, disk space and memory: such an episode says nothing of the agent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

RESERVE = 64 << 20  # bytes that must stay free: what is left below is too little to trust a write
LOOK_SECONDS = 1.0
KILLED = (-9, 137)  # SIGKILL, and as a shell says it


class DiskFull(RuntimeError):
    """A file system is full; the sentence names it and what to do."""


def oom_kills() -> int:
    """Processes that the kernel has killed for lack of memory so far, on this machine or in this control group."""
    total = 0
    for path in [Path("/proc/vmstat"), *_memory_events()]:
        with contextlib.suppress(OSError):
            words = [line.split() for line in path.read_text().splitlines()]
            total += sum(int(w[1]) for w in words if w[0] == "oom_kill")
    return total


def _memory_events() -> list[Path]:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                return [Path("/sys/fs/cgroup") / line[3:].strip("/") / "memory.events"]
    return []


@dataclass(frozen=True)
class Mark:
    """The machine at an episode's start."""

    time: float
    kills: int


class Machine:
    """Watches the file systems that a shard writes to, and the kernel's count of killed processes.

    Args:
        folders: one on each file system.
        reserve: bytes that must stay free on each.
        kills: reads the count.
    """

    def __init__(self, folders: Sequence[Path], reserve: int = RESERVE, kills: Callable[[], int] = oom_kills) -> None:
        self._folders, self._reserve, self._kills = folders, reserve, kills
        self._full_at, self._full = float("-inf"), ""

    def mark(self) -> Mark:
        return Mark(time.monotonic(), self._kills())

    def look(self) -> str | None:
        """The sentence on a file system that is full now; None if none is."""
        for folder in self._folders:
            fs = os.statvfs(folder)
            free = (fs.f_bfree if os.getuid() == 0 else fs.f_bavail) * fs.f_frsize
            if free < self._reserve or (fs.f_files and not fs.f_ffree):
                self._full_at = time.monotonic()
                self._full = (
                    f"the file system of {folder} is full ({free >> 20} MiB and {fs.f_ffree} files free; "
                    f"{self._reserve >> 20} MiB are needed): free space and type the same command again"
                )
                return self._full
        return None

    def check(self, since: Mark | None = None) -> None:
        """Raises `DiskFull` if a file system is full, or was since `since`."""
        if self.look() is not None or (since is not None and self._full_at >= since.time):
            raise DiskFull(self._full)

    async def watch(self) -> None:
        """Look for ever; `DiskFull` ends it."""
        while True:
            self.check()
            await asyncio.sleep(LOOK_SECONDS)

    def short_of_memory(self, since: Mark, *exits: int | None) -> bool:
        """Whether a process that ended with one of `exits` was killed by the kernel for lack of memory."""
        return any(e in KILLED for e in exits) and self._kills() > since.kills


def elsewhere(folders: Sequence[Path]) -> Machine:
    """Of a shard whose sandboxes are on another machine: what the kernel kills here is nothing of theirs."""
    return Machine(folders, kills=lambda: 0)
