"""The responses dialect: requests as codex and the API's documentation have them, answers event by event."""

from __future__ import annotations

import json
from typing import Any

import pytest
from dialect_rig import IDENT, Json, answered, events, kinds, parsed, read_responses, tool

from openforge.proxy import responses
from openforge.proxy.calls import Declared, Refusal

SHELL = {"type": "function", "name": "shell", "description": "run", "strict": True, "parameters": {"type": "object"}}
INNER = {"type": "function", "name": "add", "parameters": {"type": "object"}}
PNG = "data:image/png;base64,iVBORw0KGgo="


def user(text: str) -> Json:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def asked(*items: Json, **more: Any) -> Json:
    return {"model": "m", "input": list(items) or "hi", **more}


# ---- requests ----------------------------------------------------------------------------------
def test_codex_history_is_chat_messages() -> None:
    request = parsed(
        responses,
        asked(
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
            user("environment"),
            user("task"),
            {
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "hm"}],
                "encrypted_content": None,
            },
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "name": "shell", "arguments": '{"cmd":"ls"}', "call_id": "c1"},
            {"type": "function_call", "name": "shell", "arguments": '{"cmd":"pwd"}', "call_id": "c2"},
            {
                "type": "function_call_output",
                "call_id": "c1",
                "output": [{"type": "input_text", "text": "a.txt"}, {"type": "input_text", "text": "b.txt"}],
            },
            {
                "type": "function_call_output",
                "call_id": "c2",
                "output": [{"type": "input_text", "text": "/w"}, {"type": "input_image", "image_url": PNG}],
            },
            instructions="be good",
            stream=True,
            store=False,
            max_output_tokens=9,
            prompt_cache_key="k",
            client_metadata={"a": 1},
        ),
    )
    assert request.messages == [
        {"role": "system", "content": "be good\n\nrules"},
        {"role": "user", "content": "environment"},
        {"role": "user", "content": "task"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning": "hm",
            "tool_calls": [tool("shell", '{"cmd":"ls"}', "c1"), tool("shell", '{"cmd":"pwd"}', "c2")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "a.txt\nb.txt"},
        {
            "role": "tool",
            "tool_call_id": "c2",
            "content": [{"type": "text", "text": "/w"}, {"type": "image_url", "image_url": {"url": PNG}}],
        },
    ]
    assert (request.dialect, request.stream, request.max_tokens) == ("responses", True, 9)
    assert (request.tools, request.forwarded) == (None, {})


def test_answers_that_follow_one_another_stay_apart() -> None:
    says = [
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": "three"},
    ]
    assert parsed(responses, asked(user("x"), *says)).messages[1:] == [
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "two", "tool_calls": [tool("f", "{}", "c")]},
        {"role": "assistant", "content": "three", "reasoning": "hm"},
    ]


def test_a_string_is_a_users_turn() -> None:
    assert parsed(responses, {"input": "hi"}).messages == [{"role": "user", "content": "hi"}]


def test_a_later_developer_message_is_a_users_turn_in_its_place() -> None:
    later = {"role": "developer", "content": "from now on"}
    messages = parsed(responses, asked(user("a"), {"role": "assistant", "content": "b"}, later, user("c"))).messages
    assert [(m["role"], m["content"]) for m in messages] == [
        ("user", "a"),
        ("assistant", "b"),
        ("user", "from now on"),
        ("user", "c"),
    ]


