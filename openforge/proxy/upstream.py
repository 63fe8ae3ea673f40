"""The one call to the policy: not streamed, with ids and logprobs, retried while there is time.

The policy may be served by several replicas. An episode's calls go to one of them as long as it answers (its prefix
cache knows the history); one that is dead, hangs, or fails again and again gets no calls until it has sampled a token.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import aiohttp

from openforge.proxy import wire
from openforge.proxy.calls import Answer, Json, Refusal
from openforge.proxy.fastjson import dumps, loads, well_formed

log = logging.getLogger(__name__)

BACKOFF_FIRST, BACKOFF_MOST = 0.1, 5.0
# Failures in a row after which a replica that can be reached is down, and seconds until one that is down is tried.
FAILURES_MOST = 3
DOWN_FIRST, DOWN_MOST = 1.0, 30.0
# vLLM and OpenAI; SGLang says the first or the second.
_OVERFLOW = ("maximum context length", "longer than the model's context length")
# vLLM's words when the prompt fills the window exactly: this proxy never asks for 0 tokens. Harnesses compact on
# the wording above only.
_FULL = "max_tokens must be at least 1"
# Wrong key, account, path or model name: nothing that a harness or a retry could mend.
_MISCONFIGURED = (401, 402, 403, 404, 405)
_RETRIED = (408, 409, 425, 429)
_WIDTH = array("i").itemsize
_HIGHEST = _WIDTH - 1 if sys.byteorder == "little" else 0


class PolicyFailed(Exception):
    """The policy server gave no answer; the message says what it did last."""


class _Transient(Exception):
    """A failure that another try may mend."""


class _Hung(_Transient):
    """A replica that takes requests and answers none."""


class Upstream:
    """The policy at one or several servers.

    Args:
        urls: OpenAI base URL of each.
        key: sent to all of them.

    Attributes:
        patience: seconds without any answer after which a server is in doubt.
        probe_seconds: seconds that `probe` waits.
        call_seconds: seconds that one call may take, retries included; None for its session's deadline only.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        key: str | None,
        client: aiohttp.ClientSession,
        api: wire.Api = "vllm",
        patience: float = 10.0,
        probe_seconds: float = 20.0,
        call_seconds: float | None = None,
    ) -> None:
        given = [urls] if isinstance(urls, str) else urls
        self.api, self.patience, self.probe_seconds, self.call_seconds = api, patience, probe_seconds, call_seconds
        self.replicas = [Replica(url, key, client, api) for url in dict.fromkeys(map(wire.base_url, given))]
        self._probes: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Where it is asked, for sentences."""
        return ", ".join(r.url for r in self.replicas)

    def heard(self, episode: str = "") -> float:
        """time.monotonic() of the latest answer to anybody from the replica that an episode's calls go to."""
        return self._ranked(episode)[0].answered

    async def probe(self, model: str, episode: str = "") -> str | None:
        """Ask the replica of an episode for one token: None if it comes, else what came instead."""
        return await self._ranked(episode)[0].probe(model, self.probe_seconds)

    async def complete(
        self, body: Json, deadline: float, window: int, trouble: Callable[[str], None], episode: str = ""
    ) -> Answer:
        """Ask until there is an answer, another replica at once where one fails, else again after a pause.

        Args:
            body: see `wire.payload`.
            deadline: time.monotonic() from which on no try goes on.
            window: tokens of the context window, for the sentence that says it is exceeded.
            trouble: told of every failed try, and again when the pause behind it is over, so that whoever cancels this
                call knows what it was waiting for, and how long.
            episode: its calls go to one replica as long as that is up.

        Raises:
            Refusal: the server refused this request (4xx); `context_length_exceeded` for an over-long prompt.
            PolicyFailed: no answer until the deadline, or one that no retry can mend.
        """
        wait, last = BACKOFF_FIRST, "no time was left to ask"
        begun = time.monotonic()
        if self.call_seconds is not None:
            deadline = min(deadline, begun + self.call_seconds)
        tried: list[Replica] = []
        while (left := deadline - time.monotonic()) > 0:
            self._revive(str(body["model"]))
            replica = next((r for r in self._ranked(episode) if r not in tried), None)
            if replica is None:
                log.warning("upstream: %s; asking again in %.1f s", last, wait)
                await asyncio.sleep(min(wait, left))
                trouble(last)
                wait, tried = min(2 * wait, BACKOFF_MOST), []
                continue
            try:
                async with asyncio.timeout(left):
                    answer = await self._asked(replica, body, window)
                replica.succeeded()
                return answer
            except (_Transient, aiohttp.ClientError, OSError) as e:
                # The deadline's own TimeoutError is an OSError too, has no text, and says less than what came before.
                if str(e) or wait == BACKOFF_FIRST:
                    last = str(e) or f"{type(e).__name__} after {time.monotonic() - begun:.1f} s"
                trouble(last)
                if time.monotonic() < deadline:
                    self._failed(replica, last, isinstance(e, (_Hung, aiohttp.ClientConnectorError, TimeoutError)))
            except PolicyFailed as e:
                if len(self.replicas) == 1 or all(r.down or r in tried for r in self.replicas if r is not replica):
                    raise
                # One that serves another model, or does not know the key, says nothing about the rest.
                self._failed(replica, str(e), dead=True)
            tried.append(replica)
        raise PolicyFailed(f"the policy server at {self.url} gave no answer: {last}")

    def _ranked(self, episode: str) -> list[Replica]:
        """Replicas in the order in which an episode's calls go to them: those that are up, else all.

        Rendezvous hashing: each keeps its episodes whatever becomes of the others.
        """
        if len(self.replicas) == 1:
            return self.replicas
        up = [r for r in self.replicas if not r.down] or self.replicas
        return sorted(up, key=lambda r: hashlib.sha256(f"{episode} {r.url}".encode()).digest())

    def _failed(self, replica: Replica, why: str, dead: bool) -> None:
        if replica.failed(dead) and len(self.replicas) > 1:
            log.warning("upstream: %s is down: %s", replica.url, why)

    def _revive(self, model: str) -> None:
        """Ask the replicas that have been down for a while for a token; no episode's call waits for them."""
        now = time.monotonic()
        for replica in self.replicas if len(self.replicas) > 1 else ():
            if replica.down and replica.again <= now:
                replica.again = math.inf
                task = asyncio.create_task(self._revived(replica, model))
                self._probes.add(task)
                task.add_done_callback(self._probes.discard)

    async def _revived(self, replica: Replica, model: str) -> None:
        if await replica.probe(model, self.probe_seconds) is None:
            log.warning("upstream: %s is up again", replica.url)
            replica.succeeded()
        else:
            replica.pause = min(2 * replica.pause, DOWN_MOST)
            replica.again = time.monotonic() + replica.pause

    async def _asked(self, replica: Replica, body: Json, window: int) -> Answer:
        """Ask once; where another replica could answer, one that hangs is not waited for."""
        if len(self.replicas) == 1:
            return await replica.ask(body, window)
        begun, asked = time.monotonic(), asyncio.create_task(replica.ask(body, window))
        try:
            while not (await asyncio.wait({asked}, timeout=self.patience))[0]:
                silent = time.monotonic() - max(begun, replica.answered)
                if silent < self.patience:
                    continue  # a slow one answers others meanwhile
                probe = asyncio.create_task(replica.probe(str(body["model"]), self.probe_seconds))
                await asyncio.wait({asked, probe}, return_when=asyncio.FIRST_COMPLETED)
                if not asked.done() and (told := await probe) is not None:
                    raise _Hung(f"{replica.url} left a call without an answer for {silent:.0f} s: {told}")
            return asked.result()
        finally:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)


