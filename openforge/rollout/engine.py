"""The rollout engine: runs the episodes of one shard, each in a sandbox of its own, through the recording proxy.

An episode is one attempt of a rollout. Whatever happens to it becomes a row with a status. The shard itself stops only
when no episode could go well: a full disk, or no policy server or proxy to be had.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections import deque
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from openforge import environments, harnesses, tables
from openforge.environments import EnvCallResult, verdict
from openforge.policy.lease import Endpoint
from openforge.policy.server import MODEL
from openforge.proxy.calls import REDACTED
from openforge.proxy.client import KeptProxy, Proxy, ProxyError, Summary
from openforge.rollout.gate import Gate
from openforge.rollout.groups import Groups, Metric, metric_of
from openforge.rollout.machine import Machine
from openforge.rollout.partial import Partial
from openforge.rollout.progress import Progress
from openforge.rollout.rows import Book
from openforge.rollout.status import ENDS
from openforge.sandboxes import LocalBackend, Sandbox, SandboxError, SandboxLost

# Before another attempt of a rollout whose infrastructure failed: seconds, doubled each time.
BACK_OFF = 1.0
# Seconds that the policy may be asked beyond the agent's own time.
POLICY_GRACE = 60.0


@dataclass
class Shard:
    """What the episodes of one shard share.

    Attributes:
        book: the shard's rollout rows, and what its episode rows say.
        proxy: the recording proxy; another one takes its place when it dies.
        gate: shut while the policy server does not answer.
        machine: its disk and memory.
        harness: the shard's harness, already warm; one group and one shard have one harness.
        metric: what a group's episodes must differ in, or a reserve group takes its place.
    """

    book: Book
    partial: Partial
    proxy: KeptProxy
    endpoint: Endpoint
    gate: Gate
    machine: Machine
    backend: LocalBackend
    harness: harnesses.Harness
    concurrency: int
    attempts: int
    keep_artifacts: int
    progress: Progress
    metric: Metric = "reward"
    _groups: Groups = field(init=False)
    _todo: deque[Mapping[str, Any]] = field(init=False)

    async def run(self) -> None:
        """Run every rollout that has not ended, `concurrency` at a time, in table order, and reserve groups as due.

        Raises:
            ExceptionGroup: of what stops a shard (a full disk, a policy server or proxy that is gone for good). What
                has ended is kept; what was running counts as interrupted, and is run once more by the next command.
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
        more = self._groups.ended(row, metric_of(episode, self.metric))
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
                episode = await self._episode(row, proxy, attempt, started)
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

    async def _episode(self, row: Mapping[str, Any], proxy: Proxy, attempt: int, started: datetime) -> dict[str, Any]:
        """One attempt: sandbox, session, environment, evidence. Never raises for what befalls the episode alone.

        Raises:
            DiskFull: a file system was full meanwhile: nothing that was written then can be trusted.
        """
        out = self.book.row(row, attempt, started)
        episode_id, clock, mark = out["episode_id"], time.monotonic(), self.machine.mark()
        sandbox = None
        session, secret = Session(proxy, episode_id), secrets.token_urlsafe(24)
        try:
            sandbox = await self.backend.create(episode_id, network=row["network"], binds=self.harness.binds())
            # The harness process lives where its commands run: what one can reach, the other can.
            reach = "own files, read-only system and harness software" + (
                ", the episode's proxy" if sandbox.network == "proxy" else ""
            )
            out["isolation"] = f"commands and harness: {sandbox.isolation}; reach: {reach}"
            out["network"] = sandbox.network
            await proxy.open_session(
                episode_id,
                secret=secret,
                sampling=row["sampling"],
                limits=row["limits"],
                # Longer than the agent has: a slow agent must run out of its own time, not of the policy's.
                deadline_seconds=row["limits"]["seconds"] + POLICY_GRACE,
                policy_version=self.endpoint.policy_version,
                model=self.endpoint.model,
                context_window=self.endpoint.context_window,
                # Every attempt draws alike: a failure of infrastructure must not choose among samples.
                seed=row["seed"] if self.endpoint.seeded else None,
            )
            session.opened = True
            base_url = await sandbox.route(proxy)
            out["seconds"]["setup"] = time.monotonic() - clock
            env = environments.create_env(row["environment"], sandbox)
            run = env.run(
                task=row,
                # Always the same name: client libraries treat models that they know by name in ways of their own.
                llm_args=environments.llm_args(base_url, secret, MODEL, self.endpoint.context_window),
                harness=self.harness,
                harness_options=json.loads(row["harness_options"]),
                limits=row["limits"],
                session=session.close,
                judge=None if row["judge"] is None else json.loads(row["judge"]),
            )
            result = await while_alive(session, run)
            hide(result, secret)
            self._fill(out, result)
            if self.machine.short_of_memory(mark, result.harness_exit, result.verifier_exit):
                out["status"], out["message"] = "sandbox_lost", "killed by the kernel for lack of memory"
                out["verifier_output"] = None
            if attempt == 0 and self._kept(row):
                out["artifacts"] = self._keep(result, episode_id)
        except SandboxLost as e:
            out["status"], out["message"] = "sandbox_lost", str(e)
        except SandboxError as e:
            out["status"], out["message"] = "setup_failed", str(e)
        except ProxyError as e:
            out["status"], out["message"] = "policy_failed", str(e)
        except (OSError, harnesses.HarnessError) as e:
            out["status"], out["message"] = "setup_failed", f"{type(e).__name__}: {e}"
        finally:
            # Before the sandbox's files go: they may be what fills the disk.
            self.machine.look()
            await self._shut(session, sandbox)
        self.machine.check(mark)
        if out["message"] is not None:
            out["message"] = out["message"].replace(secret, REDACTED)
        if session.summary is not None:
            out["turns"] = session.summary.turns
            out["prompt_tokens"] = session.summary.prompt_tokens
            out["response_tokens"] = session.summary.response_tokens
        out["seconds"]["total"] = time.monotonic() - clock
        return out

    async def _shut(self, session: Session, sandbox: Sandbox | None) -> None:
        try:
            # An episode that came this far without closing it has failed already, and says why.
            with contextlib.suppress(ProxyError):
                await session.close(False)
        finally:
            if sandbox is not None:
                await sandbox.delete()

    def _kept(self, row: Mapping[str, Any]) -> bool:
        return any(row["rollout_id"] == r["rollout_id"] for r in self.book.rows[: self.keep_artifacts])

    def _keep(self, result: EnvCallResult, episode_id: str) -> str:
        """Keep the harness's log of an early episode; where it will be found."""
        tables.write_beside(self.partial.artifacts / f"{episode_id}.log", result.harness_log)
        return self.book.member(episode_id)

    def _fill(self, out: dict[str, Any], result: EnvCallResult) -> None:
        out["status"], out["message"] = result.status, result.message
        out["harness_exit"], out["verifier_output"] = result.harness_exit, result.verifier_output
        out["answer"], out["dispatches"] = result.answer, result.dispatches
        out["audit"], out["snapshot"], out["user_rounds"] = result.audit, result.snapshot, result.user_rounds
        out["harness_version"] = result.harness_version or out["harness_version"]
        setup = out["seconds"]["setup"] + result.seconds.pop("setup", 0.0)
        out["seconds"] |= result.seconds | {"setup": setup}


