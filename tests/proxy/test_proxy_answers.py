"""What goes upstream, what comes back, and what stands in the record of an answered call."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import duckdb
import pytest
from proxy_rig import SAMPLING, SECRET, Rig, assemble, chat, error_code, events
from proxy_stub import completion, recorded, template

TOOLS = recorded("forced")["request"]["tools"]


async def test_upstream_body_is_the_sessions_sampling_and_the_harness_text(rig: Rig) -> None:
    rig.session()
    asked = chat("hi", temperature=0.1, top_p=0.2, seed=7, logit_bias={"5": 1}, n=1, user="u", stop=["\n"], stream=True)
    asked["messages"].insert(0, {"role": "developer", "content": "be brief"})
    asked |= {"tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": False, "prompt_cache_key": "x"}
    status, _ = await rig.ask(asked)
    assert status == 200
    assert rig.stub.bodies == [
        {
            **SAMPLING,
            "model": "policy",
            "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
            "tools": TOOLS,
            "tool_choice": "auto",
            "stop": ["\n"],
            "max_tokens": 64,
            "stream": False,
            "logprobs": True,
            "top_logprobs": 0,
            "return_token_ids": True,
            "include_stop_str_in_output": False,
        }
    ]
    assert rig.stub.paths == ["/v1/chat/completions"]


async def test_every_call_has_a_seed_of_its_own_and_a_resend_the_same(rig: Rig) -> None:
    rig.session(seed=7)
    rig.stub.says("a", "b")
    await rig.ask(chat("x"))
    await rig.ask(chat("x"))
    rig.stub.answers(400, {"error": {"message": "not this one"}})
    rig.stub.says("c")
    assert (await rig.ask(chat("y")))[0] == 400
    # A client's own resend of what failed is the same call: it draws with the same seed.
    assert (await rig.ask(chat("y"), {"x-stainless-retry-count": "1"}))[0] == 200
    seeds = [b["seed"] for b in rig.stub.bodies]
    assert len(seeds) == 4 and seeds[2] == seeds[3] and len(set(seeds)) == 3
    assert all(0 <= s < 2**31 for s in seeds)
    # Worked out by hand: the first four bytes of SHA-256("7/0"), without the lowest bit.
    assert seeds[0] == int(hashlib.sha256(b"7/0").hexdigest()[:8], 16) // 2


async def test_without_a_seed_none_is_sent(rig: Rig) -> None:
    rig.session()
    rig.stub.says("a")
    await rig.ask(chat("x"))
    assert "seed" not in rig.stub.bodies[0]


@pytest.mark.parametrize(
    ("asked", "window", "sent"),
    [
        ({}, 512, 64),
        ({"max_tokens": 5}, 512, 5),
        ({"max_tokens": 32000}, 512, 64),
        ({"max_completion_tokens": 7, "max_tokens": 9}, 512, 7),
        ({"max_tokens": 32000}, 40, 40),
    ],
)
async def test_max_tokens_is_the_least_of_the_three(rig: Rig, asked: Any, window: int, sent: int) -> None:
    rig.session(context_window=window)
    await rig.ask(chat("hi", **asked))
    assert rig.stub.bodies[0]["max_tokens"] == sent
    assert rig.records("call")[0]["sampling"] == SAMPLING | {"max_tokens": sent}


async def test_empty_tools_are_dropped_with_their_choice(rig: Rig) -> None:
    rig.session()
    await rig.ask(chat("hi", tools=[], tool_choice="auto", parallel_tool_calls=True))
    assert not {"tools", "tool_choice", "parallel_tool_calls"} & rig.stub.bodies[0].keys()


async def test_recorded_answer_reaches_harness_and_record(rig: Rig) -> None:
    vllm = recorded("plain")["body"]
    rig.stub.answers(200, vllm)
    rig.session()
    status, raw = await rig.ask(chat("hi"))
    got = json.loads(raw)
    choice = vllm["choices"][0]
    assert status == 200
    assert got["id"].startswith("chatcmpl-") and got["object"] == "chat.completion" and got["model"] == "gpt-x"
    assert got["usage"] == vllm["usage"]
    assert got["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": choice["message"]["content"]},
            "finish_reason": "length",
            "logprobs": None,
        }
    ]
    assert b"token_ids" not in raw
    (record,) = rig.records("call")
    assert record["prompt_token_ids"].tolist() == vllm["prompt_token_ids"]
    assert record["response_token_ids"] == choice["token_ids"]
    assert record["logprobs"] == [t["logprob"] for t in choice["logprobs"]["content"]]
    assert (record["finish_reason"], record["policy_version"]) == ("length", "3@abc")


async def test_logprobs_are_shown_only_when_asked_for(rig: Rig) -> None:
    vllm = recorded("top")["body"]
    rig.stub.answers(200, vllm)
    rig.session()
    _, raw = await rig.ask(chat("hi", logprobs=True, top_logprobs=2))
    assert rig.stub.bodies[0]["top_logprobs"] == 2
    shown = json.loads(raw)["choices"][0]["logprobs"]
    assert shown == {"content": vllm["choices"][0]["logprobs"]["content"]}


@pytest.mark.parametrize("name", ["plain", "forced"])
async def test_stream_says_the_same_as_plain(rig: Rig, name: str) -> None:
    vllm = recorded(name)["body"]
    rig.stub.answers(200, vllm)
    rig.stub.answers(200, vllm)
    rig.session()
    _, plain = await rig.ask(chat("hi"))
    status, streamed = await rig.ask(chat("hi", stream=True, stream_options={"include_usage": True}))
    choice = json.loads(plain)["choices"][0]
    assert status == 200
    assert assemble(streamed) == {
        "message": choice["message"],
        "finish_reason": choice["finish_reason"],
        "usage": vllm["usage"],
    }
    assert [r["response_token_ids"] for r in rig.records("call")] == [vllm["choices"][0]["token_ids"]] * 2
    assert len({e["id"] for e in events(streamed)}) == 1


async def test_stream_without_include_usage_has_none(rig: Rig) -> None:
    rig.session()
    _, raw = await rig.ask(chat("hi", stream=True))
    assert all("usage" not in e and e["choices"] for e in events(raw))


async def test_two_turns_are_rows_that_extend_one_another(rig: Rig) -> None:
    rig.stub.says("ls", "done")
    session = rig.session()
    await rig.ask(chat("task"))
    await rig.ask(chat("task", "ls", "a.txt"))
    await session.close(harness_exited=True)
    first, second = rig.rows()
    opening = template([{"role": "user", "content": "task"}])
    assert first["prompt_suffix_ids"] == opening
    assert first["response_token_ids"] == [*b"ls", 257]
    assert first["logprobs"] == [-0.001, -0.002, -0.003]
    assert (second["parent"], second["prefix_of"], second["prefix_len"]) == (0, 0, len(opening) + 3)
    assert second["prompt_suffix_ids"] == [256, *b"user\na.txt", 257, 256, *b"assistant\n"]
    assert json.loads(second["messages"]) == [
        {"role": "assistant", "content": "ls"},
        {"role": "user", "content": "a.txt"},
    ]
    assert [(r["thread"], r["delivery"], r["trainable"], r["reason"]) for r in (first, second)] == [
        (0, "confirmed", True, None)
    ] * 2


async def test_killed_harness_leaves_its_last_answer_unconfirmed(rig: Rig) -> None:
    rig.stub.says("ls", "done")
    session = rig.session()
    await rig.ask(chat("task"))
    await rig.ask(chat("task", "ls", "a.txt"))
    await session.close(harness_exited=False)
    assert [(r["delivery"], r["reason"]) for r in rig.rows()] == [
        ("confirmed", None),
        ("sent", "unconfirmed"),
    ]


async def test_models_names_the_sessions_model(rig: Rig) -> None:
    rig.session()
    async with rig.harness.get(rig.url("models"), headers={"x-api-key": SECRET}) as r:
        (model,) = (await r.json())["data"]
    assert (model["id"], model["max_model_len"]) == ("policy", 512)
    assert rig.stub.paths == []


@pytest.mark.parametrize(
    ("header", "value", "status"),
    [
        ("authorization", f"Bearer {SECRET}", 200),
        ("authorization", f"bearer {SECRET}", 200),
        ("x-api-key", SECRET, 200),
        ("x-goog-api-key", SECRET, 200),
        ("authorization", SECRET, 401),
        ("authorization", "Bearer sk-other", 401),
        ("x-api-key", SECRET + "x", 401),
        ("x-api-key", "", 401),
        ("x-other", SECRET, 401),
    ],
)
async def test_the_secret_is_the_key(rig: Rig, header: str, value: str, status: int) -> None:
    rig.session()
    async with rig.harness.post(rig.url(), json=chat("hi"), headers={header: value}) as r:
        assert r.status == status
    assert len(rig.stub.bodies) == (status == 200)


async def test_one_sessions_secret_opens_no_other(rig: Rig) -> None:
    rig.session("e1")
    rig.session("e2", secret="sk-two")
    status, raw = await rig.ask(chat("hi"), episode_id="e2")
    assert (status, error_code(raw)) == (401, "invalid_api_key")
    status, raw = await rig.ask(chat("hi"), episode_id="e3")
    assert (status, error_code(raw)) == (404, "session_not_found")


@pytest.mark.parametrize(
    "path",
    [
        "/collective_rpc",
        "/s/e1/collective_rpc",
        "/s/e1/v1/../../collective_rpc",
        "/s/e1/v1/%2e%2e/pause",
        "/s/e1/v1/completions",
        "/s/e1/v1/messages/batches",
        "/s/e1/v1/responses/compact",
        "/s/e1/messages",
        "/s/e1/api/hello",
        "/s/e1/v1/chat/completions/",
        "/s/e1//v1/chat/completions",
        "/v1/chat/completions",
        "/",
    ],
)
async def test_no_other_path_is_served_or_forwarded(rig: Rig, path: str) -> None:
    rig.session()
    url = f"http://127.0.0.1:{rig.port}{path}"
    async with rig.harness.post(url, json=chat("hi"), headers={"x-api-key": SECRET}) as r:
        assert r.status == 404
    assert rig.stub.paths == []


@pytest.mark.parametrize(
    "body",
    [b"{", b"[]", b"{}", b'{"messages": []}', b'{"messages": ["hi"]}', json.dumps(chat("hi", n=0)).encode()],
)
async def test_a_body_that_is_no_request_is_refused(rig: Rig, body: bytes) -> None:
    rig.session()
    status, raw = await rig.ask(body)
    assert (status, error_code(raw)) == (400, "invalid_request")
    assert rig.stub.bodies == []


async def test_half_a_character_of_an_answer_is_a_replacement(rig: Rig) -> None:
    """No UTF-8 holds it, and it would make the table's JSON unreadable for DuckDB."""
    session = rig.session()
    body = completion(chat("hi"), "x")
    body["choices"][0]["message"]["content"] = "bad \ud800 end"
    rig.stub.answers(200, body)
    _, raw = await rig.ask(chat("hi"))
    assert json.loads(raw)["choices"][0]["message"]["content"] == "bad \ufffd end"
    await session.close(True)
    (row,) = rig.rows()
    (told,) = duckdb.execute("select ?::json->>'content'", [row["response"]]).fetchone() or ()
    assert told == "bad \ufffd end"
