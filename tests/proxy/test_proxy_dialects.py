"""What holds for all dialects: what is sent is read or refused, and what is answered is recognised when it returns."""

from __future__ import annotations

import json
from typing import Any

import pytest
from dialect_rig import (
    Json,
    answered,
    events,
    parsed,
    read_messages,
    read_responses,
    recognised,
    tool,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from proxy_rig import assemble

from openforge.proxy import chat, messages, responses
from openforge.proxy.calls import Refusal, Request
from openforge.proxy.dialect import Dialect, template_roles

ALL: list[Dialect] = [chat, responses, messages]
HISTORY = [{"role": "user", "content": "task"}]
TOOLS: dict[str, Any] = {
    "chat": [{"type": "function", "function": {"name": n}} for n in ("bash", "read")],
    "responses": [{"type": "function", "name": n} for n in ("bash", "read")],
    "messages": [{"name": n, "input_schema": {}} for n in ("bash", "read")],
}


def body_of(dialect: Dialect, *more: Json, **fields: Any) -> Json:
    """A request of one user's turn and what follows it in the dialect's own form."""
    key = "input" if dialect is responses else "messages"
    return {"model": "m", key: [*HISTORY, *more], "tools": TOOLS[dialect.DIALECT], **fields}


# ---- whatever is sent is read or refused -------------------------------------------------------
def words(listed: str) -> st.SearchStrategy[str]:
    return st.sampled_from(listed.split())


WORDS = words(
    "user assistant system developer tool function message reasoning text custom input_text output_text input_image "
    "image image_url tool_use tool_result thinking base64 url namespace auto any none required json_schema type name "
    "tool_reference allowed_tools grammar openforge1.aGk= data:image/png;base64,aa content role raw"
)
ATOMS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4), WORDS, st.sampled_from(["\ud800", ""])
)
VALUES = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.one_of(WORDS, st.text()), inner, max_size=3)
    ),
    max_leaves=8,
)
URL = {"type": "image_url", "image_url": {"url": "data:image/gif;base64,R0lGODlh", "detail": "low"}}
CHAT = {
    "model": "m",
    "messages": [
        {"role": "developer", "content": [{"type": "text", "text": "rules"}]},
        {"role": "user", "name": "u", "content": [{"type": "text", "text": "look"}, URL]},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [tool("bash", "{}")]},
        {"role": "tool", "tool_call_id": "call_1", "content": "done"},
    ],
    "tools": [{"type": "function", "function": {"name": "bash", "description": "d", "parameters": {}, "strict": True}}],
    "tool_choice": {"type": "function", "function": {"name": "bash"}},
    "response_format": {"type": "json_object"},
    "stream_options": {"include_usage": True},
} | dict.fromkeys(["n", "seed", "top_logprobs", "max_tokens", "max_completion_tokens", "stop", "logprobs", "stream"])
RESPONSES = {
    "model": "m",
    "instructions": "rules",
    "input": [
        {"type": "message", "role": "developer", "content": "more"},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "x"}, {"type": "input_image", "image_url": "data:,"}],
        },
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "reasoning", "summary": [], "content": [], "encrypted_content": "openforge1.aGk="},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "namespace": "mcp", "name": "add", "arguments": "{}", "call_id": "c1"},
        {"type": "custom_tool_call", "name": "patch", "input": "x", "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "y"}]},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "z"},
    ],
    "tools": [
        {"type": "custom", "name": "patch", "description": "d", "format": {"syntax": "lark", "definition": "x"}},
        {"type": "namespace", "name": "mcp", "tools": [{"type": "function", "name": "add", "parameters": {}}]},
    ],
    "tool_choice": {"type": "function", "namespace": "mcp", "name": "add"},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
    "include": ["reasoning.encrypted_content"],
} | dict.fromkeys(["max_output_tokens", "previous_response_id", "background", "parallel_tool_calls", "stream"])
MESSAGES = {
    "model": "m",
    "system": [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}, {"type": "text", "text": "rules"}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "look"}]},
        {"role": "system", "content": "more"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "I look."},
                {
                    "type": "tool_use",
                    "id": "t",
                    "name": "bash",
                    "input": {"__unparsedToolInput": {"raw": "x", "len": 1}},
                },
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t",
                    "content": [
                        {"type": "text", "text": "y"},
                        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa"}},
                        {"type": "tool_reference", "tool_name": "late"},
                    ],
                },
                {"type": "image", "source": {"type": "url", "url": "data:image/gif;base64,R0lGODlh"}},
            ],
        },
    ],
    "tools": [
        {"name": "bash", "description": "d", "input_schema": {}},
        {"name": "late", "input_schema": {}, "defer_loading": True},
    ],
    "tool_choice": {"type": "tool", "name": "bash", "disable_parallel_tool_use": True},
    "output_config": {"format": {"type": "json_schema", "schema": {}}},
} | dict.fromkeys(["max_tokens", "stop_sequences", "stream"])


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where in a JSON value another could stand."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(p for k, v in inner for p in places(v, (*at, k)))]