class Replica:
    """Client of one policy server at the OpenAI base URL `base`.

    Attributes:
        answered: time.monotonic() of the latest answer to anybody.
        down: it gets no calls while another one is up.
        again: time.monotonic() from which on one that is down is asked for a token.
        pause: seconds between two such questions.
    """

    def __init__(self, base: str, key: str | None, client: aiohttp.ClientSession, api: wire.Api) -> None:
        self.url, self.api = f"{base}/chat/completions", api
        self.answered, self.down, self.again, self.pause = -math.inf, False, math.inf, DOWN_FIRST
        self._failures = 0
        self._probing: asyncio.Task[str | None] | None = None
        self._headers = {"content-type": "application/json"}
        self._key = key
        if key:
            self._headers["authorization"] = f"Bearer {key}"
        self._client = client
        # Refusals that changed the fields of every later request.
        self._learned: list[str] = []

    def succeeded(self) -> None:
        self._failures, self.down, self.pause = 0, False, DOWN_FIRST

    def failed(self, dead: bool) -> bool:
        """Count a failure; whether it is down since."""
        self._failures += 1
        if self.down or not (dead or self._failures >= FAILURES_MOST):
            return False
        self.down, self.again = True, time.monotonic() + self.pause
        return True

    async def probe(self, model: str, seconds: float) -> str | None:
        """Ask for one token: None if it comes, else what came instead. Who asks meanwhile shares the question."""
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._probe(model, seconds))
        return await asyncio.shield(self._probing)

    async def _probe(self, model: str, seconds: float) -> str | None:
        body = {"model": model, "messages": [{"role": "user", "content": "."}], "max_tokens": 1, "stream": False}
        try:
            async with asyncio.timeout(seconds):
                await self.ask(body, 0)
        except TimeoutError:
            return f"it did not sample one token in {seconds:g} s"
        except (_Transient, PolicyFailed, Refusal, aiohttp.ClientError, OSError) as e:
            return str(e) or type(e).__name__
        return None

    async def ask(self, body: Json, window: int) -> Answer:
        """One try; see `Upstream.complete` for what it raises."""
        for refusal in self._learned:
            body = wire.adapted(body, refusal) or body
        data = dumps(body)
        # A redirection would take the key elsewhere.
        async with self._client.post(self.url, data=data, headers=self._headers, allow_redirects=False) as r:
            raw = await r.read()
        if r.status == 200:
            whole = answer(raw, ids=self.api == "vllm")
            self.answered = time.monotonic()
            return whole
        told = _told(raw, self._key)
        message = told.message
        if r.status == 400 and _FULL in message:
            message = f"This model's maximum context length is {window} tokens, and the prompt fills it."
        if r.status == 400 and (any(w in message for w in _OVERFLOW) or told.code == "context_length_exceeded"):
            raise Refusal(400, "context_length_exceeded", message)
        if r.status == 400 and self.api == "openai":
            if wire.adapted(body, message) is not None:
                self._learned.append(message)
                return await self.ask(body, window)
            if told.param in wire.OURS:
                raise PolicyFailed(f"the endpoint {self.url} refuses {told.param}: {message}")
        if r.status in _MISCONFIGURED or 300 <= r.status < 400:
            raise PolicyFailed(f"the policy server at {self.url} answered {r.status}: {message}")
        if 400 <= r.status < 500 and r.status not in _RETRIED:
            raise Refusal(r.status, "invalid_request", message)
        raise _Transient(f"status {r.status}: {message}")


