"""The messages dialect: requests as Claude Code and the API's documentation have them, answers event by event."""

from __future__ import annotations

import json
from typing import Any

import pytest
from dialect_rig import IDENT, Json, answered, events, kinds, parsed, read_messages, tool

from openforge.proxy import messages
from openforge.proxy.calls import Refusal

BASH = {
    "name": "Bash",
    "description": "run",
    "input_schema": {"type": "object"},
    "cache_control": {"type": "ephemeral"},
}
FUNCTION = {"type": "function", "function": {"name": "Bash", "description": "run", "parameters": {"type": "object"}}}
MARK = {"cache_control": {"type": "ephemeral"}}


def text(value: str, **more: Any) -> Json:
    return {"type": "text", "text": value, **more}


def asked(*turns: Any, **more: Any) -> Json:
    """A request: turns of a user and an assistant in turn."""
    roles = ("user", "assistant")
    return {"model": "m", "messages": [{"role": roles[i % 2], "content": t} for i, t in enumerate(turns)], **more}


# ---- requests ----------------------------------------------------------------------------------
def test_claudes_history_is_chat_messages() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"}}
    body = asked(
        [text("task", **MARK)],
        [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            text("I look."),
            {"type": "tool_use", "id": "t1", "name": "Bash", "input": {"command": "ls"}, **MARK},
            {"type": "tool_use", "id": "t2", "name": "Bash", "input": {}},
        ],
        [
            {"type": "tool_result", "tool_use_id": "t1", "content": [text("a.txt"), text("b.txt")]},
            {"type": "tool_result", "tool_use_id": "t2", "content": [text("seen"), image], "is_error": True},
            text("and now?"),
            {"type": "image", "source": {"type": "url", "url": "data:image/gif;base64,R0lGODlh"}},
        ],
        system=[text("x-anthropic-billing-header: cc_version=2; cch=0af;"), text("You are."), text("\nBe brief.")],
        max_tokens=32000,
        stop_sequences=["END"],
        tools=[BASH, {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}],
        thinking={"type": "adaptive"},
        context_management={"edits": []},
        metadata={"user_id": "u"},
        temperature=0.2,
        stream=True,
    )
    request = parsed(messages, body)
    assert request.messages == [
        {"role": "system", "content": "You are.\nBe brief."},
        {"role": "user", "content": "task"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning": "hm",
            "tool_calls": [tool("Bash", '{"command": "ls"}', "t1"), tool("Bash", "{}", "t2")],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "a.txt\nb.txt"},
        {
            "role": "tool",
            "tool_call_id": "t2",
            "content": [
                {"type": "text", "text": "seen"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "and now?"},
                {"type": "image_url", "image_url": {"url": "data:image/gif;base64,R0lGODlh"}},
            ],
        },
    ]
    assert request.tools == [FUNCTION]
    assert (request.forwarded, request.max_tokens, request.stream) == ({"stop": ["END"]}, 32000, True)
    assert (request.dialect, request.model) == ("messages", "m")


@pytest.mark.parametrize(
    "system",
    [
        None,
        "be good",
        "x-anthropic-billing-header: cch=1;\nbe good",
        [text("be good", **MARK)],
        [text("x-anthropic-billing-header: cch=2;"), text("be good")],
        [text("x-anthropic-billing-header: cch=3;\nbe good")],
    ],
)
def test_volatile_heads_and_moving_marks_are_not_seen(system: Any) -> None:
    first = parsed(messages, asked("a", system=system)).messages
    second = parsed(messages, asked([text("a", **MARK)], "b", [text("c", **MARK)], system=system)).messages
    assert second[: len(first)] == first
    assert first[:-1] == ([] if system is None else [{"role": "system", "content": "be good"}])


def test_a_system_message_in_the_conversation_is_a_users_turn_in_its_place() -> None:
    body = asked("a", "b", "c")
    body["messages"].insert(2, {"role": "system", "content": [text("x-anthropic-billing-header: cch=1;\nreminder")]})
    body["messages"].append({"role": "system", "content": "x-anthropic-billing-header: cch=2;"})
    assert parsed(messages, body | {"system": "s"}).messages == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "reminder"},
        {"role": "user", "content": "c"},
    ]


