"""Several policy servers, and what a policy server can answer that is no answer."""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from proxy_rig import Rig, chat, error_code
from proxy_stub import Json, StubUpstream, completion

from openforge.proxy.calls import Refusal
from openforge.proxy.upstream import PolicyFailed, Upstream, answer

BODY = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def stubs() -> AsyncIterator[list[StubUpstream]]:
    """Three MOCK policy servers."""
    made = [StubUpstream() for _ in range(3)]
    for stub in made:
        await stub.start()
    yield made
    for stub in made:
        await stub.stop()


@pytest.fixture
async def upstream(stubs: list[StubUpstream]) -> AsyncIterator[Upstream]:
    async with aiohttp.ClientSession() as client:
        yield Upstream([s.url for s in stubs], "sk-up", client)


async def ask(upstream: Upstream, episode: str = "e1", seconds: float = 60.0) -> str:
    """One call of an episode; what was said."""
    troubles: list[str] = []
    got = await upstream.complete(BODY, time.monotonic() + seconds, 512, troubles.append, episode)
    return str(got.message["content"])


async def homes(upstream: Upstream, stubs: list[StubUpstream]) -> dict[str, StubUpstream]:
    """Which server answers each of 40 episodes."""
    found = {}
    for n in range(40):
        before = [len(s.bodies) for s in stubs]
        await ask(upstream, f"e{n}")
        (found[f"e{n}"],) = [s for s, b in zip(stubs, before, strict=True) if len(s.bodies) > b]
    return found


async def home(upstream: Upstream, stubs: list[StubUpstream]) -> tuple[StubUpstream, list[StubUpstream]]:
    """The server of episode e1, and the others."""
    await ask(upstream)
    (mine,) = [s for s in stubs if s.bodies]
    mine.bodies.clear()
    while not mine.arrived.empty():
        mine.arrived.get_nowait()
    return mine, [s for s in stubs if s is not mine]


# ---- affinity and fail-over ----------------------------------------------------------------------
async def test_an_episode_stays_with_one_server_and_only_the_orphans_move(
    upstream: Upstream, stubs: list[StubUpstream]
) -> None:
    first, again = await homes(upstream, stubs), await homes(upstream, stubs)
    assert first == again
    assert all(s in first.values() for s in stubs)
    gone = stubs[0]
    await gone.stop()
    moved = await homes(upstream, stubs)
    assert {e for e in first if moved[e] is not first[e]} == {e for e in first if first[e] is gone}


async def test_a_dead_server_is_passed_by_at_once_and_comes_back(
    upstream: Upstream, stubs: list[StubUpstream], caplog: pytest.LogCaptureFixture
) -> None:
    mine, others = await home(upstream, stubs)
    port = int(mine.url.rsplit(":", 1)[1])
    await mine.stop()
    (replica,) = [r for r in upstream.replicas if r.url.startswith(mine.url)]
    await ask(upstream)
    assert "asking again" not in caplog.text and replica.down
    assert sum(len(s.bodies) for s in others) == 1
    # Nobody waits for it meanwhile, and it is asked for one token after a while, not by an episode's call.
    replica.again = 0.0
    await ask(upstream)
    await asyncio.gather(*upstream._probes)
    assert replica.down and replica.pause == 2.0 and replica.again > time.monotonic()
    back = StubUpstream()
    await back.start(port)
    try:
        replica.again = 0.0
        await ask(upstream)
        await asyncio.gather(*upstream._probes)
        assert not replica.down and [b["max_tokens"] for b in back.bodies] == [1]
        await ask(upstream)
        assert len(back.bodies) == 2
    finally:
        await back.stop()


