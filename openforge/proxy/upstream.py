"""The one call to the policy server: not streamed, with ids and logprobs, retried while there is time."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import aiohttp

from openforge.proxy import wire
from openforge.proxy.calls import Answer, Json, Refusal

log = logging.getLogger(__name__)

BACKOFF_FIRST, BACKOFF_MOST = 0.1, 5.0
_OVERFLOW = "maximum context length"
# vLLM's words when the prompt fills the window exactly: this proxy never asks for 0 tokens. Harnesses compact on
# the wording above only.
_FULL = "max_tokens must be at least 1"
# Wrong key, account, path or model name: nothing that a harness or a retry could mend.
_MISCONFIGURED = (401, 402, 403, 404, 405)
_RETRIED = (408, 409, 425, 429)


class PolicyFailed(Exception):
    """The policy server gave no answer; the message says what it did last."""


class _Transient(Exception):
    """A failure that another try may mend."""


class Upstream:
    """Client of one policy server at the OpenAI base URL `url`.

    Attributes:
        patience: seconds without any answer after which a server is in doubt.
        probe_seconds: seconds that `probe` waits.
        answered: time.monotonic() of the latest answer to anybody.
    """

    def __init__(
        self,
        url: str,
        key: str | None,
        client: aiohttp.ClientSession,
        api: wire.Api = "vllm",
        patience: float = 10.0,
        probe_seconds: float = 20.0,
    ) -> None:
        self.url, self.api = f"{wire.base_url(url)}/chat/completions", api
        self.patience, self.probe_seconds, self.answered = patience, probe_seconds, -math.inf
        self._probing: asyncio.Task[str | None] | None = None
        self._headers = {"content-type": "application/json"}
        self._key = key
        if key:
            self._headers["authorization"] = f"Bearer {key}"
        self._client = client
        # Refusals that changed the fields of every later request.
        self._learned: list[str] = []

    async def probe(self, model: str) -> str | None:
        """Ask for one token: None if it comes, else what came instead. Who asks meanwhile shares the question."""
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._probe(model))
        return await asyncio.shield(self._probing)

    async def _probe(self, model: str) -> str | None:
        body = {"model": model, "messages": [{"role": "user", "content": "."}], "max_tokens": 1, "stream": False}
        try:
            async with asyncio.timeout(self.probe_seconds):
                await self._once(body, 0)
        except TimeoutError:
            return f"it did not sample one token in {self.probe_seconds:g} s"
        except (_Transient, PolicyFailed, Refusal, aiohttp.ClientError, OSError) as e:
            return str(e) or type(e).__name__
        return None

    async def complete(self, body: Json, deadline: float, window: int, trouble: Callable[[str], None]) -> Answer:
        """Ask until there is an answer.

        Args:
            body: see `wire.payload`.
            deadline: time.monotonic() from which on no try goes on.
            window: tokens of the context window, for the sentence that says it is exceeded.
            trouble: told of every failed try, so that whoever cancels this call knows what it was waiting for.

        Raises:
            Refusal: the server refused this request (4xx); `context_length_exceeded` for an over-long prompt.
            PolicyFailed: no answer until the deadline, or one that no retry can mend.
        """
        wait, last = BACKOFF_FIRST, "no time was left to ask"
        begun = time.monotonic()
        while (left := deadline - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(left):
                    return await self._once(body, window)
            except (_Transient, aiohttp.ClientError, OSError) as e:
                # The deadline's own TimeoutError is an OSError too, and has no text.
                last = str(e) or f"{type(e).__name__} after {time.monotonic() - begun:.1f} s"
                trouble(last)
                log.warning("upstream: %s; asking again in %.1f s", last, wait)
                await asyncio.sleep(min(wait, max(0.0, deadline - time.monotonic())))
                wait = min(2 * wait, BACKOFF_MOST)
        raise PolicyFailed(f"the policy server at {self.url} gave no answer: {last}")

    async def _once(self, body: Json, window: int) -> Answer:
        for refusal in self._learned:
            body = wire.adapted(body, refusal) or body
        data = json.dumps(body).encode()
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
        if r.status == 400 and (_OVERFLOW in message or told.code == "context_length_exceeded"):
            raise Refusal(400, "context_length_exceeded", message)
        if r.status == 400 and self.api == "openai":
            if wire.adapted(body, message) is not None:
                self._learned.append(message)
                return await self._once(body, window)
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
        ids: whether token ids were asked for.
    """
    try:
        body = json.loads(raw)
        choice = body["choices"][0]
        message = _assistant(choice["message"])
        content = (choice.get("logprobs") or {}).get("content")
        logprobs = None if content is None else [float(t["logprob"]) for t in content]
        finish = choice.get("finish_reason")
        usage = dict(body.get("usage") or {})
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as e:
        raise _Transient(f"status 200 with a body that is no chat completion ({type(e).__name__})") from None
    return Answer(
        message=message,
        finish_reason=None if finish is None else str(finish),
        usage=usage,
        logprobs_content=content,
        prompt_token_ids=body.get("prompt_token_ids") if ids else None,
        response_token_ids=choice.get("token_ids") if ids else None,
        logprobs=logprobs if ids else None,
        stop_reason=choice.get("stop_reason"),
    )


def _assistant(given: dict[str, Any]) -> Json:
    """The assistant message without the server's empty extras."""
    kept = {k: v for k, v in given.items() if v not in (None, [], "") and k not in ("role", "content")}
    return {"role": "assistant", "content": given.get("content"), **kept}
