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


KEYS = words(
    "model messages input role content type text tools tool_calls tool_choice function name arguments id call_id "
    "parameters input_schema system instructions max_tokens max_output_tokens max_completion_tokens n stop "
    "stop_sequences seed stream stream_options include_usage include output thinking reasoning reasoning_content "
    "summary encrypted_content tool_use_id source media_type data url image_url namespace defer_loading format "
    "definition logprobs top_logprobs response_format output_config schema disable_parallel_tool_use "
    "parallel_tool_calls previous_response_id __unparsedToolInput raw tool_name"
)
WORDS = words(
    "user assistant system developer tool function message reasoning function_call function_call_output text "
    "custom_tool_call custom input_text output_text input_image image image_url tool_use tool_result thinking base64 "
    "url namespace auto any none required json_schema tool_reference allowed_tools grammar openforge1.aGk= "
    "data:image/png;base64,aa"
)
ATOMS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4), WORDS, st.sampled_from(["\ud800", ""])
)
VALUES = st.recursive(
    ATOMS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.one_of(KEYS, WORDS), inner, max_size=6)),
    max_leaves=25,
)
MESSAGES = st.lists(st.dictionaries(KEYS, VALUES, max_size=6), max_size=4)
ITEMS = st.dictionaries(st.sampled_from(["role", "type"]), WORDS, min_size=1)
SHAPES = st.one_of(
    VALUES,
    st.dictionaries(KEYS, VALUES, max_size=8),
    st.builds(
        lambda fields, turns, heads: {
            **fields,
            "messages": [{**t, **h} for t, h in zip(turns, heads, strict=False)],
            "input": [{**t, **h} for t, h in zip(turns, heads, strict=False)],
        },
        st.dictionaries(KEYS, VALUES, max_size=5),
        MESSAGES,
        st.lists(ITEMS, max_size=4),
    ),
)


@settings(max_examples=300, deadline=None)
@given(shape=SHAPES)
def test_any_json_is_a_request_or_a_refusal(shape: Any) -> None:
    raw = json.dumps(shape).encode()
    for dialect in ALL:
        try:
            request = dialect.parse(raw, {"x-stainless-retry-count": "9" * 5000})
        except Refusal as e:
            assert (e.status, e.code) == (400, "invalid_request") and e.message
            assert "error" in json.loads(dialect.error(e))
            continue
        # What was read can be asked, recorded and answered.
        json.dumps([request.messages, request.tools, request.forwarded])
        assert request.messages and request.retry == 0
        assert all(m["role"] in ("user", "assistant", "tool") for m in request.messages[1:])
        assert all(isinstance(t["function"]["name"], str) for t in request.tools or ())
        assert 1 <= request.n <= 128
        call = answered({"content": "x"})
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
    done = template_roles(head)
    assert all(m["role"] != "system" for m in done[1:])
    if any(m["role"] != "system" for m in head):
        assert template_roles(head + more)[: len(done)] == done
    said = [m["content"] for m in head]
    assert "\n\n".join(said).strip() == "\n\n".join(m["content"] for m in done).strip()
