"""Dialect `chat`: OpenAI's /v1/chat/completions, plain and streamed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from openforge.proxy.calls import Call, Json, Refusal, Request

PATH = "chat/completions"
DIALECT = "chat"
FORWARDED = ("stop", "tool_choice", "parallel_tool_calls", "response_format", "seed")
TOP_LOGPROBS_MOST = 20


def parse(raw: bytes, headers: Mapping[str, str]) -> Request:
    """A request's body in the internal form; unknown fields are ignored.

    Raises:
        Refusal: 400, the body is no chat completion request or asks for what is not offered.
    """
    try:
        body = json.loads(raw)
    except ValueError as e:
        raise _bad(f"the request body is not JSON: {e}") from None
    if not isinstance(body, dict):
        raise _bad("the request body must be a JSON object")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise _bad("messages must be a list of at least one message")
    if body.get("n") not in (None, 1):
        raise _bad(f"n is {body['n']!r}; one choice a request is offered")
    tools = body.get("tools") or None
    # Servers refuse a tool choice without tools, and harnesses send one with an empty list.
    fields = {k: body[k] for k in FORWARDED if body.get(k) is not None and (tools or "tool" not in k)}
    options = body.get("stream_options")
    return Request(
        dialect=DIALECT,
        model=str(body.get("model") or ""),
        messages=[{**m, "role": "system"} if m.get("role") == "developer" else m for m in messages],
        tools=tools,
        forwarded=fields,
        max_tokens=_asked(body),
        stream=bool(body.get("stream")),
        include_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        top_logprobs=_count(body, "top_logprobs", TOP_LOGPROBS_MOST) or 0 if body.get("logprobs") else None,
        retry=_retry(headers),
        sha256=hashlib.sha256(raw).hexdigest(),
    )


def _bad(message: str) -> Refusal:
    return Refusal(400, "invalid_request", message)


def _count(body: Json, key: str, most: int | None = None) -> int | None:
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _bad(f"{key} is {value!r}; it must be a whole number, 0 or more")
    return value if most is None else min(value, most)


def _asked(body: Json) -> int | None:
    newer, older = _count(body, "max_completion_tokens"), _count(body, "max_tokens")
    return newer if newer is not None else older


def _retry(headers: Mapping[str, str]) -> int:
    value = headers.get("x-stainless-retry-count", "0")
    return int(value) if value.isdecimal() else 0


def render(call: Call, request: Request) -> bytes:
    """The whole answer as one JSON body."""
    choice: Json = {
        "index": 0,
        "message": call.answer.message,
        "finish_reason": call.answer.finish_reason,
        "logprobs": _logprobs(call, request),
    }
    usage: Json = {"usage": call.answer.usage} if call.answer.usage else {}
    body = _head(call, request, "chat.completion") | {"choices": [choice]} | usage
    return json.dumps(body).encode()


def stream(call: Call, request: Request) -> bytes:
    """The whole answer as server-sent events: the message, the finish reason, usage if asked for, [DONE]."""
    head = _head(call, request, "chat.completion.chunk")
    chunks: list[Json]
    message = call.answer.message
    tools = message.get("tool_calls") or []
    delta = {k: v for k, v in message.items() if k != "tool_calls"}
    deltas: list[Json] = [delta]
    if tools:
        deltas.append({"tool_calls": [{"index": i, **t} for i, t in enumerate(tools)]})
    chunks = [{"index": 0, "delta": d, "finish_reason": None} for d in deltas]
    if (logprobs := _logprobs(call, request)) is not None:
        chunks[0]["logprobs"] = logprobs
    chunks.append({"index": 0, "delta": {}, "finish_reason": call.answer.finish_reason})
    # With include_usage the API's chunks carry "usage": null but for the last, which has no choices.
    usage: Json = {"usage": None} if request.include_usage else {}
    events = [head | {"choices": [c]} | usage for c in chunks]
    if request.include_usage:
        events.append(head | {"choices": [], "usage": call.answer.usage or None})
    return b"".join(event(e) for e in events) + b"data: [DONE]\n\n"


def event(data: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def error(refusal: Refusal) -> Json:
    """A refusal in OpenAI's shape, as a body or an event of a stream that has begun."""
    kind = "invalid_request_error" if refusal.status < 500 else "server_error"
    return {"error": {"message": refusal.message, "type": kind, "param": None, "code": refusal.code}}


def models(window: int) -> Json:
    """The answer to GET /v1/models: the one model of a session, under the name that harnesses are given."""
    entry = {"id": "policy", "object": "model", "created": 0, "owned_by": "openforge", "max_model_len": window}
    return {"object": "list", "data": [entry]}


def _head(call: Call, request: Request, kind: str) -> dict[str, Any]:
    return {"id": call.id, "object": kind, "created": call.created, "model": request.model}


def _logprobs(call: Call, request: Request) -> Json | None:
    if request.top_logprobs is None or call.answer.logprobs_content is None:
        return None
    return {"content": call.answer.logprobs_content}
