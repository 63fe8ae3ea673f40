"""What is asked of an OpenAI-compatible server: where, and with which fields.

vLLM takes every sampling field and gives token ids. A plain endpoint (api `openai`) refuses whatever it does not know,
so it gets the fields of OpenAI's chat completions only, and gives no ids: its calls are not trainable.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

from openforge.proxy.calls import Json, Request

Api = Literal["vllm", "openai"]

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
# Fields of ours that no harness can mend when they are refused.
OURS = ("model", "max_completion_tokens", *SAMPLED)
# What a plain endpoint has no field for, and the value at which it is off.
_OFF = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
# Off at 0 everywhere, and refused by some models even there.
_PENALTIES = ("presence_penalty", "frequency_penalty")
# A seed of the harness's own could kill a vLLM on CPU that prefills in chunks. At most one tool call is a grammar there
# (vLLM 0.32), and what a grammar forces has no log-probability of the policy's.
_NOT_TO_VLLM = ("seed", "parallel_tool_calls")
_MESSAGE = ("role", "content", "name", "refusal", "tool_calls", "tool_call_id", "function_call")


def base_url(url: str) -> str:
    """An OpenAI base URL without a slash at its end; one without a path gets /v1."""
    bare = url.rstrip("/")
    return bare if urlsplit(bare).path else f"{bare}/v1"


def is_loopback(url: str) -> bool:
    """Whether a URL leads to this machine: an HTTP proxy of the environment must not see it."""
    return urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")


def not_taken(sampling: Mapping[str, Any]) -> str | None:
    """What a plain endpoint cannot be asked for, as a sentence; None if it takes all of it."""
    for key, off in _OFF.items():
        if sampling.get(key) not in (None, off):
            return (
                f"sampling.{key} is {sampling[key]}, for which an OpenAI-compatible endpoint has no field; set it to "
                f"{off} (off), or server.api to vllm if vLLM answers there"
            )
    return None


def call_seed(seed: int, call: int) -> int:
    """The seed of one call of an episode: 31 bits, for some servers take no more."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{call}".encode()).digest()[:4]) >> 1


def payload(api: Api, request: Request, model: str, sampling: Json, max_tokens: int, seed: int | None = None) -> Json:
    """The body sent upstream: the harness's text, the rollout's sampling and seed."""
    body = (_vllm if api == "vllm" else _plain)(request, model, sampling, max_tokens)
    return body if seed is None else body | {"seed": seed}


def _vllm(request: Request, model: str, sampling: Json, max_tokens: int) -> Json:
    return {
        "model": model,
        "messages": request.messages,
        **({"tools": request.tools} if request.tools else {}),
        **{k: v for k, v in request.forwarded.items() if k not in _NOT_TO_VLLM},
        **{k: sampling[k] for k in SAMPLED if sampling.get(k) is not None},
        "max_tokens": max_tokens,
        "stream": False,
        "logprobs": True,
        "top_logprobs": request.top_logprobs or 0,
        "return_token_ids": True,
        "include_stop_str_in_output": False,
    }


def _plain(request: Request, model: str, sampling: Json, max_tokens: int) -> Json:
    kept = {k: sampling[k] for k in ("temperature", "top_p") if sampling.get(k) is not None}
    penalties = {k: sampling[k] for k in _PENALTIES if sampling.get(k)}
    logprobs: Json = {}
    if request.top_logprobs is not None:
        logprobs = {"logprobs": True} | ({"top_logprobs": request.top_logprobs} if request.top_logprobs else {})
    return {
        "model": model,
        "messages": [_standard(m) for m in request.messages],
        **({"tools": request.tools} if request.tools else {}),
        **request.forwarded,
        **kept,
        **penalties,
        **logprobs,
        "max_tokens": max_tokens,
        "stream": False,
    }


def _standard(message: Json) -> Json:
    """Harnesses echo what a client library added to an answer: extra fields, and NULL for absent ones."""
    return {k: message[k] for k in _MESSAGE if k in message and (message[k] is not None or k == "content")}


def adapted(body: Json, refusal: str) -> Json | None:
    """A plain endpoint's body changed as its refusal asks, if that asks for the same in other fields; else None.

    Reasoning models know the limit by its newer name only, and take no temperature and no top_p, not even 1.
    """
    if "max_completion_tokens" in refusal and "max_tokens" in body:
        return {("max_completion_tokens" if k == "max_tokens" else k): v for k, v in body.items()}
    for key in ("temperature", "top_p"):
        if f"'{key}'" in refusal and body.get(key) == 1:
            return {k: v for k, v in body.items() if k != key}
    return None
