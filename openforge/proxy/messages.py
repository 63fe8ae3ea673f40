"""Dialect `messages`: Anthropic's /v1/messages, plain and streamed.

Source: https://docs.anthropic.com/en/api/messages, /messages-streaming and /errors, and what Claude Code 2.1.332 sends.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from openforge.proxy import dialect
from openforge.proxy.calls import Call, Json, Refusal, Request
from openforge.proxy.dialect import bad, dumped, each

DIALECT = "messages"
ROLES = ("user", "assistant", "system")
# How Claude Code itself holds arguments that are no JSON object, and tells its model of them.
_UNPARSED = "__unparsedToolInput"
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    409: "invalid_request_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_STOPS = {"length": "max_tokens", "abort": "max_tokens", "content_filter": "refusal"}


# ---- requests ----------------------------------------------------------------------------------
def parse(raw: bytes, headers: Mapping[str, str]) -> Request:
    """A request's body in the internal form; unknown fields, tools without schema and other blocks are ignored.

    Raises:
        Refusal: 400, the body is no messages request or asks for what is not offered.
    """
    body = dialect.read_body(raw)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad("messages must be a list of at least one message")
    declared = dialect.objects(body.get("tools"), "tools")
    tools, deferred = _tools(declared)
    found = _system(body.get("system"))
    for i, message in enumerate(dialect.objects(messages, "messages")):
        found += _message(message, f"messages[{i}]", deferred)
    return Request(
        dialect=DIALECT,
        model=str(body.get("model") or ""),
        messages=dialect.template_roles(found),
        tools=tools,
        forwarded=_forwarded(body, tools),
        max_tokens=dialect.count(body, "max_tokens", 1),
        stream=bool(body.get("stream")),
        include_usage=True,
        top_logprobs=None,
        retry=dialect.retries(headers),
        sha256=dialect.sha256(raw),
    )


def _forwarded(body: Json, tools: list[Json] | None) -> Json:
    fields: Json = {}
    if stop := dialect.texts(body.get("stop_sequences"), "stop_sequences"):
        fields["stop"] = stop
    choice = body.get("tool_choice")
    if choice is not None:
        if not isinstance(choice, dict):
            raise bad(f"tool_choice is {dialect.shown(choice)}; it must be an object with a type")
        serial = choice.get("disable_parallel_tool_use")
        fields |= dialect.choice_fields(_tool_choice(choice), tools, not serial if isinstance(serial, bool) else None)
    config = body.get("output_config")
    form = config.get("format") if isinstance(config, dict) else body.get("output_format")
    if isinstance(form, dict) and form.get("type") == "json_schema":
        fields["response_format"] = dialect.schema_format(form.get("schema"))
    return fields


def _tool_choice(choice: Json) -> str | Json:
    kind = choice.get("type")
    if kind == "tool":
        return dialect.named(choice.get("name"))
    names = {"auto": "auto", "any": "required", "none": "none"}
    if not isinstance(kind, str) or kind not in names:
        raise bad(f"tool_choice.type is {dialect.shown(kind)}; it must be auto, any, tool or none")
    return names[kind]


def _tools(declared: list[Json]) -> tuple[list[Json] | None, dict[str, Json]]:
    """The declared tools that have a schema, and apart from them, by name, those that the harness has deferred."""
    tools, deferred = [], {}
    for i, tool in enumerate(declared):
        schema = tool.get("input_schema")
        if schema is None:
            continue
        function = dialect.function(tool.get("name"), tool.get("description"), schema, f"tools[{i}]")
        if tool.get("defer_loading") is True:
            deferred[function["function"]["name"]] = function
        else:
            tools.append(function)
    return tools or None, deferred


# ---- messages ----------------------------------------------------------------------------------
def _system(system: object) -> list[Json]:
    """The system prompt as one message: its blocks are pieces of one text."""
    told = "".join(dialect.without_billing(p["text"]) for p in dialect.parts(system, "system", _text_only))
    return [{"role": "system", "content": told}] if told else []


def _text_only(block: Json, where: str) -> Json | None:
    if block.get("type", "text") != "text":
        return None
    return dialect.text_part(dialect.text(block.get("text"), f"{where}.text"))


def _message(message: Json, where: str, deferred: Mapping[str, Json]) -> list[Json]:
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise bad(f"{where}.role is {dialect.shown(role)}; it must be one of {', '.join(ROLES)}")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    blocks = dialect.objects(blocks, f"{where}.content")
    if role == "assistant":
        return [_assistant(blocks, f"{where}.content")]
    return _turn(role, blocks, f"{where}.content", deferred)


def _turn(role: str, blocks: list[Json], where: str, deferred: Mapping[str, Json]) -> list[Json]:
    """A user's or system's blocks in their order: a tool's result is a message, and what stands between is one."""
    messages: list[Json] = []
    run: list[Json] = []

    def close() -> None:
        if run:
            messages.append({"role": role, "content": dialect.content_of(list(run))})
            run.clear()

    for i, block in enumerate(blocks):
        at = f"{where}[{i}]"
        if block.get("type") == "tool_result":
            close()
            messages.append(_result(block, at, deferred))
        elif (part := _part(block, at, deferred)) is not None:
            if role == "system" and part["type"] == "text":
                part = dialect.text_part(dialect.without_billing(part["text"]))
            # An empty text is no turn: what is left of a billing line must not be one in every second request.
            if part.get("text") != "":
                run.append(part)
    close()
    return messages


