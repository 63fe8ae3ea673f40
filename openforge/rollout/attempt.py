"""One attempt of a rollout: sandbox, session, environment, evidence. Whatever befalls it is a row with a status."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from openforge import environments, harnesses
from openforge.config_sandbox import Sandbox as Terms
from openforge.environments import EnvCallResult
from openforge.environments.phases import PhaseTimeout, within
from openforge.policy.lease import Endpoint
from openforge.policy.server import MODEL
from openforge.proxy.calls import REDACTED
from openforge.proxy.client import Proxy, ProxyError, Summary
from openforge.rollout.artifacts import Keeper
from openforge.rollout.machine import Machine
from openforge.rollout.pool import Pool
from openforge.rollout.rows import Book
from openforge.sandboxes import Sandbox, SandboxError, SandboxLost, SandboxUnsupported
from openforge.sandboxes.archive import pack
from openforge.sandboxes.join import WORK

# Seconds that the policy may be asked beyond the agent's own time.
POLICY_GRACE = 60.0
# Seconds that an episode may take beyond its phases together.
EPISODE_GRACE = 60.0
PACK_SECONDS = 60.0

# What befalls one episode and no other.
EPISODE_ERRORS = (SandboxError, PhaseTimeout, ProxyError, OSError, harnesses.HarnessError)
_REACH = {
    "none": "",
    "proxy": ", the episode's proxy and services",
    "open": ", the network of its host",
}


@dataclass
class Attempts:
    """What the attempts of a shard have in common."""

    book: Book
    endpoint: Endpoint
    machine: Machine
    pool: Pool
    keeper: Keeper
    harness: harnesses.Harness
    terms: Terms

    async def run(self, row: Mapping[str, Any], proxy: Proxy, attempt: int, started: datetime) -> dict[str, Any]:
        """The episode row of one attempt. Never raises for what befalls the episode alone.

        Raises:
            DiskFull: a file system was full meanwhile: nothing that was written then can be trusted.
            NoRoom: there was no room for a sandbox for too long.
        """
        out = self.book.row(row, attempt, started)
        clock, mark = time.monotonic(), self.machine.mark()
        sandbox, result, secret = None, None, secrets.token_urlsafe(24)
        session = Session(proxy, out["episode_id"])
        try:
            try:
                taken = await self.pool.take(row, out["episode_id"])
                sandbox, out["seconds"]["queue"] = taken.sandbox, taken.queued
                out["seconds"]["setup"] = time.monotonic() - clock - taken.queued
                self._note(out, sandbox)
                result = await self._episode(row, out, session, sandbox, secret)
                hide(result, secret)
                self._fill(out, result)
                # Over a limit of its sandbox's own, it is the agent that took too much.
                limited = self.terms.limits.memory_gb is not None
                if not limited and self.machine.short_of_memory(mark, result.harness_exit, result.verifier_exit):
                    out["status"], out["message"] = "sandbox_lost", "killed by the kernel for lack of memory"
                    out["verifier_output"] = None
            except EPISODE_ERRORS as e:
                out["status"], out["message"] = failure(e)
            await session.end()
            if sandbox is not None:
                await self._keep(row, out, result, sandbox, secret)
        finally:
            # Before the sandbox's files go: they may be what fills the disk.
            self.machine.look()
            try:
                await session.end()
            finally:
                if sandbox is not None:
                    await self.pool.end(sandbox)
        self.machine.check(mark)
        if out["message"] is not None:
            out["message"] = out["message"].replace(secret, REDACTED)
        if session.summary is not None:
            out["turns"] = session.summary.turns
            out["prompt_tokens"] = session.summary.prompt_tokens
            out["response_tokens"] = session.summary.response_tokens
        out["seconds"]["total"] = time.monotonic() - clock
        return out

    def _note(self, out: dict[str, Any], sandbox: Sandbox) -> None:
        # The harness process lives where its commands run: what one can reach, the other can.
        reach = f"own files, read-only system and harness software{_REACH[sandbox.network]}"
        out["isolation"] = f"commands and harness: {sandbox.isolation}; reach: {reach}"
        out["network"] = sandbox.network

    async def _episode(
        self, row: Mapping[str, Any], out: dict[str, Any], session: Session, sandbox: Sandbox, secret: str
    ) -> EnvCallResult:
        """The phases of an episode in its sandbox; the seconds of its setup so far go into `out`."""
        begun = time.monotonic()
        async with within("setup", self.terms.setup_seconds, "sandbox.setup_seconds"):
            await self._open(row, session, secret)
            base_url = await sandbox.route(session.proxy)
        setup = time.monotonic() - begun
        out["seconds"]["setup"] += setup
        left = max(self.terms.setup_seconds - setup, 0.0)
        verify = row["verifier"]["seconds"] + self.terms.verify_seconds
        env = environments.create_env(row["environment"], sandbox)
        run = env.run(
            task=row,
            # Always the same name: client libraries treat models that they know by name in ways of their own.
            llm_args=environments.llm_args(base_url, secret, MODEL, self.endpoint.context_window),
            harness=self.harness,
            harness_options=json.loads(row["harness_options"]),
            limits={**row["limits"], "setup_seconds": left, "verify_seconds": verify},
            session=session.close,
            judge=None if row["judge"] is None else json.loads(row["judge"]),
        )
        # Whatever an environment does with its own deadlines.
        most = left + row["limits"]["seconds"] + verify + EPISODE_GRACE
        async with within("episode's last", most, "the seconds of its phases together"):
            return await while_alive(session, run)

    async def _open(self, row: Mapping[str, Any], session: Session, secret: str) -> None:
        await session.proxy.open_session(
            session.episode_id,
            secret=secret,
            sampling=row["sampling"],
            limits=row["limits"],
            # Longer than the agent has: a slow agent must run out of its own time, not of the policy's.
            deadline_seconds=self.terms.setup_seconds + row["limits"]["seconds"] + POLICY_GRACE,
            policy_version=self.endpoint.policy_version,
            model=self.endpoint.model,
            context_window=self.endpoint.context_window,
            # Every attempt draws alike: a failure of infrastructure must not choose among samples.
            seed=row["seed"] if self.endpoint.seeded else None,
        )
        session.opened = True

    async def _keep(
        self, row: Mapping[str, Any], out: dict[str, Any], result: EnvCallResult | None, sandbox: Sandbox, secret: str
    ) -> None:
        if not self.keeper.wanted(row, out):
            return
        log, work = None if result is None else result.harness_log, None
        if self.keeper.work:
            # An attempt is not another one for want of its artifacts.
            with contextlib.suppress(SandboxError, TimeoutError):
                async with asyncio.timeout(PACK_SECONDS):
                    await sandbox.end_processes()
                    work = await pack(sandbox, WORK, lambda data: data.replace(secret.encode(), REDACTED.encode()))
        name = self.keeper.keep(out["episode_id"], log, work)
        out["artifacts"] = None if name is None else self.book.member(name)

    def _fill(self, out: dict[str, Any], result: EnvCallResult) -> None:
        out["status"], out["message"] = result.status, result.message
        out["harness_exit"], out["verifier_output"] = result.harness_exit, result.verifier_output
        out["answer"], out["dispatches"] = result.answer, result.dispatches
        out["audit"], out["snapshot"], out["user_rounds"] = result.audit, result.snapshot, result.user_rounds
        out["harness_version"] = result.harness_version or out["harness_version"]
        setup = out["seconds"]["setup"] + result.seconds.pop("setup", 0.0)
        out["seconds"] |= result.seconds | {"setup": setup}


def failure(e: Exception) -> tuple[str, str]:
    """Status and message of an attempt that ended with one of EPISODE_ERRORS."""
    if isinstance(e, SandboxLost) or (isinstance(e, PhaseTimeout) and e.phase != "setup"):
        return "sandbox_lost", str(e)
    if isinstance(e, SandboxUnsupported):
        return "unsupported", str(e)
    if isinstance(e, ProxyError):
        return "policy_failed", str(e)
    if isinstance(e, (SandboxError, PhaseTimeout)):
        return "setup_failed", str(e)
    return "setup_failed", f"{type(e).__name__}: {e}"


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
        self.proxy, self.episode_id = proxy, episode_id
        self.opened = False
        self.summary: Summary | None = None

    async def close(self, harness_exited: bool) -> Summary | None:
        if self.opened and self.summary is None:
            self.summary = await self.proxy.close_session(self.episode_id, harness_exited)
        return self.summary

    async def end(self) -> None:
        """Close what is still open: an episode that came so far has failed already, and says why."""
        with contextlib.suppress(ProxyError):
            await self.close(False)


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
