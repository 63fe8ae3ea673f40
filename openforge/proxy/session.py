"""A session is one episode's access to the policy: secret, sampling, budgets, and the calls made under it."""

from __future__ import annotations

import asyncio
import hmac
import os
import time
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from openforge.proxy import wire
from openforge.proxy.calls import Answer, Call, Json, Refusal, Request
from openforge.proxy.deltas import Deltas
from openforge.proxy.fastjson import dumps
from openforge.proxy.journal import Journal, JournalError
from openforge.proxy.opening import Config
from openforge.proxy.upstream import PolicyFailed, Upstream

# 404 ends a harness at once: mini-swe-agent sleeps and retries through any 400, 403 and 429, up to ten times.
FINAL = 404
# A shorter secret could be a word of the record itself; the engine's have 32 characters.
HIDDEN_LEAST = 16
# Answered calls whose answer is kept for a client that sends its request again. Each sends one at a time, and at once.
KEPT_ANSWERS = 32
# Seconds that a session which closes gives its answers to go out.
OUT_SECONDS = 1.0
# What clients expect; others are recorded as told, and shown to the harness as what they amount to.
FINISHES = ("stop", "length", "tool_calls", "content_filter", "abort")


@dataclass
class Generation:
    """A call on its way; its task is cancelled when nobody waits for it any more.

    Attributes:
        draw: which of the session's seeds samples it; a resend of what failed draws with the same one.
    """

    call: int
    draw: int
    task: asyncio.Task[Call]
    waiters: int = 0

    @contextmanager
    def joined(self) -> Iterator[asyncio.Task[Call]]:
        self.waiters += 1
        try:
            yield self.task
        finally:
            self.waiters -= 1
            if not self.waiters:
                self.task.cancel()


@dataclass
class Wait:
    """A call that has no answer yet, or that its client gave up.

    Attributes:
        begun, ended: time.monotonic(); `ended` is None while the call is asked.
        trouble: what the latest try failed with, None while none did.
        lost: seconds that went by before the latest try.
    """

    begun: float
    ended: float | None = None
    trouble: str | None = None
    lost: float = 0.0

    def failed(self, why: str) -> None:
        self.trouble, self.lost = why, time.monotonic() - self.begun