class _Told(NamedTuple):
    message: str
    code: Any = None
    param: Any = None


def _told(raw: bytes, key: str | None) -> _Told:
    """What an error body of whatever shape says, without the key: some endpoints repeat what they refuse."""
    text = raw.decode(errors="replace")
    if key:
        text = text.replace(key, "[key]")
    try:
        body = json.loads(text)
        body = body.get("error", body)
        if not isinstance(body, dict):
            return _Told(str(body))
        return _Told(str(body["message"]), body.get("code"), body.get("param"))
    except (ValueError, KeyError, AttributeError):
        return _Told(text[:300])


def answer(raw: bytes, ids: bool = True) -> Answer:
    """An upstream body in the internal form; what it lacks stays None, and the call is then not trainable.

    Args:
        ids: whether token ids were asked for. vLLM gives the prompt's beside the choices, SGLang within each.
    """
    try:
        body = loads(raw)
        choice = body["choices"][0]
        message = well_formed(_assistant(choice["message"]), raw)
        content, logprobs = _logprobs(choice)
        finish = choice.get("finish_reason")
        usage = dict(body.get("usage") or {})
        prompt = body.get("prompt_token_ids") or choice.get("prompt_token_ids")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as e:
        raise _Transient(f"status 200 with a body that is no chat completion ({type(e).__name__})") from None
    return Answer(
        message=message,
        finish_reason=None if finish is None else str(finish),
        usage=usage,
        logprobs_content=content,
        prompt_token_ids=_ids(prompt) if ids else None,
        response_token_ids=_ids(choice.get("token_ids")) if ids else None,
        logprobs=logprobs if ids else None,
        # SGLang calls it matched_stop.
        stop_reason=choice.get("stop_reason", choice.get("matched_stop")),
    )


def _assistant(given: dict[str, Any]) -> Json:
    """The assistant message without the server's empty extras.

    Raises:
        TypeError: it is none that a harness could be given.
    """
    content, tools = given.get("content"), given.get("tool_calls") or []
    if not isinstance(content, (str, list, type(None))) or not isinstance(tools, list):
        raise TypeError
    for tool in tools:
        if not isinstance(tool["function"]["name"], str):
            raise TypeError
    kept = {k: v for k, v in given.items() if v not in (None, [], "") and k not in ("role", "content")}
    return {"role": "assistant", "content": content, **kept}


def _ids(given: Any) -> array[int] | None:
    """Token ids, or None for what is no list of them: the answer is good all the same, only not to be trained."""
    if not isinstance(given, list):
        return None
    try:
        ids = array("i", given)
    except (TypeError, OverflowError):
        return None
    # The highest byte of each has no sign bit: a look at every id would cost as much as the rest of the call.
    return ids if ids.tobytes()[_HIGHEST::_WIDTH].isascii() else None


def _logprobs(choice: Json) -> tuple[list[Json] | None, list[float] | None]:
    """The server's entries and their figures; None where it gave none or garbage."""
    try:
        content = choice["logprobs"]["content"]
        return content, [float(t["logprob"]) for t in content]
    except (KeyError, TypeError, ValueError):
        return None, None