def hide(result: EnvCallResult, secret: str) -> None:
    """Take the session's key out of what is kept: it opens nothing any more, but no key stands in a table."""
    for name in ("verifier_output", "answer", "audit", "snapshot"):
        text = getattr(result, name)
        if text is not None:
            setattr(result, name, text.replace(secret, REDACTED))
    for dispatch in result.dispatches or ():
        dispatch |= {k: v.replace(secret, REDACTED) for k, v in dispatch.items() if isinstance(v, str)}
    result.harness_log = result.harness_log.replace(secret.encode(), REDACTED.encode())


class Session:
    """An episode's session at the proxy, closed once: by the environment after the harness, or at the latest here."""

    def __init__(self, proxy: Proxy, episode_id: str) -> None:
        self.proxy, self._episode_id = proxy, episode_id
        self.opened = False
        self.summary: Summary | None = None

    async def close(self, harness_exited: bool) -> Summary | None:
        if self.opened and self.summary is None:
            self.summary = await self.proxy.close_session(self._episode_id, harness_exited)
        return self.summary


async def while_alive(session: Session, run: Coroutine[Any, Any, EnvCallResult]) -> EnvCallResult:
    """An episode's result, as long as its proxy lives or is not needed any more.

    Raises:
        ProxyError: the proxy died under it; the episode was ended.
    """
    proxy = session.proxy
    episode, dead = asyncio.create_task(run), asyncio.create_task(proxy.died())
    try:
        await asyncio.wait((episode, dead), return_when=asyncio.FIRST_COMPLETED)
        if not episode.done() and session.summary is None:
            raise ProxyError(f"the recording proxy (pid {proxy.pid}) died under the episode; its log is {proxy.log}")
        return await episode
    finally:
        for task in (episode, dead):
            task.cancel()
        await asyncio.gather(episode, dead, return_exceptions=True)


def innermost(error: Exception) -> Exception:
    """What a group of exceptions began with."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
