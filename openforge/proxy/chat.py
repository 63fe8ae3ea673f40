"""Dialect `chat`: OpenAI's /v1/chat/completions, plain and streamed.

Source: https://platform.openai.com/docs/api-reference/chat; reasoning as vLLM gives it (`reasoning`) and as most
clients read it (`reasoning_content`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from openforge.proxy import dialect
from openforge.proxy.calls import Call, Json, Refusal, Request
from openforge.proxy.dialect import bad, dumped, each

DIALECT = "chat"
TOP_LOGPROBS_MOST = 20
CHOICES_MOST = 128
PLAIN = ("system", "user", "assistant")
ROLES = (*PLAIN, "tool")


# ---- requests ----------------------------------------------------------------------------------
def parse(raw: bytes, headers: Mapping[str, str]) -> Request:
    """A request's body in the internal form; unknown fields are ignored.

    Raises:
        Refusal: 400, the body is no chat completion request or asks for what is not offered.
    """
    body = dialect.read_body(raw)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise bad("messages must be a list of at least one message")
    tools = _tools(body.get("tools"))
    options = body.get("stream_options")
    top = min(dialect.count(body, "top_logprobs") or 0, TOP_LOGPROBS_MOST)
    return Request(
        dialect=DIALECT,
        model=str(body.get("model") or ""),
        messages=dialect.template_roles([_message(m, f"messages[{i}]") for i, m in enumerate(messages)]),
        tools=tools,
        forwarded=_forwarded(body, tools),
        max_tokens=_asked(body),
        stream=bool(body.get("stream")),
        include_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        top_logprobs=top if body.get("logprobs") else None,
        retry=dialect.retries(headers),
        sha256=dialect.sha256(raw),
        n=_choices(body),
    )


def _choices(body: Json) -> int:
    n = dialect.count(body, "n")
    if n is None:
        return 1
    if not 1 <= n <= CHOICES_MOST:
        raise bad(f"n is {n}; 1 to {CHOICES_MOST} choices a request are offered")
    return n


def _asked(body: Json) -> int | None:
    newer, older = dialect.count(body, "max_completion_tokens", 1), dialect.count(body, "max_tokens", 1)
    return newer if newer is not None else older


def _forwarded(body: Json, tools: list[Json] | None) -> Json:
    fields: Json = {}
    if stop := dialect.texts(body.get("stop"), "stop"):
        fields["stop"] = stop
    fields |= dialect.choice_fields(_tool_choice(body.get("tool_choice")), tools, body.get("parallel_tool_calls"))
    if (seed := body.get("seed")) is not None:
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise bad(f"seed is {dialect.shown(seed)}; it must be a whole number")
        fields["seed"] = seed
    if (form := body.get("response_format")) is not None:
        if not isinstance(form, dict) or not isinstance(form.get("type"), str):
            raise bad("response_format must be an object with a type")
        fields["response_format"] = form
    return fields


def _tool_choice(choice: Any) -> str | Json | None:
    if choice is None or (isinstance(choice, str) and choice in ("auto", "none", "required")):
        return choice
    if isinstance(choice, dict) and choice.get("type") == "function" and isinstance(choice.get("function"), dict):
        return dialect.named(choice["function"].get("name"))
    raise bad(f"tool_choice is {dialect.shown(choice)}; it must be auto, none, required or name a function")


def _tools(given: object) -> list[Json] | None:
    """The functions among the tools: of other types there is no schema that a policy could be shown."""
    tools = []
    for i, tool in enumerate(dialect.objects(given, "tools")):
        declared, where = tool.get("function"), f"tools[{i}].function"
        if tool.get("type", "function") != "function" or tool.get("defer_loading") is True:
            continue
        if not isinstance(declared, dict):
            raise bad(f"{where} must be an object")
        if declared.get("defer_loading") is not True:
            name, schema = declared.get("name"), declared.get("parameters")
            tools.append(dialect.function(name, declared.get("description"), schema, where))
    return tools or None


def _message(m: Json, where: str) -> Json:
    role = "system" if m.get("role") == "developer" else m.get("role")
    if m.keys() == {"role", "content"} and role in PLAIN and isinstance(m["content"], str):
        return {"role": role, "content": m["content"]}  # most of a history is this
    if role not in ROLES:
        raise bad(f"{where}.role is {dialect.shown(role)}; it must be one of developer, {', '.join(ROLES)}")
    found = dialect.parts(m.get("content"), f"{where}.content", _part)
    if role == "assistant":
        return _assistant(m, found, where)
    content = dialect.result_of(found) if role == "tool" else dialect.content_of(found)
    message: Json = {"role": role, "content": content}
    if role == "tool" and m.get("tool_call_id") is not None:
        message["tool_call_id"] = dialect.text(m["tool_call_id"], f"{where}.tool_call_id")
    if isinstance(m.get("name"), str):
        message["name"] = m["name"]
    return message


def _assistant(m: Json, found: list[Json], where: str) -> Json:
    calls = []
    for i, call in enumerate(dialect.objects(m.get("tool_calls"), f"{where}.tool_calls")):
        at = f"{where}.tool_calls[{i}]"
        function = call.get("function")
        if not isinstance(function, dict):
            raise bad(f"{at}.function must be an object")
        calls.append(dialect.tool_call(call.get("id"), function.get("name"), function.get("arguments"), at))
    reasoning = m.get("reasoning") or m.get("reasoning_content")
    thought = reasoning if isinstance(reasoning, str) else None
    content = None if m.get("content") is None else dialect.joined(found)
    return dialect.assistant(content, thought, calls)


def _part(part: Json, where: str) -> Json | None:
    kind = part.get("type")
    if kind in ("text", "refusal"):
        return dialect.text_part(dialect.text(part.get(kind), f"{where}.{kind}"))
    if kind == "image_url":
        url = part.get("image_url")
        return dialect.image_part(url.get("url") if isinstance(url, dict) else url, f"{where}.image_url")
    raise bad(f"{where}.type is {dialect.shown(kind)}; offered are text and image_url")


# ---- answers -----------------------------------------------------------------------------------
def render(calls: Sequence[Call], request: Request) -> bytes:
    """The whole answer as one JSON body."""
    choices = [
        {
            "index": i,
            "message": _shown(call.answer.message),
            "finish_reason": call.answer.finish_reason,
            "logprobs": _logprobs(call, request),
        }
        for i, call in enumerate(calls)
    ]
    usage = _usage(calls)
    body = _head(calls, request, "chat.completion") | {"choices": choices} | ({"usage": usage} if usage else {})
    return dumped(body).encode()


def stream(calls: Sequence[Call], request: Request, sent: int = 0) -> bytes:
    """The whole answer as server-sent events: role, reasoning, text, tool calls, finish reason, usage, [DONE]."""
    # With include_usage the API's chunks carry "usage": null but for the last, which has no choices.
    usage = ',"usage":null' if request.include_usage else ""
    head = dumped(_head(calls, request, "chat.completion.chunk"))[:-1]
    events = [_choice(i, call, request, head, usage) for i, call in enumerate(calls)]
    if request.include_usage:
        events.append(f'data: {head},"choices":[],"usage":{dumped(_usage(calls) or None)}}}\n\n')
    events.append("data: [DONE]\n\n")
    return "".join(events).encode()


def _choice(index: int, call: Call, request: Request, head: str, usage: str) -> str:
    """The chunks of one choice."""
    answer = call.answer
    message = answer.message
    front, logprobs = f'data: {head},"choices":[{{"index":{index},"delta":', _logprobs(call, request)
    beside = "" if logprobs is None else f',"logprobs":{dumped(logprobs)}'
    end = f',"finish_reason":null}}]{usage}}}\n\n'
    whole, content = message.get("content"), dialect.joined(message.get("content"))
    thought = dialect.reasoning_of(message)
    thoughts, said = dialect.pieces(answer, thought, content)
    rest = {k: v for k, v in message.items() if k not in ("tool_calls", "content", "reasoning", "reasoning_content")}
    first = dumped(rest | {"content": None if whole is None else ""})
    events = [f"{front}{first}{beside}{end}"]
    for p in thoughts:
        events.append(f"{front}{dumped({'reasoning': p, 'reasoning_content': p})}{end}")
    events.append(each(f'{front}{{"content":', said, "}" + end))
    if tools := message.get("tool_calls"):
        events.append(f"{front}{dumped({'tool_calls': [{'index': i, **t} for i, t in enumerate(tools)]})}{end}")
    events.append(f'{front}{{}},"finish_reason":{dumped(answer.finish_reason)}}}]{usage}}}\n\n')
    return "".join(events)


def alive(ident: str, request: Request, sent: int) -> bytes:
    return b": keep-alive\n\n"


def failed(refusal: Refusal, ident: str, request: Request, sent: int) -> bytes:
    return b"data: " + error(refusal) + b"\n\n"


def error(refusal: Refusal) -> bytes:
    """A refusal in OpenAI's shape."""
    kind = "invalid_request_error" if refusal.status < 500 else "server_error"
    return dumped({"error": {"message": refusal.message, "type": kind, "param": None, "code": refusal.code}}).encode()


def _head(calls: Sequence[Call], request: Request, kind: str) -> Json:
    return {"id": calls[0].id, "object": kind, "created": calls[0].created, "model": request.model}


def _shown(message: Json) -> Json:
    """The message with its reasoning under both names that clients know."""
    thought = dialect.reasoning_of(message)
    return message | {"reasoning": thought, "reasoning_content": thought} if thought else message


def _logprobs(call: Call, request: Request) -> Json | None:
    if request.top_logprobs is None or call.answer.logprobs_content is None:
        return None
    return {"content": call.answer.logprobs_content}


def _usage(calls: Sequence[Call]) -> Json:
    """Upstream's usage untouched; of several choices the prompt once and all that was sampled, as OpenAI counts."""
    usages = [c.answer.usage for c in calls]
    if len(usages) == 1 or not all(usages):
        return usages[0] if len(usages) == 1 else {}
    prompt, sampled = dialect.told(usages[0], "prompt_tokens"), [dialect.told(u, "completion_tokens") for u in usages]
    if prompt is None or None in sampled:
        return {}
    total = sum(s for s in sampled if s is not None)
    return {"prompt_tokens": prompt, "completion_tokens": total, "total_tokens": prompt + total}