@pytest.mark.parametrize(
    "reply",
    [(500, {"error": {"message": "boom"}}), (200, {"choices": []}), (200, {"error": "no"}), (429, {"detail": "busy"})],
)
async def test_failures_in_a_row_take_a_server_out_and_one_does_not(
    upstream: Upstream, stubs: list[StubUpstream], reply: tuple[int, Json]
) -> None:
    mine, others = await home(upstream, stubs)
    (replica,) = [r for r in upstream.replicas if r.url.startswith(mine.url)]
    mine.answers(*reply)
    await ask(upstream)
    assert (len(mine.bodies), sum(len(s.bodies) for s in others), replica.down) == (1, 1, False)
    await ask(upstream)
    assert len(mine.bodies) == 2
    for _ in range(3):
        mine.answers(*reply)
        await ask(upstream)
    assert (len(mine.bodies), replica.down) == (5, True)
    await ask(upstream)
    assert len(mine.bodies) == 5


async def test_a_server_that_hangs_is_left_and_its_generation_aborted(
    upstream: Upstream, stubs: list[StubUpstream]
) -> None:
    mine, others = await home(upstream, stubs)
    mine.hold = asyncio.Event()
    upstream.patience = upstream.probe_seconds = 0.05
    for r in upstream.replicas:
        r.answered = -math.inf
    await ask(upstream)
    assert sum(len(s.bodies) for s in others) == 1
    aborted = [await mine.aborted.get() for _ in range(2)]
    assert sorted(b.get("max_tokens", 0) for b in aborted) == [0, 1]


async def test_a_slow_server_is_waited_for(upstream: Upstream, stubs: list[StubUpstream]) -> None:
    mine, others = await home(upstream, stubs)
    probed = asyncio.Event()

    async def slow(body: Json) -> web.StreamResponse:
        await probed.wait()
        return web.json_response(completion(body, "at last"))

    async def token(body: Json) -> web.StreamResponse:
        assert body["max_tokens"] == 1
        probed.set()
        return web.json_response(completion(body, "t"))

    mine.script.extend([slow, token])
    upstream.patience = 0.05
    assert await ask(upstream) == "at last"
    assert not any(s.bodies for s in others)


async def test_one_that_dies_under_a_call_hands_it_on(upstream: Upstream, stubs: list[StubUpstream]) -> None:
    mine, others = await home(upstream, stubs)
    mine.hold = asyncio.Event()
    task = asyncio.create_task(ask(upstream))
    await mine.arrived.get()
    await mine.stop()
    assert (await task).startswith("ok")
    assert sum(len(s.bodies) for s in others) == 1


async def test_one_that_refuses_the_key_is_out_and_all_of_them_are_the_end(
    upstream: Upstream, stubs: list[StubUpstream]
) -> None:
    mine, _ = await home(upstream, stubs)
    mine.answers(404, {"message": "The model `policy` does not exist."})
    await ask(upstream)
    for stub in stubs:
        stub.script.clear()
        stub.answers(401, {"error": "Unauthorized"})
    with pytest.raises(PolicyFailed, match="answered 401: Unauthorized"):
        await ask(upstream)


async def test_what_one_refuses_is_refused(upstream: Upstream, stubs: list[StubUpstream]) -> None:
    mine, others = await home(upstream, stubs)
    mine.answers(400, {"error": {"message": "messages: odd"}})
    with pytest.raises(Refusal, match="odd"):
        await ask(upstream)
    assert not any(s.bodies for s in others)


async def test_all_dead_is_policy_failed_at_the_deadline(upstream: Upstream, stubs: list[StubUpstream]) -> None:
    for stub in stubs:
        await stub.stop()
    with pytest.raises(PolicyFailed, match="Cannot connect"):
        await ask(upstream, seconds=0.3)
    # The limit of one call holds in a session without an end.
    upstream.call_seconds = 0.1
    with pytest.raises(PolicyFailed, match="Cannot connect"):
        await ask(upstream, seconds=math.inf)