def _result(block: Json, where: str, deferred: Mapping[str, Json]) -> Json:
    found = dialect.parts(block.get("content"), f"{where}.content", lambda b, at: _part(b, at, deferred))
    ident = dialect.optional_text(block.get("tool_use_id"), f"{where}.tool_use_id")
    return {"role": "tool", "tool_call_id": ident, "content": dialect.result_of(found)}


def _part(block: Json, where: str, deferred: Mapping[str, Json]) -> Json | None:
    kind = block.get("type")
    if kind == "text":
        return dialect.text_part(dialect.text(block.get("text"), f"{where}.text"))
    if kind == "image":
        return dialect.image_part(_url(block.get("source")), f"{where}.source")
    if kind in ("document", "file", "search_result", "container_upload"):
        raise bad(f"{where} is a {kind}; offered are text and image")
    if kind == "tool_reference":
        # A tool that is loaded late is declared where it is loaded: in the tools it would change the prompt's head.
        name = block.get("tool_name")
        tool = deferred.get(name) if isinstance(name, str) else None
        return None if tool is None else dialect.text_part(json.dumps(tool, ensure_ascii=False))
    return None


def _url(source: object) -> object:
    if not isinstance(source, dict):
        return None
    if source.get("type") == "base64":
        media, data = source.get("media_type"), source.get("data")
        return f"data:{media};base64,{data}" if isinstance(media, str) and isinstance(data, str) else None
    return source.get("url")


def _assistant(blocks: list[Json], where: str) -> Json:
    said, thought, calls = [], [], []
    for i, block in enumerate(blocks):
        at, kind = f"{where}[{i}]", block.get("type")
        if kind == "text":
            said.append(dialect.text(block.get("text"), f"{at}.text"))
        elif kind == "thinking":
            thought.append(dialect.text(block.get("thinking"), f"{at}.thinking"))
        elif kind == "tool_use":
            calls.append(dialect.tool_call(block.get("id"), block.get("name"), _arguments(block.get("input")), at))
    return dialect.assistant("".join(said) or (None if calls else ""), "".join(thought), calls)


def _arguments(given: Any) -> Any:
    """Arguments as they were sampled, where they were no JSON object."""
    if isinstance(given, dict) and given.keys() == {_UNPARSED} and isinstance(given[_UNPARSED], dict):
        raw = given[_UNPARSED].get("raw")
        return raw if isinstance(raw, str) else given
    return json.dumps(given, ensure_ascii=False) if isinstance(given, dict) else given


# ---- answers -----------------------------------------------------------------------------------
def render(calls: Sequence[Call], request: Request) -> bytes:
    """The whole answer as one JSON body."""
    (call,) = calls
    return dumped(_head(call, request) | {"content": _content(call)} | _end(call) | {"usage": _usage(call)}).encode()


