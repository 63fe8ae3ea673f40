"""The rollout engine: runs the episodes of one shard, each in a sandbox of its own, through the recording proxy.

An episode is one attempt of a rollout. Whatever happens to it becomes a row with a status; the shard itself succeeds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from openforge import environments, harnesses, tables
from openforge.environments import EnvCallResult, verdict
from openforge.policy.lease import Endpoint
from openforge.proxy import journal, lineage
from openforge.proxy.client import Proxy, ProxyError, Summary
from openforge.rollout.partial import Partial
from openforge.rollout.progress import Progress
from openforge.rollout.status import ENDS
from openforge.sandboxes import LocalBackend, Sandbox, SandboxError, SandboxLost

# Between attempts of a rollout whose infrastructure failed: seconds, doubled each time.
BACK_OFF = 1.0
# Seconds that the policy may be asked beyond the agent's own time.
POLICY_GRACE = 60.0


@dataclass
class Shard:
    """What the episodes of one shard share.

    Attributes:
        staleness: (k-1) - b(k) of a training shard, None in evaluation.
        harness: the shard's harness, already warm; one group and one shard have one harness.
    """

    rows: Sequence[Mapping[str, Any]]
    partial: Partial
    proxy: Proxy
    endpoint: Endpoint
    backend: LocalBackend
    harness: harnesses.Harness
    concurrency: int
    attempts: int
    keep_artifacts: int
    staleness: int | None
    progress: Progress

    async def run(self) -> None:
        """Run every rollout that has not ended, `concurrency` at a time, in table order."""
        todo = [r for r in self.rows if not self._finished(r["rollout_id"])]
        self.progress.skip(len(self.rows) - len(todo))
        gate = asyncio.Semaphore(self.concurrency)
        reporter = asyncio.create_task(self.progress.report())
        try:
            async with asyncio.TaskGroup() as group:
                for row in todo:
                    # Acquired here and released by the task: rollouts start in table order.
                    await gate.acquire()
                    task = group.create_task(self._rollout(row))
                    task.add_done_callback(lambda _: gate.release())
        finally:
            reporter.cancel()

    def _finished(self, rollout_id: str) -> bool:
        """Whether a rollout has an end that is not to be retried, or no attempt left."""
        ended = self.partial.ended.get(rollout_id, [])
        return bool(ended) and (not ENDS[ended[-1]["status"]].retried or len(ended) >= self.attempts)

    async def _rollout(self, row: Mapping[str, Any]) -> None:
        self.progress.running += 1
        try:
            while True:
                attempt = self.partial.next_attempt(row["rollout_id"])
                started = datetime.now(UTC)
                self.partial.start(row["rollout_id"], attempt, started)
                episode = await self._episode(row, attempt, started)
                self.partial.end(episode)
                if self._finished(row["rollout_id"]):
                    break
                self.progress.retried += 1
                await asyncio.sleep(BACK_OFF * 2 ** len(self.partial.ended[row["rollout_id"]]))
        finally:
            self.progress.running -= 1
        reward = None
        if episode["verifier_output"] is not None and ENDS[episode["status"]].verified:
            reward = verdict.parse(episode["verifier_output"]).score
        self.progress.ended(reward, episode["response_tokens"])

    async def _episode(self, row: Mapping[str, Any], attempt: int, started: datetime) -> dict[str, Any]:
        """One attempt: sandbox, session, environment, evidence. Never raises for what befalls the episode."""
        episode_id = tables.episode_id(row["rollout_id"], attempt)
        out = self._row(row, episode_id, attempt, started)
        clock = time.monotonic()
        sandbox = None
        session = Session(self.proxy, episode_id)
        try:
            sandbox = await self.backend.create(episode_id, network=row["network"], binds=self.harness.binds())
            # The harness process lives where its commands run: what one can reach, the other can.
            reach = "own files, read-only system and harness software" + (
                ", the episode's proxy" if sandbox.network == "proxy" else ""
            )
            out["isolation"] = f"commands and harness: {sandbox.isolation}; reach: {reach}"
            out["network"] = sandbox.network
            secret = secrets.token_urlsafe(24)
            await self.proxy.open_session(
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
            base_url = await sandbox.route(self.proxy)
            out["seconds"]["setup"] = time.monotonic() - clock
            env = environments.create_env(row["environment"], sandbox)
            result = await env.run(
                task=row,
                llm_args=environments.llm_args(base_url, secret, self.endpoint.model, self.endpoint.context_window),
                harness=self.harness,
                harness_options=json.loads(row["harness_options"]),
                limits=row["limits"],
                session=session.close,
            )
            self._fill(out, result)
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
            await self._shut(session, sandbox)
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
        return any(row["rollout_id"] == r["rollout_id"] for r in self.rows[: self.keep_artifacts])

    def _keep(self, result: EnvCallResult, episode_id: str) -> str:
        """Keep the harness's log of an early episode; the path below results/<run>/."""
        name = f"{episode_id}.log"
        tables.write_beside(self.partial.artifacts / name, result.harness_log)
        return f"artifacts/{name}"

    def _row(self, row: Mapping[str, Any], episode_id: str, attempt: int, started: datetime) -> dict[str, Any]:
        """The episode row as far as it is known before anything ran."""
        same = (
            "rollout_id",
            "group_id",
            "task_id",
            "purpose",
            "cell",
            "iteration",
            "benchmark",
            "split",
            "sample",
        )
        return {k: row[k] for k in same} | {
            "episode_id": episode_id,
            "kind": row["tags"][0] if row["tags"] else None,
            "attempt": attempt,
            "final": False,
            "staleness": self.staleness,
            "harness": row["harness"],
            "harness_version": self.harness.version,
            "image_digest": "host",
            "verifier_version": row["verifier"]["version"],
            "isolation": "none reached",
            "network": row["network"],
            "policy_version": self.endpoint.policy_version,
            "status": "setup_failed",
            "message": None,
            "harness_exit": None,
            "verifier_output": None,
            "turns": 0,
            "prompt_tokens": 0,
            "response_tokens": 0,
            "seconds": dict.fromkeys(("queue", "setup", "agent", "verify", "total")),
            "started": started,
            "artifacts": None,
        }

    def _fill(self, out: dict[str, Any], result: EnvCallResult) -> None:
        out["status"], out["message"] = result.status, result.message
        out["harness_exit"], out["verifier_output"] = result.harness_exit, result.verifier_output
        out["harness_version"] = result.harness_version or out["harness_version"]
        setup = out["seconds"]["setup"] + result.seconds.pop("setup", 0.0)
        out["seconds"] |= result.seconds | {"setup": setup}

    def interrupted(self) -> list[dict[str, Any]]:
        """Rows of attempts that an earlier process of this shard started and did not live to end."""
        by_id = {r["rollout_id"]: r for r in self.rows}
        lost = []
        for rollout_id, attempts in self.partial.open.items():
            for record in attempts:
                episode = tables.episode_id(rollout_id, record["attempt"])
                started = datetime.fromisoformat(record["started"])
                row = self._row(by_id[rollout_id], episode, record["attempt"], started)
                lost.append(row | {"status": "sandbox_lost", "message": "the shard's job died under this attempt"})
        return lost


