"""Answers made by hand, and clients of the three dialects as their documentation describes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from openforge.proxy.calls import Answer, Call, Request
from openforge.proxy.dialect import Dialect
from openforge.proxy.lineage import call_rows

Json = dict[str, Any]
USAGE = {"prompt_tokens": 30, "completion_tokens": 12, "total_tokens": 42}
IDENT = "0123456789abcdef0123456789abcdef"


def answered(message: Json, finish: str = "stop", usage: Json | None = None, **changed: Any) -> Call:
    """A call as the session gives it to a dialect."""
    given = {"role": "assistant", "content": None} | message
    answer = Answer(given, finish, USAGE if usage is None else usage, None, None, None, None, **changed)
    return Call(0, f"chatcmpl-{IDENT}", 1_700_000_000, answer)


def tool(name: str, arguments: str, ident: str = "call_1") -> Json:
    return {"id": ident, "type": "function", "function": {"name": name, "arguments": arguments}}


def parsed(dialect: Dialect, body: Json) -> Request:
    return dialect.parse(json.dumps(body).encode(), {})


def events(raw: bytes) -> list[Json]:
    """Named server-sent events; each name is its data's type."""
    found = []
    for block in raw.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def kinds(found: Sequence[Json]) -> list[str]:
    """Types of events in their order, a run of equal ones as one."""
    types = [e["type"].removeprefix("response.") for e in found]
    return [t for i, t in enumerate(types) if i == 0 or types[i - 1] != t]


def read_responses(raw: bytes) -> Json:
    """What a client makes of a responses stream: its items put together from the deltas, and the last event."""
    found = events(raw)
    assert [e["sequence_number"] for e in found] == list(range(len(found)))
    items: dict[str, Json] = {}
    for e in found:
        kind = e["type"].removeprefix("response.")
        if kind == "output_item.added":
            items[e["item"]["id"]] = dict(e["item"], content=list(e["item"].get("content", [])))
        elif kind == "content_part.added":
            assert e["content_index"] == len(items[e["item_id"]]["content"])
            items[e["item_id"]]["content"].append(dict(e["part"]))
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            items[e["item_id"]]["content"][e["content_index"]]["text"] += e["delta"]
        elif kind == "function_call_arguments.delta":
            items[e["item_id"]]["arguments"] += e["delta"]
        elif kind == "custom_tool_call_input.delta":
            items[e["item_id"]]["input"] += e["delta"]
        elif kind == "output_item.done":
            built, whole = items[e["item"]["id"]], e["item"]
            assert {k: built[k] for k in ("arguments", "input", "name", "call_id") if k in built} == {
                k: whole[k] for k in ("arguments", "input", "name", "call_id") if k in whole
            }
            assert built["content"] == whole.get("content", [])
    last = found[-1]["response"]
    assert [i["id"] for i in last["output"]] == list(items)
    return dict(last)


def read_messages(raw: bytes) -> Json:
    """What a client makes of a messages stream."""
    message: Json = {}
    partial: dict[int, str] = {}
    for e in events(raw):
        kind = e["type"]
        if kind == "message_start":
            message = e["message"]
        elif kind == "content_block_start":
            assert e["index"] == len(message["content"])
            message["content"].append(dict(e["content_block"]))
            partial[e["index"]] = ""
        elif kind == "content_block_delta":
            block, delta = message["content"][e["index"]], e["delta"]
            if delta["type"] == "input_json_delta":
                partial[e["index"]] += delta["partial_json"]
            else:
                key = delta["type"].removesuffix("_delta")
                block[key] += delta[key]
        elif kind == "content_block_stop" and partial[e["index"]]:
            assert message["content"][e["index"]]["input"] == {}
            message["content"][e["index"]]["input"] = json.loads(partial[e["index"]])
        elif kind == "message_delta":
            message |= e["delta"]
            message["usage"] |= e["usage"]
    assert events(raw)[-1] == {"type": "message_stop"}
    return message


def recognised(history: list[Json], response: Json, later: list[Json]) -> bool:
    """Whether lineage finds a call's history and response in a later request, by what the messages say.

    The later prompt's ids do not extend the first's, and nothing was sent: only the messages can confirm it.
    """
    record = {
        "record": "call",
        "episode_id": "e",
        "dialect": "chat",
        "model": "m",
        "arrived": 1.7e9,
        "latency": 0.1,
        "policy_version": "0@x",
        "sampling": {},
        "asked": {},
        "retry": 0,
        "body_sha256": "",
        "tools": None,
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 1, "completion_tokens": 1},
        "response_token_ids": [7],
        "logprobs": [-0.5],
    }
    first = record | {"call": 0, "messages": history, "response": response, "prompt_token_ids": [1]}
    second = record | {"call": 1, "messages": later, "response": {"role": "assistant", "content": "x"}}
    rows, _ = call_rows([first, second | {"prompt_token_ids": [2]}])
    return bool(rows[0]["delivery"] == "confirmed")
