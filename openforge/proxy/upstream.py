"""The one call to the policy server: not streamed, with ids and logprobs, retried while there is time."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Callable
from typing import Any

import aiohttp

from openforge.proxy.calls import Answer, Json, Refusal, Request

log = logging.getLogger(__name__)

SAMPLED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "max_tokens",
)
BACKOFF_FIRST, BACKOFF_MOST = 0.1, 5.0
_OVERFLOW = "maximum context length"
# vLLM's words when the prompt fills the window exactly: this proxy never asks for 0 tokens. Harnesses compact on
# the wording above only.
_FULL = "max_tokens must be at least 1"
# Wrong key, path or model name: nothing that a harness or a retry could mend.
_MISCONFIGURED = (401, 403, 404, 405)
_RETRIED = (408, 409, 425, 429)


class PolicyFailed(Exception):
    """The policy server gave no answer; the message says what it did last."""


class _Transient(Exception):
    """A failure that another try may mend."""


def call_seed(seed: int, call: int) -> int:
    """The seed of one call of an episode: 31 bits, for some servers take no more."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{call}".encode()).digest()[:4]) >> 1


def payload(request: Request, model: str, sampling: Json, max_tokens: int, seed: int | None = None) -> Json:
    """The body sent upstream: the harness's text, the rollout's sampling and seed."""
    return {
        "model": model,
        "messages": request.messages,
        **({"tools": request.tools} if request.tools else {}),
        **request.forwarded,
        **{k: sampling[k] for k in SAMPLED if sampling.get(k) is not None},
        **({} if seed is None else {"seed": seed}),
        "max_tokens": max_tokens,
        "stream": False,
        "logprobs": True,
        "top_logprobs": request.top_logprobs or 0,
        "return_token_ids": True,
        "include_stop_str_in_output": False,
    }


class Upstream:
    """Client of one policy server at `url` (without /v1)."""

    def __init__(self, url: str, key: str | None, client: aiohttp.ClientSession) -> None:
        self.url = f"{url.rstrip('/').removesuffix('/v1')}/v1/chat/completions"
        self._headers = {"content-type": "application/json"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"
        self._client = client

    async def complete(self, body: Json, deadline: float, window: int, trouble: Callable[[str], None]) -> Answer:
        """Ask until there is an answer.

        Args:
            body: see `payload`.
            deadline: time.monotonic() from which on no try goes on.
            window: tokens of the context window, for the sentence that says it is exceeded.
            trouble: told of every failed try, so that whoever cancels this call knows what it was waiting for.

        Raises:
            Refusal: the server refused this request (4xx); `context_length_exceeded` for an over-long prompt.
            PolicyFailed: no answer until the deadline, or one that no retry can mend.
        """
        data, wait, last = json.dumps(body).encode(), BACKOFF_FIRST, "no time was left to ask"
        begun = time.monotonic()
        while (left := deadline - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(left):
                    return await self._once(data, window)
            except (_Transient, aiohttp.ClientError, OSError) as e:
                # The deadline's own TimeoutError is an OSError too, and has no text.
                last = str(e) or f"{type(e).__name__} after {time.monotonic() - begun:.1f} s"
                trouble(last)
                log.warning("upstream: %s; asking again in %.1f s", last, wait)
                await asyncio.sleep(min(wait, max(0.0, deadline - time.monotonic())))
                wait = min(2 * wait, BACKOFF_MOST)
        raise PolicyFailed(f"the policy server at {self.url} gave no answer: {last}")

    async def _once(self, data: bytes, window: int) -> Answer:
        async with self._client.post(self.url, data=data, headers=self._headers) as r:
            raw = await r.read()
        if r.status == 200:
            return answer(raw)
        message = _message(raw)
        if r.status == 400 and _FULL in message:
            message = f"This model's maximum context length is {window} tokens, and the prompt fills it."
        if r.status == 400 and _OVERFLOW in message:
            raise Refusal(400, "context_length_exceeded", message)
        if r.status in _MISCONFIGURED:
            raise PolicyFailed(f"the policy server at {self.url} answered {r.status}: {message}")
        if 400 <= r.status < 500 and r.status not in _RETRIED:
            raise Refusal(r.status, "invalid_request", message)
        raise _Transient(f"status {r.status}: {message}")


def _message(raw: bytes) -> str:
    """The sentence in an error body of whatever shape."""
    try:
        body = json.loads(raw)
        body = body.get("error", body)
        return str(body["message"] if isinstance(body, dict) else body)
    except (ValueError, KeyError, AttributeError):
        return raw[:300].decode(errors="replace")


def answer(raw: bytes) -> Answer:
    """An upstream body in the internal form; what it lacks stays None, and the call is then not trainable."""
    try:
        body = json.loads(raw)
        choice = body["choices"][0]
        given = choice["message"]
        content = (choice.get("logprobs") or {}).get("content")
        logprobs = None if content is None else [float(t["logprob"]) for t in content]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as e:
        raise _Transient(f"status 200 with a body that is no chat completion ({type(e).__name__})") from None
    return Answer(
        message=_assistant(given),
        finish_reason=choice.get("finish_reason"),
        usage=body.get("usage") or {},
        logprobs_content=content,
        prompt_token_ids=body.get("prompt_token_ids"),
        response_token_ids=choice.get("token_ids"),
        logprobs=logprobs,
    )


def _assistant(given: dict[str, Any]) -> Json:
    """The assistant message without the server's empty extras."""
    kept = {k: v for k, v in given.items() if v not in (None, [], "") and k not in ("role", "content")}
    return {"role": "assistant", "content": given.get("content"), **kept}