def test_what_stands_between_results_keeps_its_place() -> None:
    result = {"type": "tool_result", "tool_use_id": "t"}
    found = parsed(messages, asked([text("first"), result, text("x"), text("y"), {**result, "content": "r"}])).messages
    assert found == [
        {"role": "user", "content": "first"},
        {"role": "tool", "tool_call_id": "t", "content": ""},
        {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]},
        {"role": "tool", "tool_call_id": "t", "content": "r"},
    ]


def test_a_deferred_tool_is_shown_where_it_is_loaded() -> None:
    tools = [BASH, {"name": "Late", "input_schema": {"type": "object"}, "defer_loading": True}]
    found = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "tool_reference", "tool_name": "Late"}]}
    request = parsed(messages, asked("a", "b", [found], tools=tools))
    assert request.tools == [FUNCTION]
    assert json.loads(request.messages[2]["content"]) == {
        "type": "function",
        "function": {"name": "Late", "parameters": {"type": "object"}},
    }


@pytest.mark.parametrize(
    ("choice", "fields"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "tool", "name": "Bash"}, {"tool_choice": {"type": "function", "function": {"name": "Bash"}}}),
        (
            {"type": "auto", "disable_parallel_tool_use": True},
            {"tool_choice": "auto", "parallel_tool_calls": False},
        ),
    ],
)
def test_tool_choice(choice: Json, fields: Json) -> None:
    assert parsed(messages, asked("a", tools=[BASH], tool_choice=choice)).forwarded == fields
    assert parsed(messages, asked("a", tools=[], tool_choice=choice)).forwarded == {}


def test_an_output_format_is_chats_response_format() -> None:
    schema = {"type": "object"}
    sent = {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}
    form = {"type": "json_schema", "schema": schema}
    assert parsed(messages, asked("a", output_config={"effort": "low", "format": form})).forwarded == sent
    assert parsed(messages, asked("a", output_format=form)).forwarded == sent
    assert parsed(messages, asked("a", output_config={"effort": "low"})).forwarded == {}


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({}, "messages must be a list of at least one message"),
        (asked(""), "at least one message with content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role is 'tool'"),
        (asked([1]), "messages[0].content must be a list of objects"),
        (asked(3), "messages[0].content must be a list of objects"),
        (asked([{"type": "text", "text": 1}]), "messages[0].content[0].text is 1"),
        (asked([{"type": "document", "source": {}}]), "messages[0].content[0] is a document"),
        (asked([{"type": "image", "source": {"type": "url", "url": "http://10.0.0.1/"}}]), "elsewhere is not fetched"),
        (asked([{"type": "image", "source": {"type": "file", "file_id": "f"}}]), "must be an image as"),
        (asked("a", [{"type": "tool_use", "name": 1, "input": {}}]), "messages[1].content[0]: the tool's name is 1"),
        (asked("a", system=4), "system must be a list of objects"),
        (asked("a", max_tokens=-1), "max_tokens is -1"),
        (asked("a", stop_sequences=[1]), "stop_sequences must be"),
        (asked("a", tools=[{"input_schema": {}}]), "tools[0].name is None"),
        (asked("a", tools=[{"name": "x", "input_schema": []}]), "tools[0]: the tool's schema must be an object"),
        (asked("a", tools=[BASH], tool_choice="auto"), "tool_choice is 'auto'"),
        (asked("a", tools=[BASH], tool_choice={"type": "tool", "name": "No"}), "tool_choice names 'No'"),
    ],
)
def test_what_is_wrong_is_named(body: Json, told: str) -> None:
    with pytest.raises(Refusal) as e:
        parsed(messages, body)
    assert (e.value.status, e.value.code) == (400, "invalid_request")
    assert told in e.value.message


