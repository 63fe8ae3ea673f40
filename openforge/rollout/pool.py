"""The sandboxes of a shard: made ahead where asked for, never more than there is room for, none left at the end.

A sandbox is made for one attempt and never handed to another: a warm one is that of a rollout whose turn has not come.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openforge import tables
from openforge.config_sandbox import Sandbox as Terms
from openforge.config_sandbox import SandboxLimits, image_of
from openforge.rollout.progress import Progress
from openforge.sandboxes import Backend, Bind, Limits, Sandbox, SandboxError, SandboxFull
from openforge.sandboxes.waiting import when_free

# Without a sandbox of this shard alive, room that others hold is waited for so long; then the shard stops.
FULL_SECONDS = 600.0
ANSWER_SECONDS = 10.0
HEARTBEAT_SECONDS = 60.0
GIB = 1 << 30


class NoRoom(RuntimeError):
    """The backend has had no room for any sandbox of the shard for too long; one sentence."""


@dataclass(frozen=True)
class Taken:
    """A sandbox for an attempt, and the seconds that were spent waiting for room."""

    sandbox: Sandbox
    queued: float


class Pool:
    """Makes, hands out and ends a shard's sandboxes.

    Args:
        terms: the configuration's section `sandbox`.
        binds: what must stand inside.
        root: the project's.
        progress: told who waits for room.
    """

    def __init__(
        self, backend: Backend, terms: Terms, binds: Callable[[], Sequence[Bind]], root: Path, progress: Progress
    ) -> None:
        self._backend, self._terms, self._binds, self._root = backend, terms, binds, root
        self._progress = progress
        self._creating = asyncio.Semaphore(terms.creating)
        self._room = asyncio.Semaphore(terms.max_alive) if terms.max_alive is not None else None
        self._ahead: dict[str, asyncio.Task[Taken]] = {}
        self._tasks: set[asyncio.Task[Taken]] = set()
        self._alive: dict[int, Sandbox] = {}
        self._freed = asyncio.Event()

    def ahead(self, upcoming: Sequence[tuple[Mapping[str, Any], int]]) -> None:
        """Begin to make the sandboxes of the next attempts, (rollout row, attempt) each, as many as are kept warm."""
        for row, attempt in upcoming[: self._terms.warm]:
            episode_id = tables.episode_id(row["rollout_id"], attempt)
            if episode_id not in self._ahead:
                task = asyncio.create_task(self._create(row, episode_id))
                self._ahead[episode_id] = task
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def take(self, row: Mapping[str, Any], episode_id: str) -> Taken:
        """The sandbox of an attempt: the one that was made ahead if it still answers, else a new one.

        Raises:
            SandboxError: it could not be made.
            NoRoom: there was no room for too long.
        """
        task = self._ahead.pop(episode_id, None)
        if task is not None:
            with contextlib.suppress(SandboxError, OSError):  # another try, by the attempt itself, decides
                taken = await task
                if await answers(taken.sandbox):
                    return taken
                self._progress.replaced += 1
                await self.end(taken.sandbox)
        return await self._create(row, episode_id)

    async def _create(self, row: Mapping[str, Any], episode_id: str) -> Taken:
        begun = time.monotonic()
        if self._room is not None:
            await self._room.acquire()
        try:
            async with self._creating:
                queued = time.monotonic() - begun
                sandbox, waited = await self._when_free(row, episode_id)
        except BaseException:
            self._release()
            raise
        self._alive[id(sandbox)] = sandbox
        await sandbox.start_heartbeat(HEARTBEAT_SECONDS)
        return Taken(sandbox, queued + waited)

    async def _when_free(self, row: Mapping[str, Any], episode_id: str) -> tuple[Sandbox, float]:
        """A new sandbox, and the seconds until there was room for it."""
        limits, image = limits_of(self._terms.limits), image_of(row, self._root)
        begun = tried = time.monotonic()

        async def create() -> Sandbox:
            nonlocal tried
            tried = time.monotonic()
            try:
                async with asyncio.timeout(self._terms.create_seconds):
                    return await self._backend.create(
                        episode_id, network=row["network"], image=image, binds=self._binds(), limits=limits
                    )
            except TimeoutError:
                raise SandboxError(
                    f"no sandbox within {self._terms.create_seconds:g} s (sandbox.create_seconds)"
                ) from None

        async def wait(full: SandboxFull) -> None:
            if not self._alive and time.monotonic() - begun > FULL_SECONDS:
                raise NoRoom(f"there has been no room for a sandbox for {FULL_SECONDS:g} s: {full}")
            with self._progress.waits_for_room(str(full)), contextlib.suppress(TimeoutError):
                self._freed.clear()
                await asyncio.wait_for(self._freed.wait(), full.retry_after)

        sandbox = await when_free(create, wait)
        return sandbox, tried - begun

    def _release(self) -> None:
        if self._room is not None:
            self._room.release()

    async def end(self, sandbox: Sandbox) -> None:
        """Delete a sandbox that was taken; one that cannot be is said, and left to its backend's reaper."""
        if self._alive.pop(id(sandbox), None) is None:
            return
        try:
            await sandbox.stop_heartbeat()
            await sandbox.delete()
        except SandboxError as e:
            self._progress.say(f"sandbox {sandbox.sandbox_id} could not be deleted: {e}")
        finally:
            self._release()
            self._freed.set()

    async def close(self) -> None:
        """End all that was made and not taken, and what was taken and not ended."""
        tasks = {*self._tasks, *self._ahead.values()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._ahead.clear()
        await asyncio.gather(*(self.end(s) for s in list(self._alive.values())))


async def answers(sandbox: Sandbox) -> bool:
    """Whether a sandbox is still there."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            await sandbox.list_files("/")
    except (SandboxError, OSError):
        return False
    return True


def limits_of(given: SandboxLimits) -> Limits | None:
    """Limits as a backend takes them; None for its own."""
    named = {
        "memory_bytes": None if given.memory_gb is None else int(given.memory_gb * GIB),
        "cpus": given.cpus,
        "processes": given.processes,
        "disk_bytes": None if given.disk_gb is None else int(given.disk_gb * GIB),
    }
    asked: dict[str, Any] = {k: v for k, v in named.items() if v is not None}
    return Limits(**asked, best_effort=given.best_effort) if asked else None
