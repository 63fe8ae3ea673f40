"""Dialect `responses`: OpenAI's /v1/responses, plain and streamed.

Nothing is stored: a request carries its whole history, as codex sends it. Source:
https://platform.openai.com/docs/api-reference/responses and /responses-streaming.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

from openforge.proxy import chat, dialect
from openforge.proxy.calls import Call, Declared, Json, Refusal, Request
from openforge.proxy.dialect import bad, dumped
from openforge.proxy.responses_stream import Events

DIALECT = "responses"
ROLES = ("system", "developer", "user", "assistant")
# What a custom tool is to the policy: a function of one text.
_FREE = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
# Reasoning that its client keeps as an opaque text.
_SEAL = "openforge1."

# By a tool's namespace and name, the policy's name for it.
Names = Mapping[tuple[str | None, str], str]

error = chat.error


# ---- requests ----------------------------------------------------------------------------------
def parse(raw: bytes, headers: Mapping[str, str]) -> Request:
    """A request's body in the internal form; unknown fields, tools without schema and other items are ignored.

    Raises:
        Refusal: 400, the body is no such request or asks for what is not offered.
    """
    body = dialect.read_body(raw)
    for key in ("previous_response_id", "conversation", "background"):
        if body.get(key):
            raise bad(f"{key} is not offered, for no response is stored; send the whole history as input")
    tools, declared = _tools(body.get("tools"))
    names = {(d.namespace, d.name): name for name, d in declared.items()}
    include = body.get("include")
    return Request(
        dialect=DIALECT,
        model=str(body.get("model") or ""),
        messages=_messages(body, names),
        tools=tools,
        forwarded=_forwarded(body, tools, names),
        max_tokens=dialect.count(body, "max_output_tokens", 1),
        stream=bool(body.get("stream")),
        include_usage=True,
        top_logprobs=None,
        retry=dialect.retries(headers),
        sha256=dialect.sha256(raw),
        declared=declared,
        sealed_reasoning=isinstance(include, list) and "reasoning.encrypted_content" in include,
    )


def _forwarded(body: Json, tools: list[Json] | None, names: Names) -> Json:
    choice = _tool_choice(body.get("tool_choice"), names)
    fields = dialect.choice_fields(choice, tools, body.get("parallel_tool_calls"))
    told = body.get("text")
    form = told.get("format") if isinstance(told, dict) else None
    if isinstance(form, dict):
        if form.get("type") == "json_schema":
            fields["response_format"] = dialect.schema_format(
                form.get("schema"), form.get("name"), "text.format.schema"
            )
        elif form.get("type") == "json_object":
            fields["response_format"] = {"type": "json_object"}
    return fields


def _tool_choice(choice: Any, names: Names) -> str | Json | None:
    if choice is None or (isinstance(choice, str) and choice in ("auto", "none", "required")):
        return choice
    kind = choice.get("type") if isinstance(choice, dict) else None
    if isinstance(choice, dict) and kind in ("function", "custom"):
        return dialect.named(_own_name(choice, "tool_choice", names))
    if isinstance(choice, dict) and kind == "allowed_tools":
        return "required" if choice.get("mode") == "required" else "auto"
    if isinstance(kind, str):
        return None  # one of the tools without schema, which are not there
    raise bad(f"tool_choice is {dialect.shown(choice)}; it must be auto, none, required or name a tool")


def _tools(given: object) -> tuple[list[Json] | None, dict[str, Declared]]:
    """The function declarations, under names that are unique, and what the harness calls those that differ."""
    tools: list[Json] = []
    declared: dict[str, Declared] = {}
    taken: set[str] = set()

    def add(tool: Json, where: str, namespace: str | None) -> None:
        kind, name = tool.get("type"), tool.get("name")
        if kind not in ("function", "custom") or tool.get("defer_loading") is True:
            return
        name = dialect.text(name, f"{where}.name")
        own = flat = name if namespace is None else flat_name(namespace, name)
        n = 2
        while own in taken:
            own, n = f"{flat}_{n}", n + 1
        taken.add(own)
        if own != name or kind == "custom":
            declared[own] = Declared(name, namespace, kind == "custom")
        schema = _FREE if kind == "custom" else tool.get("parameters")
        tools.append(dialect.function(own, _description(tool, where), schema, where))

    for i, tool in enumerate(dialect.objects(given, "tools")):
        if tool.get("type") == "namespace":
            name = dialect.text(tool.get("name"), f"tools[{i}].name")
            for j, inner in enumerate(dialect.objects(tool.get("tools"), f"tools[{i}].tools")):
                add(inner, f"tools[{i}].tools[{j}]", name)
        else:
            add(tool, f"tools[{i}]", None)
    return tools or None, declared


def flat_name(namespace: str, name: str) -> str:
    """The policy's name of a namespace's tool, which is vLLM's own."""
    return f"{namespace}__{name}"