# ---- answers -----------------------------------------------------------------------------------
def test_every_event_of_a_stream_in_its_order() -> None:
    message = {"reasoning": "thinking", "content": "I look.", "tool_calls": [tool("Bash", '{"command":"ls"}')]}
    call, request = answered(message, "tool_calls"), parsed(messages, asked("a"))
    found = events(messages.stream([call], request))
    assert kinds(found) == [
        "message_start",
        "ping",
        *("content_block_start", "content_block_delta", "content_block_stop") * 3,
        "message_delta",
        "message_stop",
    ]
    deltas = [e["delta"]["type"] for e in found if e["type"] == "content_block_delta"]
    assert list(dict.fromkeys(deltas)) == ["thinking_delta", "signature_delta", "text_delta", "input_json_delta"]
    whole = read_messages(messages.stream([call], request))
    thinking, said, used = whole["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "thinking") and thinking["signature"]
    assert said == {"type": "text", "text": "I look."}
    assert used == {"type": "tool_use", "id": "call_1", "name": "Bash", "input": {"command": "ls"}}
    assert (whole["stop_reason"], whole["stop_sequence"], whole["id"]) == ("tool_use", None, f"msg_{IDENT}")
    assert whole["usage"] == {
        "input_tokens": 30,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": 12,
    }
    assert json.loads(messages.render([call], request)) == whole


@pytest.mark.parametrize(
    ("finish", "stopped", "message", "reason"),
    [
        ("stop", None, {"content": "a"}, ("end_turn", None)),
        ("stop", 151645, {"content": "a"}, ("end_turn", None)),
        ("stop", "END", {"content": "a"}, ("stop_sequence", "END")),
        ("length", None, {"content": "a"}, ("max_tokens", None)),
        ("length", None, {"tool_calls": [tool("Bash", "{}")]}, ("max_tokens", None)),
        ("stop", None, {"tool_calls": [tool("Bash", "{}")]}, ("tool_use", None)),
        ("tool_calls", None, {"tool_calls": [tool("Bash", "{}")]}, ("tool_use", None)),
        ("content_filter", None, {"content": ""}, ("refusal", None)),
        ("abort", None, {"content": "a"}, ("max_tokens", None)),
    ],
)
def test_stop_reasons(finish: str, stopped: Any, message: Json, reason: tuple[str, str | None]) -> None:
    body = json.loads(messages.render([answered(message, finish, stop_reason=stopped)], parsed(messages, asked("a"))))
    assert (body["stop_reason"], body["stop_sequence"]) == reason


@pytest.mark.parametrize(
    "raw", ['{"command": "ls', "[1]", "false", '"x"', "{} {}", "NaN", '{"a": NaN}', '{"a": 1e999}']
)
def test_arguments_that_are_no_object_are_kept_whole(raw: str) -> None:
    """Claude Code's own form for them: it tells the policy that they could not be parsed, and does not run the tool."""
    call, request = answered({"tool_calls": [tool("Bash", raw)]}), parsed(messages, asked("a"))
    whole = read_messages(messages.stream([call], request))
    assert whole["content"][0]["input"] == {"__unparsedToolInput": {"raw": raw, "len": len(raw)}}
    assert json.loads(messages.render([call], request))["content"] == whole["content"]
    back = parsed(messages, asked("a", whole["content"])).messages[1]
    assert back["tool_calls"][0]["function"]["arguments"] == raw


def test_cached_tokens_are_not_input_tokens() -> None:
    usage = {"prompt_tokens": 30, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 24}}
    body = json.loads(messages.render([answered({"content": "a"}, usage=usage)], parsed(messages, asked("a"))))
    assert (body["usage"]["input_tokens"], body["usage"]["cache_read_input_tokens"]) == (6, 24)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (
            "This model's maximum context length is 512 tokens. However, your prompt contains at least 513 input "
            "tokens, which exceeds this limit even without any output tokens. (parameter=input_tokens, value=513)",
            "prompt is too long: 513 tokens > 512 maximum",
        ),
        (
            "This model's maximum context length is 512 tokens, and the prompt fills it.",
            "prompt is too long: 512 tokens > 511 maximum",
        ),
        ("the context is full", "prompt is too long: the context is full"),
    ],
)
def test_an_overflow_has_anthropics_words(told: str, said: str) -> None:
    body = json.loads(messages.error(Refusal(400, "context_length_exceeded", told)))
    assert body == {"type": "error", "error": {"type": "invalid_request_error", "message": said}}


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (409, "invalid_request_error"),
        (413, "request_too_large"),
        (418, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "api_error"),
        (529, "overloaded_error"),
    ],
)
def test_error_types(status: int, kind: str) -> None:
    refusal = Refusal(status, "code", "why")
    assert json.loads(messages.error(refusal)) == {"type": "error", "error": {"type": kind, "message": "why"}}
    last = events(messages.failed(refusal, "x-1", parsed(messages, asked("a")), 2))
    assert last == [{"type": "error", "error": {"type": kind, "message": "why"}}]