@st.composite
def damaged(draw: st.DrawFn, body: Json) -> Any:
    """A request that uses all of a dialect, with other values at up to three places."""
    whole: Any = json.loads(json.dumps(body))
    for _ in range(draw(st.integers(0, 3))):
        *above, last = draw(st.sampled_from(places(whole)[1:]))
        holder = whole
        for key in above:
            holder = holder[key]
        if isinstance(holder, dict) and draw(st.booleans()):
            del holder[last]
        else:
            holder[last] = draw(VALUES)
        if not whole:
            break
    return whole


BODIES = {"chat": CHAT, "responses": RESPONSES, "messages": MESSAGES}


@settings(max_examples=500, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("dialect", ALL, ids=lambda d: d.DIALECT)
def test_any_json_is_a_request_or_a_refusal(dialect: Dialect, data: st.DataObject) -> None:
    shape = data.draw(st.one_of(damaged(BODIES[dialect.DIALECT]), damaged(BODIES[dialect.DIALECT]), VALUES))
    raw = json.dumps(shape).encode()
    try:
        request = dialect.parse(raw, {"x-stainless-retry-count": "9" * 5000})
    except Refusal as e:
        assert (e.status, e.code) == (400, "invalid_request") and e.message
        assert "error" in json.loads(dialect.error(e))
        assert shape != BODIES[dialect.DIALECT]
        return
    # What was read can be asked, recorded and answered.
    json.dumps([request.messages, request.tools, request.forwarded])
    assert request.messages and request.retry == 0
    assert all(m["role"] in ("user", "assistant", "tool") for m in request.messages[1:])
    assert all(isinstance(t["function"]["name"], str) for t in request.tools or ())
    assert 1 <= request.n <= 128
    assert recognised(request.messages, {"role": "assistant", "content": "x"}, request.messages) is False
    call = answered({"content": "x", "tool_calls": [tool(n, "{") for n in ("bash", *request.declared)]})
    json.loads(dialect.render([call], request))
    assert dialect.stream([call], request).endswith(b"\n\n")


@pytest.mark.parametrize("dialect", ALL, ids=lambda d: d.DIALECT)
@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"null", b"\xff", b'"\xff"', b"[" * 100_000, b'{"a":' * 100_000, b"1" * 5000]
)
def test_bytes_that_are_no_object_are_refused(dialect: Dialect, raw: bytes) -> None:
    with pytest.raises(Refusal, match="the request body"):
        dialect.parse(raw, {})


@pytest.mark.parametrize("dialect", ALL, ids=lambda d: d.DIALECT)
def test_digest_is_that_of_the_bytes(dialect: Dialect) -> None:
    raw = json.dumps(body_of(dialect)).encode()
    again = dialect.parse(raw, {"x-stainless-retry-count": "2"})
    assert again.sha256 == dialect.parse(raw, {}).sha256 != dialect.parse(raw + b" ", {}).sha256
    assert again.retry == 2


# ---- what is answered is recognised when it returns --------------------------------------------
OBJECTS = st.dictionaries(
    st.text(max_size=5), st.one_of(st.integers(-9, 9), st.text(max_size=9), st.lists(st.booleans(), max_size=2))
)
ARGUMENTS = st.one_of(OBJECTS.map(json.dumps), st.text(min_size=1, max_size=9), st.sampled_from(["[1]", "{", "null"]))
ANSWERS = st.builds(
    lambda content, reasoning, calls: (
        {"role": "assistant", "content": content}
        | ({"reasoning": reasoning} if reasoning else {})
        | ({"tool_calls": [tool(n, a, f"c{i}") for i, (n, a) in enumerate(calls)]} if calls else {})
    ),
    st.one_of(st.none(), st.text(max_size=40)),
    st.text(max_size=20),
    st.lists(st.tuples(st.sampled_from(["bash", "read"]), ARGUMENTS), max_size=3),
)
FINISHES = st.sampled_from(["stop", "length", "tool_calls"])


def reserialised(arguments: str) -> str:
    """Arguments as a client writes them again that keeps them parsed."""
    try:
        return json.dumps(json.loads(arguments), separators=(",", ":"), ensure_ascii=False)
    except ValueError:
        return arguments


def read_answer(dialect: Dialect, message: Json, finish: str, streamed: bool) -> tuple[Request, Json]:
    """The request of a first call, and its answer as a client of the dialect has it."""
    request, call = parsed(dialect, body_of(dialect)), answered(message, finish)
    if not streamed:
        return request, json.loads(dialect.render([call], request))
    raw = dialect.stream([call], request)
    if dialect is chat:
        whole = assemble(raw)
        return request, {"choices": [{"message": whole["message"], "finish_reason": whole["finish_reason"]}]}
    return request, read_responses(raw) if dialect is responses else read_messages(raw)