def test_tools_are_functions_of_unique_names() -> None:
    tools = [
        SHELL,
        {"type": "web_search"},
        {"type": "local_shell"},
        {"type": "function", "name": "mcp__add", "parameters": None},
        {"type": "namespace", "name": "mcp", "description": "m", "tools": [INNER, {**INNER, "defer_loading": True}]},
        {"type": "function", "name": "later", "parameters": {}, "defer_loading": True},
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "Patch.",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: X"},
        },
    ]
    request = parsed(responses, asked(tools=tools, tool_choice="auto", parallel_tool_calls=False))
    free = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    assert [t["function"] for t in request.tools or []] == [
        {"name": "shell", "description": "run", "parameters": {"type": "object"}},
        {"name": "mcp__add"},
        {"name": "mcp__add_2", "parameters": {"type": "object"}},
        {
            "name": "apply_patch",
            "description": "Patch.\n\nThe input follows this lark grammar:\nstart: X",
            "parameters": free,
        },
    ]
    assert all(t["type"] == "function" for t in request.tools or [])
    assert request.forwarded == {"tool_choice": "auto", "parallel_tool_calls": False}
    # What the policy calls by these names goes back under the harness's.
    whole = read_responses(
        responses.stream(
            [
                answered(
                    {
                        "tool_calls": [
                            tool("mcp__add_2", '{"a":1}', "c1"),
                            tool("apply_patch", '{"input":"*** Begin"}', "c2"),
                            tool("shell", "{}", "c3"),
                            tool("apply_patch", "no json", "c4"),
                        ]
                    }
                )
            ],
            request,
        )
    )
    assert [{k: v for k, v in i.items() if k not in ("id", "status")} for i in whole["output"]] == [
        {"type": "function_call", "namespace": "mcp", "name": "add", "arguments": '{"a":1}', "call_id": "c1"},
        {"type": "custom_tool_call", "name": "apply_patch", "input": "*** Begin", "call_id": "c2"},
        {"type": "function_call", "name": "shell", "arguments": "{}", "call_id": "c3"},
        {"type": "custom_tool_call", "name": "apply_patch", "input": "no json", "call_id": "c4"},
    ]
    # And what comes back under the harness's names is the policy's again, also where no tools are declared.
    back = asked(user("x"), *whole["output"][:2], {"type": "custom_tool_call_output", "call_id": "c2", "output": "ok"})
    calls = parsed(responses, back | {"tools": tools}).messages[1]["tool_calls"]
    assert [c["function"]["name"] for c in calls] == ["mcp__add_2", "apply_patch"]
    assert json.loads(calls[1]["function"]["arguments"]) == {"input": "*** Begin"}
    calls = parsed(responses, back).messages[1]["tool_calls"]
    assert [c["function"]["name"] for c in calls] == ["mcp__add", "apply_patch"]
    assert request.declared["mcp__add_2"] == Declared("add", "mcp", False)


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        ("required", "required"),
        ("none", "none"),
        ({"type": "function", "name": "shell"}, {"type": "function", "function": {"name": "shell"}}),
        (
            {"type": "function", "namespace": "mcp", "name": "add"},
            {"type": "function", "function": {"name": "mcp__add"}},
        ),
        ({"type": "allowed_tools", "mode": "required", "tools": []}, "required"),
        ({"type": "web_search"}, None),
    ],
)
def test_tool_choice(choice: Any, sent: Any) -> None:
    tools = [SHELL, {"type": "namespace", "name": "mcp", "tools": [INNER]}]
    forwarded = parsed(responses, asked(tools=tools, tool_choice=choice)).forwarded
    assert forwarded.get("tool_choice") == sent


def test_a_format_is_chats_response_format() -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    assert parsed(responses, asked(text={"format": form})).forwarded == {
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    }
    assert parsed(responses, asked(text={"format": {"type": "text"}, "verbosity": "low"})).forwarded == {}


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id is not offered"),
        ({"input": "x", "background": True}, "background is not offered"),
        ({}, "input must be a string or a list of items"),
        ({"input": []}, "at least one message with content"),
        ({"input": [1]}, "input must be a list of objects"),
        ({"input": [{"role": "tool", "content": ""}]}, "input[0].role is 'tool'"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0] refers to a stored item"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
            "input[0].content[0].type is 'input_file'",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "must be an image as"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text is None"),
        ({"input": [{"type": "function_call", "arguments": "{}"}]}, "input[0].name is None"),
        ({"input": "x", "max_output_tokens": "9"}, "max_output_tokens is '9'"),
        ({"input": "x", "tools": {}}, "tools must be a list of objects"),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name is None"),
        ({"input": "x", "tools": [SHELL], "tool_choice": {"type": "function", "name": "no"}}, "names 'no'"),
        ({"input": "x", "tools": [SHELL], "tool_choice": 3}, "tool_choice is 3"),
    ],
)
def test_what_is_wrong_is_named(body: Json, told: str) -> None:
    with pytest.raises(Refusal) as e:
        parsed(responses, body)
    assert (e.value.status, e.value.code) == (400, "invalid_request")
    assert told in e.value.message


