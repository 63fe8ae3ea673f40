"""The proxy before a plain endpoint, which refuses every field that OpenAI does not know and gives no token ids."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from plain_stub import PlainStub
from proxy_rig import SAMPLING, Rig, chat, error_code

from openforge.proxy import wire
from openforge.proxy.upstream import Upstream

FOREIGN = "none@http://127.0.0.1/v1"


@pytest.fixture
async def plain(rig: Rig) -> AsyncIterator[PlainStub]:
    """The rig's upstream replaced by a plain endpoint; sessions opened by `ask` go there."""
    stub = PlainStub()
    await stub.start()
    yield stub
    await stub.stop()


def open_session(rig: Rig, plain: PlainStub, **changed: Any) -> None:
    session = rig.session(**({"policy_version": FOREIGN, "model": "gpt-x"} | changed))
    session.upstream = Upstream(plain.url, "sk-endpoint", rig._client, "openai")


async def test_only_fields_that_openai_knows_are_sent(rig: Rig, plain: PlainStub) -> None:
    open_session(rig, plain)
    tool = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
    echoed = {"role": "assistant", "content": "a", "tool_calls": None, "annotations": [], "provider_specific": {}}
    messages = [{"role": "user", "content": "q"}, echoed, {"role": "user", "content": "r"}]
    more = {"stop": ["END"], "tools": [tool], "seed": 5, "top_k": 3, "temperature": 0.1, "max_tokens": 9}
    status, raw = await rig.ask({"model": "policy", "messages": messages, **more})
    assert status == 200, raw
    assert plain.bodies == [
        {
            "model": "gpt-x",
            "messages": [messages[0], {"role": "assistant", "content": "a"}, messages[2]],
            "tools": [tool],
            "stop": ["END"],
            "seed": 5,
            "temperature": 0.7,
            "top_p": 1.0,
            "max_tokens": 9,
            "stream": False,
        }
    ]
    assert plain.heads == ["Bearer sk-endpoint"]
    (row,) = rig.rows()
    assert (row["trainable"], row["reason"], row["policy_version"]) == (False, "no_token_ids", FOREIGN)
    assert (row["prompt_tokens"], row["response_token_ids"]) == (7, [])


async def test_a_penalty_that_is_on_is_sent(rig: Rig, plain: PlainStub) -> None:
    open_session(rig, plain, sampling=SAMPLING | {"presence_penalty": 0.5})
    assert (await rig.ask(chat("hi")))[0] == 200
    assert plain.bodies[0]["presence_penalty"] == 0.5 and "frequency_penalty" not in plain.bodies[0]


async def test_a_reasoning_model_is_asked_in_its_own_fields(rig: Rig, plain: PlainStub) -> None:
    plain.reasoning = True
    open_session(rig, plain, sampling=SAMPLING | {"temperature": 1.0})
    assert (await rig.ask(chat("hi")))[0] == 200
    assert plain.bodies[-1].keys() == {"model", "messages", "stream", "max_completion_tokens"}
    asked = len(plain.bodies)
    assert (await rig.ask(chat("again")))[0] == 200
    # What was refused once is not sent again.
    assert len(plain.bodies) == asked + 1


async def test_a_refused_sampling_value_is_the_policys_failure_and_no_reward(rig: Rig, plain: PlainStub) -> None:
    plain.reasoning = True
    open_session(rig, plain, sampling=SAMPLING | {"temperature": 0.7})
    status, raw = await rig.ask(chat("hi"))
    assert (status, error_code(raw)) == (503, "policy_failed") and b"refuses temperature" in raw


async def test_a_refused_key_is_not_repeated(rig: Rig, plain: PlainStub) -> None:
    plain.key = "another"
    open_session(rig, plain)
    status, raw = await rig.ask(chat("hi"))
    assert status == 503 and b"answered 401" in raw and b"sk-endpoint" not in raw and b"[key]" in raw
    assert "sk-endpoint" not in json.dumps(rig.records("failure"))


@pytest.mark.parametrize("changed", [{"usage": None}, {"usage": {"prompt_tokens": "7"}}])
async def test_missing_usage_is_null_and_no_zero(rig: Rig, plain: PlainStub, changed: dict[str, Any]) -> None:
    plain.changed = changed
    open_session(rig, plain)
    assert (await rig.ask(chat("hi")))[0] == 200
    session = rig.gate.sessions["e1"]
    assert (session.prompt_tokens, session.response_tokens) == (None, None)
    assert rig.rows()[0]["prompt_tokens"] is None


async def test_a_token_budget_needs_usage(rig: Rig, plain: PlainStub) -> None:
    plain.changed = {"usage": None}
    open_session(rig, plain, tokens=100)
    status, raw = await rig.ask(chat("hi"))
    assert status == 503 and b"tells no usage" in raw and b"limits.tokens" in raw


@pytest.mark.parametrize(
    ("told", "shown", "recorded"), [("eos", "stop", "eos"), (None, "stop", None), (7, "stop", "7"), ("length",) * 3]
)
async def test_an_odd_finish_reason_is_recorded_as_told(
    rig: Rig, plain: PlainStub, told: Any, shown: str, recorded: str | None
) -> None:
    plain.choice = {"finish_reason": told}
    open_session(rig, plain)
    _, raw = await rig.ask(chat("hi"))
    assert json.loads(raw)["choices"][0]["finish_reason"] == shown
    assert rig.rows()[0]["finish_reason"] == recorded


async def test_a_body_without_a_message_is_asked_for_again(rig: Rig, plain: PlainStub) -> None:
    plain.choice = {"message": None}
    open_session(rig, plain, deadline_seconds=0.3)
    status, raw = await rig.ask(chat("hi"))
    assert status == 503 and b"no chat completion" in raw


async def test_the_sessions_key_stands_in_no_record(rig: Rig, plain: PlainStub) -> None:
    secret = "S3ssion-key_of-32-characters-xyz"
    open_session(rig, plain, secret=secret)
    plain.says = [f"it is {secret}"]
    status, raw = await rig.ask(chat(f"my key is {secret}"), {"authorization": f"Bearer {secret}"})
    # What the policy and the harness exchange is theirs; what is kept is not.
    assert status == 200 and secret in raw.decode() and secret in json.dumps(plain.bodies)
    assert secret not in rig.journal.path.read_text()
    assert "[session key]" in rig.rows()[0]["messages"] and "[session key]" in rig.rows()[0]["response"]


def test_an_endpoint_has_no_field_for_some_sampling() -> None:
    assert wire.not_taken(SAMPLING) is None
    assert "sampling.top_k is 5" in str(wire.not_taken(SAMPLING | {"top_k": 5}))
    assert "sampling.min_p is 0.1" in str(wire.not_taken(SAMPLING | {"min_p": 0.1}))
    assert "sampling.repetition_penalty is 1.1" in str(wire.not_taken(SAMPLING | {"repetition_penalty": 1.1}))


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://h:1", "http://h:1/v1"),
        ("http://h:1/v1/", "http://h:1/v1"),
        ("https://h/v1beta/openai/", "https://h/v1beta/openai"),
    ],
)
def test_a_base_url_is_taken_as_openai_clients_take_it(url: str, base: str) -> None:
    assert wire.base_url(url) == base
