"""The rollout engine: runs the episodes of one shard, each in a sandbox of its own, through the recording proxy.

An episode is one attempt of a rollout (attempt.py), and becomes a row with a status whatever happens to it. The shard
itself stops only when no episode could go well: a full disk, or no room for a sandbox, no policy server or proxy.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from openforge import harnesses
from openforge.config_sandbox import Sandbox
from openforge.environments import verdict
from openforge.environments.verdict import Claw
from openforge.policy.lease import Endpoint
from openforge.proxy.client import KeptProxy
from openforge.rollout.artifacts import Keeper
from openforge.rollout.attempt import Attempts
from openforge.rollout.gate import Gate
from openforge.rollout.groups import Groups, Metric, metric_of
from openforge.rollout.machine import Machine
from openforge.rollout.partial import Partial
from openforge.rollout.pool import Pool
from openforge.rollout.progress import Progress
from openforge.rollout.rows import Book
from openforge.rollout.status import ENDS
from openforge.sandboxes import Backend

# Before another attempt of a rollout whose infrastructure failed: seconds, doubled each time.
BACK_OFF = 1.0


@dataclass
class Shard:
    """What the episodes of one shard share.

    Attributes:
        book: the shard's rollout rows, and what its episode rows say.
        proxy: the recording proxy; another one takes its place when it dies.
        gate: shut while the policy server does not answer.
        machine: its disk and memory.
        harness: the shard's harness, already warm; one group and one shard have one harness.
        sandbox: the configuration's section on sandboxes.
        metric: what a group's episodes must differ in, or a reserve group takes its place.
        claw: what the reward of a verdict with ClawEval's dimensions is.
    """

    book: Book
    partial: Partial
    proxy: KeptProxy
    endpoint: Endpoint
    gate: Gate
    machine: Machine
    backend: Backend
    harness: harnesses.Harness
    concurrency: int
    attempts: int
    sandbox: Sandbox
    progress: Progress
    metric: Metric = "reward"
    claw: Claw = "pass"
    _groups: Groups = field(init=False)
    _todo: deque[Mapping[str, Any]] = field(init=False)
    _pool: Pool = field(init=False)
    _attempts: Attempts = field(init=False)

    def __post_init__(self) -> None:
        root = self.harness.root
        self._pool = Pool(self.backend, self.sandbox, self.harness.binds, root, self.progress)
        keeper = Keeper(self.sandbox.artifacts, self.partial.artifacts, self.book.rows)
        self._attempts = Attempts(
            self.book, self.endpoint, self.machine, self._pool, keeper, self.harness, self.sandbox
        )

    async def run(self) -> None:
        """Run every rollout that has not ended, `concurrency` at a time, in table order, and reserve groups as due.

        Raises:
            ExceptionGroup: of what stops a shard (a full disk, no room for a sandbox, a policy server or proxy that is
                gone for good). What has ended is kept; what was running counts as interrupted, and is run once more by
                the next command.
        """
        self.machine.check()
        self._resume()
        try:
            async with asyncio.TaskGroup() as group:
                watches = (self.progress.report(), self.machine.watch(), self.gate.watch())
                tasks = [group.create_task(w) for w in watches]
                await self._all()
                for task in tasks:
                    task.cancel()
        except Exception as e:
            self.partial.stop(str(innermost(e)))
            raise
        finally:
            await self._pool.close()

    def _resume(self) -> None:
        """Take up what an earlier process left: what has ended counts for its group, what has not is to do."""
        self._groups = Groups(self.book.rows, self.partial.begun)
        due = self._groups.due
        finished = [r for r in due if self._finished(r["rollout_id"])]
        self._todo = deque(r for r in due if not self._finished(r["rollout_id"]))
        self.progress.total = len(due)
        self.progress.skip(len(finished))
        for row in finished:
            self._ended(row, self.partial.ended[row["rollout_id"]][-1])

    def _ended(self, row: Mapping[str, Any], episode: Mapping[str, Any]) -> None:
        more = self._groups.ended(row, metric_of(episode, self.metric, self.claw))
        self.progress.total += len(more)
        self._todo.extend(more)

    async def _all(self) -> None:
        free = asyncio.Semaphore(self.concurrency)
        running: set[asyncio.Task[None]] = set()
        async with asyncio.TaskGroup() as group:
            while self._todo or running:
                if not self._todo:
                    # The end of one may be what makes a reserve group due.
                    done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    running -= done
                    continue
                # Acquired here and released by the task: rollouts start in table order.
                await free.acquire()
                task = group.create_task(self._rollout(self._todo.popleft()))
                task.add_done_callback(lambda _: free.release())
                running.add(task)
                self._ahead()

    def _ahead(self) -> None:
        """Have the sandboxes of the next rollouts made."""
        following = islice(self._todo, self.sandbox.warm)
        self._pool.ahead([(row, self.partial.next_attempt(row["rollout_id"])) for row in following])

    def _finished(self, rollout_id: str) -> bool:
        """Whether a rollout has an end that is not to be retried, or no attempt left."""
        ended = self.partial.ended.get(rollout_id, [])
        used = len(ended) - self.partial.forgiven.get(rollout_id, 0)
        return bool(ended) and (not ENDS[ended[-1]["status"]].retried or used >= self.attempts)

    async def _rollout(self, row: Mapping[str, Any]) -> None:
        self.progress.running += 1
        back_off = BACK_OFF
        try:
            while True:
                await self.gate.passed()
                proxy = await self.proxy.get()
                attempt = self.partial.next_attempt(row["rollout_id"])
                started = datetime.now(UTC)
                self.partial.start(row["rollout_id"], attempt, started)
                episode = await self._attempts.run(row, proxy, attempt, started)
                self.partial.end(episode)
                if episode["status"] == "policy_failed":
                    self.gate.doubt()
                else:
                    self.gate.progress()
                if self._finished(row["rollout_id"]):
                    break
                self.progress.retried += 1
                await asyncio.sleep(back_off)
                back_off *= 2
        finally:
            self.progress.running -= 1
        reward = None
        if episode["verifier_output"] is not None and ENDS[episode["status"]].verified:
            reward = verdict.parse(episode["verifier_output"]).score
        self.progress.ended(reward, episode["response_tokens"] or 0)
        self._ended(row, episode)


def innermost(error: Exception) -> Exception:
    """What a group of exceptions began with."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
