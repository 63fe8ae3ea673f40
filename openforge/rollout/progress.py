"""What a shard says while it runs: done, running, failed, mean reward so far, tokens a second, time left."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PLAIN_EVERY, TERMINAL_EVERY = 5.0, 1.0


class Progress:
    """Counts of one shard, printed as a line: rewritten in place on a terminal, appended elsewhere, or not at all.

    Attributes:
        note: what the shard waits for, None while it does not.
        waiting: sandboxes for which there is no room now.
        waits: how often there was none.
        replaced: sandboxes made ahead that were dead when their turn came.
    """

    def __init__(self, total: int, say: Callable[[str], None], quiet: bool = False) -> None:
        self.quiet = quiet
        self.total, self.done, self.running, self.failed, self.retried = total, 0, 0, 0, 0
        self.rewards: list[float] = []
        self.tokens = 0
        self.note: str | None = None
        self.waiting, self.waits, self.replaced = 0, 0, 0
        self._room = ""
        self._earlier = 0
        self._say, self._start = say, time.monotonic()

    def skip(self, count: int) -> None:
        """Rollouts that an earlier attempt of the shard had finished."""
        self.done += count
        self._earlier = count

    @contextmanager
    def waits_for_room(self, why: str) -> Iterator[None]:
        """Counts a sandbox that there is no room for as waiting."""
        self.waiting, self.waits, self._room = self.waiting + 1, self.waits + 1, why
        try:
            yield
        finally:
            self.waiting -= 1

    def say(self, line: str) -> None:
        """Print a line beside the counts."""
        self._say(line)

    def ended(self, reward: float | None, tokens: int) -> None:
        self.done += 1
        self.tokens += tokens
        if reward is None:
            self.failed += 1
        else:
            self.rewards.append(reward)

    def line(self) -> str:
        seconds = max(time.monotonic() - self._start, 1e-9)
        here = self.done - self._earlier
        left = seconds * (self.total - self.done) / here if here else None
        reward = f"{sum(self.rewards) / len(self.rewards):.3f}" if self.rewards else "-"
        clock = "?" if left is None else f"{int(left) // 60}:{int(left) % 60:02d}"
        return (
            f"{self.done}/{self.total} episodes done, {self.running} running, {self.failed} failed, "
            f"mean reward {reward}, {self.tokens / seconds:.0f} tok/s, {clock} left"
            + (f"; {self.note}" if self.note else "")
            + (f"; {self.waiting} wait for room: {self._room}" if self.waiting else "")
        )

    async def report(self) -> None:
        """Print until cancelled."""
        if self.quiet:
            await asyncio.Event().wait()
        terminal = sys.stderr.isatty()
        last = ""
        while True:
            await asyncio.sleep(TERMINAL_EVERY if terminal else PLAIN_EVERY)
            line = self.line()
            if terminal:
                sys.stderr.write(f"\r\x1b[K{line}")
                sys.stderr.flush()
            elif line != last:
                self._say(line)
            last = line