async def test_all_dead_and_one_back_is_an_answer(upstream: Upstream, stubs: list[StubUpstream]) -> None:
    port = int(stubs[1].url.rsplit(":", 1)[1])
    for stub in stubs:
        await stub.stop()
    task = asyncio.create_task(ask(upstream))
    while not all(r.down for r in upstream.replicas):
        await asyncio.sleep(0)
    back = StubUpstream()
    await back.start(port)
    try:
        assert (await task).startswith("ok")
    finally:
        await back.stop()


async def test_hanging_up_aborts_at_the_replica(upstream: Upstream, stubs: list[StubUpstream]) -> None:
    mine, others = await home(upstream, stubs)
    mine.hold = asyncio.Event()
    task = asyncio.create_task(ask(upstream))
    await mine.arrived.get()
    task.cancel()
    await mine.aborted.get()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not any(s.bodies for s in others) and not upstream.replicas[0].down


async def test_a_replica_that_dies_under_a_session_costs_it_nothing(rig: Rig, stubs: list[StubUpstream]) -> None:
    session = rig.session()
    session.upstream = Upstream([s.url for s in stubs], None, rig._client)
    assert (await rig.ask(chat("hi")))[0] == 200
    (mine,) = [s for s in stubs if s.bodies]
    mine.hold = asyncio.Event()
    task = asyncio.create_task(rig.ask(chat("on")))
    while len(mine.bodies) < 2:
        await asyncio.sleep(0)
    await mine.stop()
    assert (await task)[0] == 200
    await session.close(harness_exited=False)
    kinds = [r["record"] for r in json.loads(session.summary())["records"]]
    assert kinds == ["open", "call", "delivery", "call", "delivery", "close"] and session.policy_failed is None


async def test_only_the_time_before_the_fail_over_was_lost(rig: Rig, stubs: list[StubUpstream]) -> None:
    """A slow answer after a quick failure is the agent's time, not an outage."""
    session = rig.session()
    up = session.upstream = Upstream([s.url for s in stubs], None, rig._client)
    assert (await rig.ask(chat("hi")))[0] == 200
    (mine,) = [s for s in stubs if s.bodies]
    mine.answers(500, {"error": {"message": "boom"}})
    for other in stubs:
        other.hold = None if other is mine else asyncio.Event()
    task = asyncio.create_task(rig.ask(chat("on")))
    while not any(s.bodies for s in stubs if s is not mine):
        await asyncio.sleep(0)
    (wait,) = session._waits.values()
    assert wait.trouble == "status 500: boom"
    up.patience = wait.lost + 0.01
    wait.begun -= 60.0
    for other in stubs:
        if other.hold is not None:
            other.hold.set()
    assert (await task)[0] == 200
    await session.close(harness_exited=False)
    assert session.policy_failed is None


async def test_a_session_that_closes_on_a_hung_replica_is_told_so_though_others_answer(
    rig: Rig, stubs: list[StubUpstream]
) -> None:
    session = rig.session()
    up = session.upstream = Upstream([s.url for s in stubs], None, rig._client)
    assert (await rig.ask(chat("hi")))[0] == 200
    (mine,) = [s for s in stubs if s.bodies]
    mine.hold = asyncio.Event()
    task = asyncio.create_task(rig.ask(chat("on")))
    while len(mine.bodies) < 2:
        await asyncio.sleep(0)
    up.patience, up.probe_seconds = 0.1, 0.1
    for replica in up.replicas:
        hung = replica.url.startswith(mine.url)
        replica.answered = -math.inf if hung else time.monotonic()
    (wait,) = session._waits.values()
    wait.begun -= 0.2
    await session.close(harness_exited=False)
    await asyncio.gather(task, return_exceptions=True)
    assert "without an answer for 0 s: it did not sample one token in 0.1 s" in (session.policy_failed or "")


async def test_one_address_given_twice_is_one_server(stubs: list[StubUpstream]) -> None:
    async with aiohttp.ClientSession() as client:
        upstream = Upstream([stubs[0].url, f"{stubs[0].url}/v1/"], None, client)
    assert [r.url for r in upstream.replicas] == [f"{stubs[0].url}/v1/chat/completions"]