def stream(calls: Sequence[Call], request: Request, sent: int = 0) -> bytes:
    """The whole answer as server-sent events, from message_start to message_stop."""
    (call,) = calls
    message, usage = call.answer.message, _usage(call)
    thoughts, said = dialect.pieces(call.answer, dialect.reasoning_of(message), dialect.joined(message.get("content")))
    begun = _head(call, request) | {"content": [], "stop_reason": None, "stop_sequence": None}
    events = [_event("message_start", message=begun | {"usage": usage | {"output_tokens": 0}}), _event("ping")]
    for i, block in enumerate(_content(call)):
        kind = block["type"]
        start: Json
        if kind == "thinking":
            start, deltas = {"thinking": "", "signature": ""}, _deltas(i, "thinking_delta", "thinking", thoughts)
            deltas += _deltas(i, "signature_delta", "signature", [block["signature"]])
        elif kind == "text":
            start, deltas = {"text": ""}, _deltas(i, "text_delta", "text", said)
        else:
            start, deltas = {"input": {}}, _deltas(i, "input_json_delta", "partial_json", [json.dumps(block["input"])])
        events.append(_event("content_block_start", index=i, content_block=block | start))
        events += [deltas, _event("content_block_stop", index=i)]
    events += [_event("message_delta", delta=_end(call), usage=usage), _event("message_stop")]
    return "".join(events).encode()


def alive(ident: str, request: Request, sent: int) -> bytes:
    return _event("ping").encode()


def failed(refusal: Refusal, ident: str, request: Request, sent: int) -> bytes:
    return b"event: error\ndata: " + error(refusal) + b"\n\n"


def error(refusal: Refusal) -> bytes:
    """A refusal in Anthropic's shape and, where clients look at the words, in Anthropic's words."""
    message = _too_long(refusal.message) if refusal.code == "context_length_exceeded" else refusal.message
    kind = _KINDS.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "api_error")
    return dumped({"type": "error", "error": {"type": kind, "message": message}}).encode()


def _too_long(message: str) -> str:
    """The sentence that makes Claude Code compact, with the figures of the policy server's own."""
    limit = re.search(r"maximum context length is (\d+)", message)
    if limit is None:
        return f"prompt is too long: {message}"
    most = int(limit[1])
    longer = [n for n in map(int, re.findall(r"\d+", message)) if n > most]
    # A prompt that fills the window leaves no room for an answer.
    told, most = (max(longer), most) if longer else (most, most - 1)
    return f"prompt is too long: {told} tokens > {most} maximum"


def _event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {dumped({'type': kind, **fields})}\n\n"


def _deltas(index: int, kind: str, key: str, values: list[str]) -> str:
    name = "content_block_delta"
    front = f'event: {name}\ndata: {{"type":"{name}","index":{index},"delta":{{"type":"{kind}","{key}":'
    return each(front, values, "}}\n\n")


def _head(call: Call, request: Request) -> Json:
    return {"id": f"msg_{dialect.ident_of(call)}", "type": "message", "role": "assistant", "model": request.model}


def _end(call: Call) -> Json:
    answer = call.answer
    cut, stopped = _STOPS.get(answer.finish_reason or ""), answer.stop_reason
    if cut:
        return {"stop_reason": cut, "stop_sequence": None}
    if answer.message.get("tool_calls"):
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if isinstance(stopped, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stopped}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _content(call: Call) -> list[Json]:
    message = call.answer.message
    blocks: list[Json] = []
    if thought := dialect.reasoning_of(message):
        # Clients give a thought back only with its signature; nothing here depends on it.
        signature = hashlib.sha256(thought.encode(errors="surrogatepass")).hexdigest()
        blocks.append({"type": "thinking", "thinking": thought, "signature": signature})
    if said := dialect.joined(message.get("content")):
        blocks.append({"type": "text", "text": said})
    for i, tool in enumerate(message.get("tool_calls") or ()):
        function, ident = tool["function"], tool.get("id") or f"toolu_{dialect.ident_of(call)}_{i}"
        given = _input(function.get("arguments"))
        blocks.append({"type": "tool_use", "id": ident, "name": function["name"], "input": given})
    return blocks


def _input(arguments: Any) -> Json:
    """Arguments as the object that the format asks for; what is none, whole, as Claude Code holds it."""
    raw = arguments if isinstance(arguments, str) else dumped(arguments)
    if not raw:
        return {}
    try:
        given = json.loads(raw)
        # NaN and Infinity are no JSON, which no client but Python's would read.
        json.dumps(given, allow_nan=False)
    except (ValueError, RecursionError):
        given = None
    return given if isinstance(given, dict) else {_UNPARSED: {"raw": raw, "len": len(raw)}}


def _usage(call: Call) -> Json:
    """Upstream's figures; the format has no way to say that one is not known, so that is 0."""
    usage = call.answer.usage
    cached = dialect.told(usage, "cached_tokens", "prompt_tokens_details") or 0
    return {
        "input_tokens": (dialect.told(usage, "prompt_tokens") or 0) - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": dialect.told(usage, "completion_tokens") or 0,
    }