def _own_name(named: Json, where: str, names: Names) -> str:
    """The policy's name of what a harness names by name and namespace."""
    name = dialect.text(named.get("name"), f"{where}.name")
    namespace = dialect.optional_text(named.get("namespace"), f"{where}.namespace") or None
    return names.get((namespace, name)) or (name if namespace is None else flat_name(namespace, name))


def _description(tool: Json, where: str) -> str | None:
    """A custom tool's grammar stands with its description: else the policy could not know what to write."""
    told, form = tool.get("description"), tool.get("format")
    told = None if told is None else dialect.text(told, f"{where}.description")
    if isinstance(form, dict) and isinstance(form.get("definition"), str):
        return f"{told or ''}\n\nThe input follows this {form.get('syntax', '')} grammar:\n{form['definition']}".strip()
    return told


# ---- items -------------------------------------------------------------------------------------
def _messages(body: Json, names: Names) -> list[Json]:
    messages: list[Json] = []
    if instructions := dialect.optional_text(body.get("instructions"), "instructions"):
        messages.append({"role": "system", "content": instructions})
    given = body.get("input")
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    elif isinstance(given, list):
        for i, item in enumerate(dialect.objects(given, "input")):
            _item(messages, item, f"input[{i}]", names)
    else:
        raise bad("input must be a string or a list of items")
    return dialect.template_roles(messages)


def _item(messages: list[Json], item: Json, where: str, names: Names) -> None:
    """Add an item; the reasoning, text and calls of one answer are items of their own, and one message here."""
    kind = item.get("type", "message" if "role" in item else None)
    if kind == "message":
        _message(messages, item, where)
    elif kind == "reasoning":
        if thought := _thought(item, where):
            _answer(messages, "reasoning", ("content", "tool_calls"))["reasoning"] = thought
    elif kind in ("function_call", "custom_tool_call"):
        free = kind == "custom_tool_call"
        arguments = dumped({"input": item.get("input")}) if free else item.get("arguments")
        call = dialect.tool_call(item.get("call_id"), _own_name(item, where, names), arguments, where)
        _answer(messages, None, ()).setdefault("tool_calls", []).append(call)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        found = dialect.parts(item.get("output"), f"{where}.output", _part)
        ident = dialect.optional_text(item.get("call_id"), f"{where}.call_id")
        messages.append({"role": "tool", "tool_call_id": ident, "content": dialect.result_of(found)})
    elif kind == "item_reference":
        raise bad(f"{where} refers to a stored item; nothing is stored, so send the item itself")