# ---- answers that are none -----------------------------------------------------------------------
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
WHOLE = json.dumps(completion(chat("hi"), "whole")).encode()
CUT = {
    "half a body": HEAD + b"Content-Length: %d\r\n\r\n" % len(WHOLE) + WHOLE[: len(WHOLE) // 2],
    "half a body without a length": HEAD + b"Connection: close\r\n\r\n" + WHOLE[:-1],
    "half a chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(WHOLE) + WHOLE[:20],
    "no last chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(WHOLE) + WHOLE + b"\r\n",
    "no head": b"HTTP/1.1 200",
    "nothing": b"",
    "no HTTP": b"SSH-2.0-OpenSSH_9.2\r\n",
    "half a gzip": HEAD
    + b"Content-Encoding: gzip\r\nConnection: close\r\n\r\n"
    + gzip.compress(WHOLE)[: len(gzip.compress(WHOLE)) // 2],
    "garbled": HEAD + b"Content-Length: 5\r\n\r\n\xff\xfe{[\x00",
    "length too small": HEAD + b"Content-Length: 10\r\n\r\n" + WHOLE,
}


@pytest.mark.parametrize("cut", CUT)
async def test_an_answer_that_is_cut_is_asked_for_again(rig: Rig, cut: str) -> None:
    """A MOCK server that cuts its first answer."""
    asked = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-l"))
        await reader.readexactly(length)
        asked += 1
        writer.write(CUT[cut] if asked == 1 else HEAD + b"Content-Length: %d\r\n\r\n" % len(WHOLE) + WHOLE)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    session = rig.session()
    port = server.sockets[0].getsockname()[1]
    session.upstream = Upstream(f"http://127.0.0.1:{port}", None, rig._client)
    async with server:
        status, raw = await rig.ask(chat("hi"))
    assert (status, json.loads(raw)["choices"][0]["message"]["content"]) == (200, "whole")
    assert (asked, len(rig.records("call")), len(rig.records("failure"))) == (2, 1, 0)


def ids_short(body: Json) -> None:
    body["choices"][0]["token_ids"].pop()


def ids_long(body: Json) -> None:
    body["choices"][0]["token_ids"].append(7)


def logprobs_short(body: Json) -> None:
    body["choices"][0]["logprobs"]["content"].pop()


def no_logprobs(body: Json) -> None:
    body["choices"][0]["logprobs"] = None


def garbled_logprobs(body: Json) -> None:
    body["choices"][0]["logprobs"]["content"][0]["logprob"] = None


def usage_wrong(body: Json) -> None:
    body["usage"]["completion_tokens"] += 1


def prompt_wrong(body: Json) -> None:
    body["usage"]["prompt_tokens"] -= 1


def no_prompt(body: Json) -> None:
    del body["prompt_token_ids"]


def no_ids(body: Json) -> None:
    del body["choices"][0]["token_ids"]


def words_for_ids(body: Json) -> None:
    body["choices"][0]["token_ids"] = ["a", "b"]


def fractions(body: Json) -> None:
    body["prompt_token_ids"][0] = 1.5


def huge(body: Json) -> None:
    body["prompt_token_ids"][0] = 2**40


def negative(body: Json) -> None:
    body["choices"][0]["token_ids"][0] = -1


def text_for_ids(body: Json) -> None:
    body["prompt_token_ids"] = "12"


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        *((f, "count_mismatch") for f in (ids_short, ids_long, logprobs_short, no_logprobs, garbled_logprobs)),
        *((f, "count_mismatch") for f in (usage_wrong, prompt_wrong)),
        *((f, "no_token_ids") for f in (no_prompt, no_ids, words_for_ids, fractions, huge, negative, text_for_ids)),
    ],
)
async def test_wrong_counts_are_served_and_not_trained(rig: Rig, spoil: Callable[[Json], None], reason: str) -> None:
    body = completion(chat("hi"), "fine")
    spoil(body)
    rig.stub.answers(200, body)
    rig.session()
    status, raw = await rig.ask(chat("hi"))
    assert (status, json.loads(raw)["choices"][0]["message"]["content"]) == (200, "fine")
    (row,) = rig.rows()
    assert (row["trainable"], row["reason"], len(rig.stub.bodies)) == (False, reason, 1)