# ---- answers -----------------------------------------------------------------------------------
def test_every_event_of_a_stream_in_its_order() -> None:
    message = {"reasoning": "thinking", "content": "I look.", "tool_calls": [tool("shell", '{"cmd":"ls"}')]}
    request = parsed(responses, asked(tools=[SHELL], include=["reasoning.encrypted_content"]))
    found = events(responses.stream([answered(message)], request))
    assert kinds(found) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert [e["sequence_number"] for e in found] == list(range(len(found)))
    assert [e["output_index"] for e in found if "output_index" in e][-1] == 2
    whole = read_responses(responses.stream([answered(message)], request))
    reasoning, said, called = whole["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "thinking"}]
    assert reasoning["summary"] == [] and isinstance(reasoning["encrypted_content"], str)
    assert said["content"] == [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}]
    assert (said["role"], said["type"], said["id"]) == ("assistant", "message", f"msg_{IDENT}")
    assert (called["name"], called["arguments"], called["call_id"]) == ("shell", '{"cmd":"ls"}', "call_1")
    assert whole["usage"] == {
        "input_tokens": 30,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 12,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 42,
    }
    assert (whole["status"], whole["id"], whole["model"], whole["store"]) == ("completed", f"resp_{IDENT}", "m", False)
    # The plain answer is the stream's last event.
    assert json.loads(responses.render([answered(message)], request)) == whole


@pytest.mark.parametrize(("finish", "reason"), [("length", "max_output_tokens"), ("content_filter", "content_filter")])
def test_a_cut_answer_is_incomplete(finish: str, reason: str) -> None:
    found = events(responses.stream([answered({"content": "half"}, finish)], parsed(responses, asked())))
    assert found[-1]["type"] == "response.incomplete"
    assert found[-1]["response"]["incomplete_details"] == {"reason": reason}
    assert found[-1]["response"]["output"][0]["status"] == "incomplete"


def test_cached_and_reasoning_tokens_are_upstreams() -> None:
    usage = {
        "prompt_tokens": 9,
        "completion_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 3},
    }
    body = json.loads(responses.render([answered({"content": "a"}, usage=usage)], parsed(responses, asked())))
    assert body["usage"]["input_tokens_details"] == {"cached_tokens": 4}
    assert body["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}
    unknown = json.loads(responses.render([answered({"content": "a"}, usage={})], parsed(responses, asked())))
    assert unknown["usage"] is None


def test_a_stream_that_was_kept_alive_goes_on_where_it_was() -> None:
    request = parsed(responses, asked())
    call = answered({"content": "done"})
    begun = b"".join(responses.alive(call.id, request, n) for n in range(3))
    whole = begun + responses.stream([call], request, 3)
    assert kinds(events(begun)) == ["created", "in_progress"]
    assert read_responses(whole)["output"][0]["content"][0]["text"] == "done"
    assert {e["response"]["id"] for e in events(whole) if "response" in e} == {f"resp_{IDENT}"}
    failed = begun + responses.failed(Refusal(503, "policy_failed", "gone"), call.id, request, 3)
    last = events(failed)[-1]
    assert (last["type"], last["sequence_number"]) == ("response.failed", 3)
    assert (last["response"]["status"], last["response"]["error"]) == (
        "failed",
        {"code": "server_error", "message": "gone"},
    )


def test_sealed_reasoning_comes_back_as_it_was() -> None:
    request = parsed(responses, asked(include=["reasoning.encrypted_content"]))
    item = json.loads(responses.render([answered({"reasoning": "ü \ud800", "content": "a"})], request))["output"][0]
    # Clients that keep no reasoning in the clear give the sealed text back.
    back = parsed(responses, asked(user("x"), {**item, "content": None}))
    assert back.messages[1]["reasoning"] == "ü \ud800"
    foreign = parsed(responses, asked(user("x"), {**item, "content": [], "encrypted_content": "gAAAA"}))
    assert len(foreign.messages) == 1
    with pytest.raises(Refusal, match="is not as it was given"):
        parsed(responses, asked(user("x"), {**item, "content": [], "encrypted_content": "openforge1.!"}))
    plain = json.loads(responses.render([answered({"reasoning": "hm"})], parsed(responses, asked())))["output"][0]
    assert "encrypted_content" not in plain