def echo(dialect: Dialect, answer: Json, rewritten: bool) -> list[Json]:
    """The answer as its client sends it back; `rewritten`: parsed and written anew, as some do."""
    if dialect is messages:
        return [{"role": "assistant", "content": answer["content"]}] if answer["content"] else []
    if dialect is responses:
        items = [{k: v for k, v in item.items() if k not in ("id", "status")} for item in answer["output"]]
        if rewritten:
            items = [i | {"call_id": "new"} if "call_id" in i else i for i in items if i["type"] != "reasoning"]
            items = [i | {"arguments": reserialised(i["arguments"])} if "arguments" in i else i for i in items]
        return items
    message = answer["choices"][0]["message"]
    if rewritten:
        message = {k: v for k, v in message.items() if k not in ("reasoning", "reasoning_content")}
        message["content"] = [{"type": "text", "text": c} for c in message["content"] or ""]
        for call in message.get("tool_calls", ()):
            call["id"] = "new"
            call["function"]["arguments"] = reserialised(call["function"]["arguments"])
    return [message]


@settings(max_examples=200, deadline=None)
@given(message=ANSWERS, finish=FINISHES, streamed=st.booleans(), rewritten=st.booleans())
@pytest.mark.parametrize("dialect", ALL, ids=lambda d: d.DIALECT)
def test_an_echo_is_the_answer(dialect: Dialect, message: Json, finish: str, streamed: bool, rewritten: bool) -> None:
    request, answer = read_answer(dialect, message, finish, streamed)
    back = echo(dialect, answer, rewritten)
    if not back:
        return  # an empty answer leaves nothing to send back
    later = parsed(dialect, body_of(dialect, *back, {"role": "user", "content": "on"}))
    assert recognised(request.messages, message, later.messages)
    assert later.messages[: len(request.messages)] == request.messages
    if not rewritten:
        assert later.messages[1].get("reasoning") == (message.get("reasoning") or None)
    changed = {**later.messages[1], "content": "something else"}
    assert not recognised(request.messages, message, [*request.messages, changed])


@settings(max_examples=100, deadline=None)
@given(message=ANSWERS, finish=FINISHES)
@pytest.mark.parametrize("dialect", ALL, ids=lambda d: d.DIALECT)
def test_a_stream_says_what_the_plain_answer_says(dialect: Dialect, message: Json, finish: str) -> None:
    _, plain = read_answer(dialect, message, finish, streamed=False)
    _, streamed = read_answer(dialect, message, finish, streamed=True)
    if dialect is chat:
        plain = {"choices": [{k: plain["choices"][0][k] for k in ("message", "finish_reason")}]}
    assert streamed == plain


@pytest.mark.parametrize("dialect", ALL, ids=lambda d: d.DIALECT)
@pytest.mark.parametrize(
    ("said", "thought", "tokens", "least"),
    [("x" * 64, "", 64, 64), ("word " * 50, "", 64, 64), ("x" * 40, "y" * 100, 64, 64), ("ab", "", 64, 2)],
)
def test_text_comes_in_as_many_events_as_tokens(
    dialect: Dialect, said: str, thought: str, tokens: int, least: int
) -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": tokens}
    call = answered({"content": said} | ({"reasoning": thought} if thought else {}), usage=usage)
    raw = dialect.stream([call], parsed(dialect, body_of(dialect)))
    if dialect is chat:
        deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in raw.decode().split("\n\n")[:-2]]
        texts = [d.get("content") or d.get("reasoning_content") for d in deltas]
    else:
        names = ("response.output_text.delta", "response.reasoning_text.delta")
        deltas = [e for e in events(raw) if e["type"] in (*names, "content_block_delta")]
        inner = [e["delta"] if dialect is messages else {"text": e["delta"]} for e in deltas]
        texts = [d.get("text") or d.get("thinking") for d in inner]
    assert len([t for t in texts if t]) >= least


@pytest.mark.parametrize(
    "system",
    [
        "x-anthropic-billing-header: cch=1;\nbe good",
        [{"type": "text", "text": "x-anthropic-billing-header: cch=2;"}, {"type": "text", "text": "be good"}],
    ],
)
def test_claudes_billing_line_is_not_seen_behind_a_gateway_either(system: Any) -> None:
    asked = {"messages": [{"role": "system", "content": system}, *HISTORY]}
    assert parsed(chat, asked).messages == [{"role": "system", "content": "be good"}, *HISTORY]


# ---- roles -------------------------------------------------------------------------------------
TURNS = st.lists(
    st.builds(
        lambda role, text: {"role": role, "content": text},
        st.sampled_from(["system", "user", "assistant", "tool"]),
        st.text(max_size=3),
    ),
    min_size=1,
    max_size=6,
)


@given(head=TURNS, more=TURNS)
def test_roles_are_the_templates_and_histories_stay_append_only(head: list[Json], more: list[Json]) -> None:
    if not any(m["content"] or m["role"] != "system" for m in head):
        with pytest.raises(Refusal, match="at least one message with content"):
            template_roles(head)
        return
    done = template_roles(head)
    assert all(m["role"] != "system" for m in done[1:])
    if any(m["role"] != "system" for m in head):
        assert template_roles(head + more)[: len(done)] == done
    said = [m["content"] for m in head]
    assert "\n\n".join(said).strip() == "\n\n".join(m["content"] for m in done).strip()