@pytest.mark.parametrize(
    "message",
    [
        7,
        {"content": 7},
        {"content": {"text": "x"}},
        {"content": "x", "tool_calls": "no"},
        {"content": None, "tool_calls": [{}]},
        {"content": None, "tool_calls": [{"function": {"name": 3, "arguments": "{}"}}]},
    ],
)
async def test_a_message_of_no_known_shape_is_asked_for_again(rig: Rig, message: Any) -> None:
    body = completion(chat("hi"), "x")
    body["choices"][0]["message"] = message
    rig.stub.answers(200, body)
    rig.session()
    assert (await rig.ask(chat("hi")))[0] == 200
    assert (len(rig.stub.bodies), len(rig.records("call"))) == (2, 1)


# ---- other servers -------------------------------------------------------------------------------
def test_sglang_gives_the_prompts_ids_within_the_choice() -> None:
    """The shape of sgl-project/sglang pull request 30917."""
    body = completion(chat("hi"), "yes")
    body["choices"][0]["prompt_token_ids"] = body.pop("prompt_token_ids")
    body["choices"][0]["matched_stop"] = 257
    got = answer(json.dumps(body).encode())
    assert got.prompt_token_ids is not None and got.response_token_ids is not None
    assert got.prompt_token_ids.tolist() == [256, *b"user\nhi", 257, 256, *b"assistant\n"]
    assert got.response_token_ids.tolist() == [*b"yes", 257]


@pytest.mark.parametrize(
    "words",
    [
        "The input (600 tokens) is longer than the model's context length (512 tokens).",
        "Requested token count exceeds the model's maximum context length of 512 tokens. You requested a total of 600.",
    ],
)
async def test_sglangs_words_for_an_overlong_prompt(rig: Rig, words: str) -> None:
    rig.stub.answers(400, {"object": "error", "message": words, "type": "BadRequestError", "code": 400})
    rig.session()
    status, raw = await rig.ask(chat("x"))
    assert (status, error_code(raw)) == (400, "context_length_exceeded")


# ---- what is never asked -------------------------------------------------------------------------
CONTROL_PATHS = (
    *("collective_rpc", "pause", "resume", "sleep", "wake_up", "reset_prefix_cache", "metrics", "tokenize", "health"),
    *("detokenize", "load_lora_adapter", "update_weight_version", "weight_info", "flush_cache", "server_info"),
    *("completions", "embeddings", "render", "inference/v1/generate", "../../metrics", "..%2f..%2fmetrics"),
    *("chat/completions/render", "chat/completions/../../../pause", "chat%2Fcompletions/../tokenize"),
)


@pytest.mark.parametrize("path", CONTROL_PATHS)
async def test_no_other_path_reaches_the_policy_server(rig: Rig, path: str) -> None:
    rig.session()
    key = b"Authorization: Bearer sk-episode\r\n"
    for prefix in (b"/s/e1/v1/", b"/s/e1/", b"/", b"//", b"/s/e1/v1/chat/completions/../../../../"):
        for method in (b"GET", b"POST"):
            # Client libraries would tidy the path.
            reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
            target = prefix + path.encode()
            writer.write(method + b" " + target + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + key)
            writer.write(b"Content-Length: 2\r\n\r\n{}")
            status = (await reader.readline()).split()[1]
            writer.close()
            assert status in (b"400", b"404", b"405"), (method, target, status)
    assert rig.stub.paths == []