@dataclass
class Session:
    """State of an open or sealed session. All methods run on the server's event loop."""

    config: Config
    journal: Journal
    upstream: Upstream
    closed: bool = False
    budget_exhausted: bool = False
    policy_failed: str | None = None
    calls: int = 0
    # None once an answer came without usage: a sum over the rest would be no count.
    prompt_tokens: int | None = 0
    response_tokens: int | None = 0
    sent: set[int] = field(default_factory=set)
    open: set[int] = field(default_factory=set)
    _sealed: bool = False
    _closing: asyncio.Task[None] | None = None
    _out: asyncio.Event | None = None
    _arrivals: int = 0
    _latest: dict[str, Generation] = field(default_factory=dict)
    _running: set[asyncio.Task[Call]] = field(default_factory=set)
    # Tokens that each call on its way may sample: limits.tokens holds for calls at once too.
    _reserved: dict[int, int] = field(default_factory=dict)
    _waits: dict[int, Wait] = field(default_factory=dict)
    _outage: float = 0.0
    # Offset and length of each record.
    _places: array[int] = field(default_factory=lambda: array("q"))
    _deltas: Deltas = field(default_factory=Deltas)

    def __post_init__(self) -> None:
        c = self.config
        self.deadline = time.monotonic() + c.deadline_seconds
        limits = {"turns": c.turns, "tokens": c.tokens}
        told = {
            "policy_version": c.policy_version,
            "model": c.model,
            "context_window": c.context_window,
            "seed": c.seed,
        }
        self._write({"record": "open", "time": time.time(), "sampling": c.sampling, "limits": limits, **told})

    # ---- requests -------------------------------------------------------------------------------
    def authorize(self, headers: Mapping[str, str]) -> None:
        """Raises `Refusal` 401 unless one of the three key headers carries the session's secret."""
        bearer = headers.get("authorization", "")
        keys = (
            bearer[7:] if bearer[:7].lower() == "bearer " else "",
            headers.get("x-api-key", ""),
            headers.get("x-goog-api-key", ""),
        )
        secret = self.config.secret.encode()
        if not any(hmac.compare_digest(k.encode(errors="replace"), secret) for k in keys):
            raise Refusal(401, "invalid_api_key", "the API key is not the one of this session")

    def refuse_if_closed(self) -> None:
        if self.closed:
            raise Refusal(409, "session_closed", f"session {self.config.episode_id} is closed")

    def generation(self, request: Request) -> Generation:
        """The call that answers `request`: a new one, or the one that a client's resend repeats.

        Raises:
            Refusal: the session is closed, a budget is used up, or the policy server has failed for good.
        """
        self.refuse_if_closed()
        before = self._latest.get(request.sha256)
        if request.retry and before is not None and _alive(before.task):
            return before
        self._admit()
        call = self._arrivals
        self._arrivals += 1
        self.open.add(call)
        draw = before.draw if request.retry and before is not None else call
        most = self._reserved[call] = self._max_tokens(request)
        task = asyncio.create_task(self._generate(call, draw, request, time.time(), most))
        self._running.add(task)
        task.add_done_callback(partial(self._ended, call))
        # Where the key is there already, its place in the order would stay the first one's.
        self._latest.pop(request.sha256, None)
        self._latest[request.sha256] = generation = Generation(call, draw, task)
        self._forget()
        return generation

    def _forget(self) -> None:
        """Drop the oldest answers beyond `KEPT_ANSWERS`; whoever waits for a call has it from `generation`."""
        for key in list(self._latest)[: max(0, len(self._latest) - KEPT_ANSWERS)]:
            if self._latest[key].task.done():
                del self._latest[key]

    def _ended(self, call: int, task: asyncio.Task[Call]) -> None:
        self._running.discard(task)
        # A task that is cancelled before its first step has freed nothing itself.
        self._reserved.pop(call, None)
        # Whoever waited may be gone: an exception that nobody fetches is no bug here.
        if not task.cancelled():
            task.exception()

    def _admit(self) -> None:
        turns, tokens = self.config.turns, self.config.tokens
        # No figures in these sentences: pi retries whatever has 429, 500, 502 ... anywhere in its text.
        if self.policy_failed:
            raise Refusal(FINAL, "policy_failed", "the policy has failed for this episode")
        for limit, used, what in (
            (turns, len(self.sent) + len(self.open), "turns"),
            (tokens, self.response_tokens, "tokens"),
        ):
            if limit is not None and used is not None and used >= limit:
                self.budget_exhausted = True
                raise Refusal(FINAL, "budget_exhausted", f"the episode's budget of {what} is used up")
        left = self._left()
        if left is not None and left <= 0:
            # Not used up yet: what those calls leave over is there for a later one.
            sentence = "what is left of the episode's budget of tokens is reserved by the calls on their way"
            raise Refusal(FINAL, "budget_exhausted", sentence)

    def _left(self) -> int | None:
        """Tokens of the budget that are neither sampled nor reserved; None without a budget."""
        if self.config.tokens is None or self.response_tokens is None:
            return None
        return self.config.tokens - self.response_tokens - sum(self._reserved.values())

    def _max_tokens(self, request: Request) -> int:
        most = self.config.context_window
        for limit in (request.max_tokens, self.config.sampling.get("max_tokens")):
            most = min(most, limit) if limit else most
        left = self._left()
        return most if left is None else min(most, left)

    async def _generate(self, call: int, draw: int, request: Request, arrived: float, most: int) -> Call:
        seed = None if self.config.seed is None else wire.call_seed(self.config.seed, draw)
        body = wire.payload(self.upstream.api, request, self.config.model, self.config.sampling, most, seed)
        begun = time.monotonic()
        wait = self._waits[call] = Wait(begun)
        try:
            answer = await self.upstream.complete(
                body,
                self.deadline,
                self.config.context_window,
                wait.failed,
                self.config.episode_id,
            )
            self.refuse_if_closed()
            self._answered(wait)
            self._count(answer)
            self._record(call, request, arrived, time.monotonic() - begun, most, answer)
        except (PolicyFailed, JournalError) as e:
            self.policy_failed = self.policy_failed or str(e)
            self._failed(call, arrived, str(e))
            raise Refusal(503, "policy_failed", str(e)) from None
        except Refusal as e:
            self._failed(call, arrived, e.message)
            raise
        except asyncio.CancelledError:
            # Kept: a harness that is killed hangs up before its session is closed.
            wait.ended = time.monotonic()
            self._failed(call, arrived, "the client hung up before the answer")
            raise
        finally:
            del self._reserved[call]
            if wait.ended is None:
                self._waits.pop(call, None)
        used = self.response_tokens
        if answer.finish_reason == "length" and self.config.tokens is not None and (used or 0) >= self.config.tokens:
            self.budget_exhausted = True
        return Call(call, f"chatcmpl-{os.urandom(16).hex()}", int(time.time()), _shown(answer, request))

    def _answered(self, wait: Wait) -> None:
        """The policy answers: what was given up before had other reasons, but the time lost to failures is lost."""
        self._outage += wait.lost
        self._waits = {call: w for call, w in self._waits.items() if w.ended is None}

    def _count(self, answer: Answer) -> None:
        prompt = _counted(answer.usage.get("prompt_tokens"), answer.prompt_token_ids)
        response = _counted(answer.usage.get("completion_tokens"), answer.response_token_ids)
        if response is None and self.config.tokens is not None:
            raise PolicyFailed(
                f"{self.upstream.url} tells no usage, without which limits.tokens cannot be held; unset it"
            )
        self.prompt_tokens = _plus(self.prompt_tokens, prompt)
        self.response_tokens = _plus(self.response_tokens, response)

    # ---- the record -----------------------------------------------------------------------------
    def _record(
        self, call: int, request: Request, arrived: float, latency: float, max_tokens: int, answer: Answer
    ) -> None:
        """A call's whole record has the request's messages and tools, the answer's ids and logprobs, and what the
        session was opened with: policy_version, and sampling with this max_tokens."""
        prompt, response = answer.prompt_token_ids, answer.response_token_ids
        self._write(
            {
                "record": "call",
                "call": call,
                "dialect": request.dialect,
                "model": request.model,
                "arrived": arrived,
                "latency": latency,
                "max_tokens": max_tokens,
                "asked": {**request.forwarded, "max_tokens": request.max_tokens, "stream": request.stream},
                "retry": request.retry,
                "body_sha256": request.sha256,
                "response": answer.message,
                "finish_reason": answer.finish_reason,
                "usage": answer.usage,
            },
            self._deltas.fields(call, request.messages, request.tools, prompt, response, answer.logprobs),
        )
        self.calls += 1

    def _failed(self, call: int, arrived: float, reason: str) -> None:
        self.open.discard(call)
        if not self.closed:
            record = {"record": "failure", "call": call, "arrived": arrived, "reason": reason}
            try:
                self._write(record)
            except JournalError as e:
                self.policy_failed = self.policy_failed or str(e)

    def delivered(self, call: int) -> None:
        """The answer's body went out whole."""
        if not self._sealed and call not in self.sent:
            self.sent.add(call)
            self._write({"record": "delivery", "call": call, "state": "sent", "time": time.time()})
        self.undelivered(call)

    def undelivered(self, call: int) -> None:
        """It is not on its way any more. Where nobody took it, it is no turn, and a resend may still fetch it."""
        self.open.discard(call)
        if not self.open and self._out is not None:
            self._out.set()

    async def close(self, harness_exited: bool) -> None:
        """Seal the session: running generations are aborted, later requests refused. Idempotent."""
        if self._closing is None:
            self.closed = True
            self._closing = asyncio.create_task(self._close(harness_exited))
        await asyncio.shield(self._closing)

    async def _close(self, harness_exited: bool) -> None:
        self.policy_failed = self.policy_failed or await self._absent(harness_exited)
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._let_out()
        self._sealed = True
        self._latest.clear()
        self.open.clear()
        self._deltas = Deltas()
        end = {"budget_exhausted": self.budget_exhausted, "policy_failed": self.policy_failed}
        self._write({"record": "close", "time": time.time(), "harness_exited": harness_exited, **end})

    async def _let_out(self) -> None:
        """Wait for answers that are being written: a client may have read one whole, and its harness ended, before
        this process is told that the last byte went out."""
        if self.open:
            self._out = asyncio.Event()
            with suppress(TimeoutError):
                async with asyncio.timeout(OUT_SECONDS):
                    await self._out.wait()

    async def _absent(self, harness_exited: bool) -> str | None:
        """Why it is the policy, not the agent, that came to nothing at the end; None if it is not.

        A harness that was killed while its call found no policy server has not simply run out of time.
        """
        for wait in self._waits.values():
            if wait.trouble is not None:
                return f"the policy server was failing at the end: {wait.trouble}"
        up, episode = self.upstream, self.config.episode_id
        if not harness_exited and self._outage >= up.patience:
            return f"the policy server was failing for {self._outage:.0f} s of the agent's time"
        # One that hangs takes the connection and says nothing; a slow one answers others, or at least one token.
        waited = [(w.ended or time.monotonic()) - max(w.begun, up.heard(episode)) for w in self._waits.values()]
        if waited and max(waited) >= up.patience and (told := await up.probe(self.config.model, episode)) is not None:
            return f"the policy server left a call without an answer for {max(waited):.0f} s: {told}"
        return None

    def _write(self, record: Json, more: Mapping[str, bytes] | None = None) -> None:
        line = {"record": record["record"], "episode_id": self.config.episode_id, **record}
        secret = self.config.secret
        self._places.extend(self.journal.append(line, more, secret if len(secret) >= HIDDEN_LEAST else ""))

    def state(self) -> Json:
        """The session's figures so far."""
        return {
            "episode_id": self.config.episode_id,
            "closed": self.closed,
            "calls": self.calls,
            "turns": len(self.sent),
            "prompt_tokens": self.prompt_tokens,
            "response_tokens": self.response_tokens,
            "budget_exhausted": self.budget_exhausted,
            "policy_failed": self.policy_failed,
        }

    def summary(self) -> bytes:
        """`state` and the session's stored records as JSON, copied from the journal without decoding them."""
        lines = map(self.journal.line, zip(self._places[::2], self._places[1::2], strict=True))
        return dumps(self.state())[:-1] + b',"records":[' + b",".join(lines) + b"]}"


def _shown(answer: Answer, request: Request) -> Answer:
    """What a harness may see again on a resend; ids are in the journal and would fill the memory here."""
    content = None if request.top_logprobs is None else answer.logprobs_content
    bare = replace(answer, prompt_token_ids=None, response_token_ids=None, logprobs=None)
    finish = answer.finish_reason
    if finish not in FINISHES:
        finish = "tool_calls" if answer.message.get("tool_calls") else "stop"
    return replace(bare, logprobs_content=content, finish_reason=finish)


def _alive(task: asyncio.Task[Call]) -> bool:
    """Still running, or answered: a resend of what failed is a new try of the same call."""
    return not task.done() or (not task.cancelled() and task.exception() is None)


def _counted(told: Any, ids: array[int] | None) -> int | None:
    """Tokens by usage, else by ids; None where upstream told neither."""
    if isinstance(told, int) and not isinstance(told, bool):
        return told
    return None if ids is None else len(ids)


def _plus(total: int | None, more: int | None) -> int | None:
    return None if total is None or more is None else total + more