class Session:
    """An episode's session at the proxy, closed once: by the environment after the harness, or at the latest here."""

    def __init__(self, proxy: Proxy, episode_id: str) -> None:
        self._proxy, self._episode_id = proxy, episode_id
        self.opened = False
        self.summary: Summary | None = None

    async def close(self, harness_exited: bool) -> Summary | None:
        if self.opened and self.summary is None:
            self.summary = await self._proxy.close_session(self._episode_id, harness_exited)
        return self.summary


def finish(shard: Shard, run_dir: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """Episode, call and blob rows of a whole shard, from its partial folder.

    Exactly one attempt a rollout is final: its last one.
    """
    episodes = []
    for attempts in shard.partial.ended.values():
        for i, row in enumerate(sorted(attempts, key=lambda r: int(r["attempt"]))):
            episodes.append(row | {"final": i == len(attempts) - 1})
    order = {r["rollout_id"]: i for i, r in enumerate(shard.rows)}
    episodes += shard.interrupted()
    episodes.sort(key=lambda r: (order[r["rollout_id"]], r["attempt"]))
    by_episode: dict[str, list[dict[str, Any]]] = {}
    for record in journal.read(shard.partial.journal):
        by_episode.setdefault(record["episode_id"], []).append(record)
    calls: list[dict[str, Any]] = []
    blobs: dict[str, dict[str, Any]] = {}
    for row in episodes:
        more, content = lineage.call_rows(by_episode.get(row["episode_id"], []))
        calls += more
        blobs |= {b["sha256"]: b for b in content}
    kept = sorted(shard.partial.artifacts.glob("*"))
    if kept:
        (run_dir / "artifacts").mkdir(exist_ok=True)
        for f in kept:
            shutil.copyfile(f, run_dir / "artifacts" / f.name)
    return episodes, calls, list(blobs.values())