def _answer(messages: list[Json], key: str | None, later: tuple[str, ...]) -> Json:
    """The assistant message that an item belongs to: a new one where the last has what would come after it."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(last.get(k) for k in (key, *later) if k):
        last = {"role": "assistant", "content": None}
        messages.append(last)
    return last


def _message(messages: list[Json], item: Json, where: str) -> None:
    role = item.get("role")
    if role not in ROLES:
        raise bad(f"{where}.role is {dialect.shown(role)}; it must be one of {', '.join(ROLES)}")
    found = dialect.parts(item.get("content"), f"{where}.content", _part)
    if role == "assistant":
        _answer(messages, "content", ("tool_calls",))["content"] = dialect.joined(found)
    else:
        role = "system" if role == "developer" else role
        messages.append({"role": role, "content": dialect.content_of(found)})


def _part(part: Json, where: str) -> Json | None:
    kind = part.get("type")
    if kind in ("input_text", "output_text", "text", "refusal"):
        key = "refusal" if kind == "refusal" else "text"
        return dialect.text_part(dialect.text(part.get(key), f"{where}.{key}"))
    if kind == "input_image":
        url = part.get("image_url")
        return dialect.image_part(url.get("url") if isinstance(url, dict) else url, f"{where}.image_url")
    raise bad(f"{where}.type is {dialect.shown(kind)}; offered are input_text, output_text and input_image")


def _thought(item: Json, where: str) -> str:
    """The reasoning of an item, in the clear or as this proxy sealed it; a summary is none."""
    inner = dialect.objects(item.get("content"), f"{where}.content")
    clear = [p["text"] for p in inner if p.get("type") in ("reasoning_text", "text") and isinstance(p.get("text"), str)]
    sealed = item.get("encrypted_content")
    if not clear and isinstance(sealed, str) and sealed.startswith(_SEAL):
        try:
            return base64.b64decode(sealed.removeprefix(_SEAL), validate=True).decode(errors="surrogatepass")
        except ValueError:
            raise bad(f"{where}.encrypted_content is not as it was given") from None
    return "".join(clear)


# ---- answers -----------------------------------------------------------------------------------
def render(calls: Sequence[Call], request: Request) -> bytes:
    """The whole answer as one JSON body."""
    return dumped(_finished(calls[0], request)).encode()


def stream(calls: Sequence[Call], request: Request, sent: int = 0) -> bytes:
    """The whole answer as server-sent events, from response.created to response.completed or .incomplete."""
    (call,) = calls
    whole = _finished(call, request)
    begun = whole | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    message = call.answer.message
    texts = dialect.pieces(call.answer, dialect.reasoning_of(message), dialect.joined(message.get("content")))
    events = Events(sent)
    if not sent:
        events.add("response.created", response=begun)
    events.add("response.in_progress", response=begun)
    for index, item in enumerate(whole["output"]):
        events.item(index, item, texts)
    events.add(f"response.{whole['status']}", response=whole)
    return events.bytes()


def alive(ident: str, request: Request, sent: int) -> bytes:
    """The stream's first event, and then that it goes on: clients time a stream's events, and count no comments."""
    events = Events(sent)
    begun = _response(_id(ident), 0, request, "in_progress", [])
    events.add("response.in_progress" if sent else "response.created", response=begun)
    return events.bytes()


def failed(refusal: Refusal, ident: str, request: Request, sent: int) -> bytes:
    code = refusal.code if refusal.status < 500 else "server_error"
    whole = _response(_id(ident), 0, request, "failed", [])
    events = Events(sent)
    events.add("response.failed", response=whole | {"error": {"code": code, "message": refusal.message}})
    return events.bytes()


def _id(ident: str) -> str:
    return f"resp_{ident.rpartition('-')[2]}"


def _finished(call: Call, request: Request) -> Json:
    cut = {"length": "max_output_tokens", "abort": "max_output_tokens", "content_filter": "content_filter"}
    reason = cut.get(call.answer.finish_reason or "")
    status = "incomplete" if reason else "completed"
    whole = _response(_id(call.id), call.created, request, status, _output(call, request, status))
    return whole | {"incomplete_details": {"reason": reason} if reason else None, "usage": _usage(call)}


def _response(ident: str, created: int, request: Request, status: str, output: list[Json]) -> Json:
    return {
        "id": ident,
        "object": "response",
        "created_at": created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": request.max_tokens,
        "metadata": {},
        "model": request.model,
        "output": output,
        "parallel_tool_calls": request.forwarded.get("parallel_tool_calls", True),
        "previous_response_id": None,
        "store": False,
        "tool_choice": request.forwarded.get("tool_choice", "auto"),
        "tools": [],  # not repeated: a harness's are tens of kilobytes, three times a stream
        "usage": None,
    }


def _output(call: Call, request: Request, status: str) -> list[Json]:
    message, ident = call.answer.message, dialect.ident_of(call)
    items: list[Json] = []
    item: Json
    if thought := dialect.reasoning_of(message):
        item = {"id": f"rs_{ident}", "type": "reasoning", "summary": [], "status": status}
        item["content"] = [{"type": "reasoning_text", "text": thought}]
        if request.sealed_reasoning:
            sealed = base64.b64encode(thought.encode(errors="surrogatepass")).decode()
            item["encrypted_content"] = _SEAL + sealed
        items.append(item)
    if said := dialect.joined(message.get("content")):
        part = {"type": "output_text", "text": said, "annotations": [], "logprobs": []}
        item = {"id": f"msg_{ident}", "type": "message", "role": "assistant", "status": status, "content": [part]}
        items.append(item)
    for i, tool in enumerate(message.get("tool_calls") or ()):
        items.append(_call_item(tool, f"{ident}_{i}", request) | {"status": status})
    return items


def _call_item(tool: Json, ident: str, request: Request) -> Json:
    function = tool["function"]
    name, arguments = function["name"], function.get("arguments") or ""
    theirs = request.declared.get(name, Declared(name))
    call_id = tool.get("id") or f"call_{ident}"
    item: Json
    if theirs.custom:
        item = {"id": f"ctc_{ident}", "type": "custom_tool_call", "call_id": call_id, "input": _free(arguments)}
    else:
        item = {"id": f"fc_{ident}", "type": "function_call", "call_id": call_id, "arguments": arguments}
    return item | {"name": theirs.name} | ({"namespace": theirs.namespace} if theirs.namespace else {})


def _free(arguments: str) -> str:
    """The text that a custom tool was called with; arguments of another form as they are."""
    try:
        given: Any = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    free = given.get("input") if isinstance(given, dict) else None
    return free if isinstance(free, str) else arguments


def _usage(call: Call) -> Json | None:
    usage = call.answer.usage
    prompt, sampled = dialect.told(usage, "prompt_tokens"), dialect.told(usage, "completion_tokens")
    if prompt is None or sampled is None:
        return None
    cached = dialect.told(usage, "cached_tokens", "prompt_tokens_details") or 0
    thought = dialect.told(usage, "reasoning_tokens", "completion_tokens_details") or 0
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": prompt + sampled,
    }
