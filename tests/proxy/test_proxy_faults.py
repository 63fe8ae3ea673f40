"""Retries, hang-ups, late answers, budgets, and a policy server that fails."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time

import pytest
from aiohttp import web
from proxy_rig import SAMPLING, SECRET, Rig, assemble, chat, error_code
from proxy_stub import Json, StubUpstream, completion, recorded

from openforge.proxy.calls import Request

RESENT = {"x-stainless-retry-count": "1"}


async def test_resend_of_an_answered_call_is_that_call(rig: Rig) -> None:
    session = rig.session()
    _, first = await rig.ask(chat("hi"))
    _, again = await rig.ask(chat("hi"), RESENT)
    assert json.loads(again) == json.loads(first)
    assert len(rig.stub.bodies) == len(rig.records("call")) == session.state()["turns"] == 1


async def test_same_body_without_the_header_is_a_new_call(rig: Rig) -> None:
    session = rig.session()
    await rig.ask(chat("hi"))
    await rig.ask(chat("hi"))
    assert len(rig.records("call")) == session.state()["turns"] == 2


async def test_resend_with_another_body_is_a_new_call(rig: Rig) -> None:
    rig.session()
    await rig.ask(chat("hi"))
    await rig.ask(chat("ho"), RESENT)
    assert len(rig.records("call")) == 2


async def test_resend_after_hanging_up_is_one_call(rig: Rig) -> None:
    rig.stub.hold = asyncio.Event()
    session = rig.session(turns=1)
    await rig.hang_up(chat("hi"))
    await rig.stub.aborted.get()
    rig.stub.hold.set()
    status, _ = await rig.ask(chat("hi"), RESENT)
    assert status == 200
    assert (len(rig.records("call")), session.state()["turns"]) == (1, 1)
    assert len(rig.records("failure")) == 1


async def test_resend_while_the_first_is_running_waits_for_it(rig: Rig) -> None:
    rig.stub.hold = asyncio.Event()
    session = rig.session(turns=1)
    first = asyncio.create_task(rig.ask(chat("hi")))
    await rig.stub.arrived.get()
    second = asyncio.create_task(rig.ask(chat("hi"), RESENT))
    (generation,) = session._latest.values()
    while generation.waiters < 2:
        await asyncio.sleep(0)
    first.cancel()
    while generation.waiters > 1:
        await asyncio.sleep(0)
    rig.stub.hold.set()
    status, _ = await second
    assert status == 200
    assert len(rig.stub.bodies) == len(rig.records("call")) == session.state()["turns"] == 1


async def test_500_then_200_is_one_call(rig: Rig) -> None:
    rig.stub.answers(500, {"error": {"message": "boom"}})
    rig.stub.answers(503, {"detail": "starting"})
    rig.stub.answers(200, {"choices": []})
    session = rig.session()
    status, _ = await rig.ask(chat("hi"))
    assert status == 200
    assert (len(rig.stub.bodies), len(rig.records("call")), session.state()["turns"]) == (4, 1, 1)


async def test_policy_server_that_restarts_is_waited_for(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.session()
    port = int(rig.stub.url.rsplit(":", 1)[1])
    await rig.stub.stop()
    task = asyncio.create_task(rig.ask(chat("hi")))
    again = StubUpstream()
    while "asking again" not in caplog.text:
        await asyncio.sleep(0)
    await again.start(port)
    try:
        status, raw = await task
    finally:
        await again.stop()
    assert (status, json.loads(raw)["choices"][0]["message"]["content"]) == (200, "ok 1")


async def test_dead_engine_is_policy_failed_and_then_final(rig: Rig) -> None:
    dead = recorded("engine_dead")

    async def reply(_: Json) -> object:
        from aiohttp import web

        return web.json_response(dead["body"], status=dead["status"])

    rig.stub.script.extend([reply] * 50)  # type: ignore[list-item]
    session = rig.session(deadline_seconds=2.0)
    status, raw = await rig.ask(chat("hi"))
    assert (status, error_code(raw)) == (503, "policy_failed")
    assert "EngineCore encountered an issue" in (session.policy_failed or "")
    assert len(rig.stub.bodies) >= 2
    asked = len(rig.stub.bodies)
    # 404: harnesses do not retry it, and the policy server is not asked again.
    status, raw = await rig.ask(chat("hi"))
    assert (status, error_code(raw), len(rig.stub.bodies)) == (404, "policy_failed", asked)
    assert rig.records("call") == []


async def test_closing_while_the_policy_server_is_down_is_policy_failed(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """A harness killed at its time limit while its call found no server is no agent that was too slow."""
    session = rig.session()
    await rig.stub.stop()
    task = asyncio.create_task(rig.ask(chat("hi")))
    while "asking again" not in caplog.text:
        await asyncio.sleep(0)
    await session.close(harness_exited=False)
    assert (await task)[0] == 409
    assert "the policy server was failing at the end: Cannot connect" in (session.policy_failed or "")
    assert rig.records("close")[0]["policy_failed"] == session.policy_failed


async def test_a_killed_harness_hangs_up_before_its_session_is_closed(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    session = rig.session()
    await rig.stub.stop()
    task = asyncio.create_task(rig.ask(chat("hi")))
    while "asking again" not in caplog.text:
        await asyncio.sleep(0)
    task.cancel()
    while session._running:
        await asyncio.sleep(0)
    await session.close(harness_exited=False)
    assert "the policy server was failing at the end: Cannot connect" in (session.policy_failed or "")


@pytest.mark.parametrize("hang_up", [True, False])
async def test_silence_to_everybody_is_policy_failed(rig: Rig, hang_up: bool) -> None:
    rig.stub.hold = asyncio.Event()
    session = rig.session()
    session.upstream.patience, session.upstream.probe_seconds = 0.1, 0.1
    task = asyncio.create_task(rig.ask(chat("hi")))
    await rig.stub.arrived.get()
    (wait,) = session._waits.values()
    wait.begun -= 0.2
    if hang_up:
        task.cancel()
        await rig.stub.aborted.get()
        while session._running:
            await asyncio.sleep(0)
    await session.close(harness_exited=False)
    await asyncio.gather(task, return_exceptions=True)
    assert "for 0 s: it did not sample one token in 0.1 s" in (session.policy_failed or "")
    assert rig.stub.bodies[-1]["max_tokens"] == 1


async def test_a_slow_answer_is_no_failure(rig: Rig) -> None:
    async def slow(_: Json) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    rig.stub.script.append(slow)
    session = rig.session()
    session.upstream.patience, session.upstream.probe_seconds = 0.1, 30.0
    task = asyncio.create_task(rig.ask(chat("hi")))
    await rig.stub.arrived.get()
    (wait,) = session._waits.values()
    wait.begun -= 0.2
    await session.close(harness_exited=False)
    await task
    assert session.policy_failed is None and len(rig.stub.bodies) == 2
    # Whoever was answered meanwhile has shown that the server works: nobody asks it for more.
    other = rig.session("e2")
    rig.stub.script.append(slow)
    task = asyncio.create_task(rig.ask(chat("hi"), episode_id="e2"))
    while not other._waits:
        await asyncio.sleep(0)
    (wait,) = other._waits.values()
    wait.begun -= 0.2
    other.upstream.patience, other.upstream.replicas[0].answered = 0.1, time.monotonic()
    await other.close(harness_exited=False)
    await task
    assert other.policy_failed is None and len(rig.stub.bodies) == 3


@pytest.mark.parametrize(("exited", "failed"), [(False, True), (True, False)])
async def test_time_lost_to_an_outage_is_not_the_agents(rig: Rig, exited: bool, failed: bool) -> None:
    rig.stub.answers(500, {"error": {"message": "boom"}})
    session = rig.session()
    session.upstream.patience = 0.05  # less than the first back-off
    assert (await rig.ask(chat("hi")))[0] == 200
    await session.close(harness_exited=exited)
    assert ("the policy server was failing for" in (session.policy_failed or "")) == failed


async def test_trouble_that_passed_is_no_failure(rig: Rig) -> None:
    rig.stub.answers(500, {"error": {"message": "boom"}})
    session = rig.session()
    assert (await rig.ask(chat("hi")))[0] == 200
    await session.close(harness_exited=False)
    assert session.policy_failed is None


async def test_silent_policy_server_is_given_up_at_the_deadline(rig: Rig) -> None:
    rig.stub.hold = asyncio.Event()
    session = rig.session(deadline_seconds=0.2)
    status, _ = await rig.ask(chat("hi"))
    assert status == 503
    assert session.policy_failed is not None
    await rig.stub.aborted.get()


async def test_wrong_upstream_key_fails_at_once(rig: Rig) -> None:
    rig.stub.answers(401, {"error": "Unauthorized"})
    session = rig.session()
    status, _ = await rig.ask(chat("hi"))
    assert status == 503
    assert "answered 401: Unauthorized" in (session.policy_failed or "")
    assert len(rig.stub.bodies) == 1


@pytest.mark.parametrize("name", ["overflow", "full_window"])
@pytest.mark.parametrize("stream", [False, True])
async def test_context_overflow_is_what_makes_harnesses_compact(rig: Rig, name: str, stream: bool) -> None:
    vllm = recorded(name)
    rig.stub.answers(vllm["status"], vllm["body"])
    session = rig.session()
    status, raw = await rig.ask(chat("x", stream=stream))
    error = json.loads(raw)["error"]
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert "This model's maximum context length is 512 tokens" in error["message"]
    assert session.policy_failed is None and not session.budget_exhausted
    assert (rig.records("call"), len(rig.records("failure"))) == ([], 1)


async def test_other_refusals_keep_their_status(rig: Rig) -> None:
    rig.stub.answers(422, {"error": {"message": "messages: odd"}})
    rig.session()
    status, raw = await rig.ask(chat("hi"))
    assert (status, json.loads(raw)["error"]["message"]) == (422, "messages: odd")


async def test_hanging_up_aborts_the_generation_and_is_no_turn(rig: Rig) -> None:
    rig.stub.hold = asyncio.Event()
    session = rig.session(turns=1)
    await rig.hang_up(chat("hi"))
    await rig.stub.aborted.get()
    assert (session.state()["turns"], session.state()["calls"], rig.records("call")) == (0, 0, [])
    rig.stub.hold.set()
    status, _ = await rig.ask(chat("again"))
    assert status == 200


async def test_hanging_up_a_stream_that_has_begun_aborts_too(rig: Rig) -> None:
    rig.stub.hold = asyncio.Event()
    rig.gate.status_seconds = 0.01
    session = rig.session()
    headers = {"x-api-key": session.config.secret}
    async with rig.harness.post(rig.url(), json=chat("hi", stream=True), headers=headers) as r:
        assert await r.content.readline() == b": keep-alive\n"
        r.close()
    await rig.stub.aborted.get()
    assert session.state()["turns"] == 0


async def test_answer_that_was_not_read_whole_is_not_sent(rig: Rig) -> None:
    """The client takes the first bytes and hangs up; the rest fitted the proxy's buffer, not the kernel's."""
    session = rig.session(turns=1)
    _, writer = await slow_reader(rig, "y" * 60_000)
    assert session.open == {0}, "the answer is on its way"
    writer.transport.abort()
    while session.open:
        await asyncio.sleep(0)
    assert (session.state()["calls"], session.state()["turns"]) == (1, 0)
    assert [(r["delivery"], r["reason"]) for r in rig.rows()] == [("generated", "unconfirmed")]
    # The answer is kept: a resend fetches it.
    status, again = await rig.ask(chat("hi"), RESENT)
    assert (status, len(again) > 60_000, session.state()["turns"], len(rig.stub.bodies)) == (200, True, 1, 1)


async def slow_reader(rig: Rig, text: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A harness that has the first line of an answer larger than the buffers between it and the proxy."""
    body = completion(chat("hi"), "x")
    body["choices"][0]["message"]["content"] = text
    rig.stub.answers(200, body)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    listener.setblocking(False)
    await rig.gate.listen(listener)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(listener.getsockname())
    reader, writer = await asyncio.open_connection(sock=client, limit=1024)
    data = json.dumps(chat("hi")).encode()
    head = f"POST /s/e1/v1/chat/completions HTTP/1.1\r\nHost: x\r\nx-api-key: {SECRET}\r\nConnection: close\r\n"
    writer.write(head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    return reader, writer


@pytest.mark.parametrize("reads", [True, False])
async def test_an_answer_on_its_way_when_the_session_closes(rig: Rig, reads: bool) -> None:
    """It counts if the client takes it whole; one that hangs up does not hold up the end."""
    session = rig.session()
    reader, writer = await slow_reader(rig, "y" * 200_000)
    closing = asyncio.create_task(session.close(harness_exited=True))
    while not session.closed:
        await asyncio.sleep(0)
    assert (await rig.ask(chat("more")))[0] == 409
    if reads:
        assert len(await reader.read(-1)) > 200_000
    else:
        writer.transport.abort()
    await closing
    writer.close()
    assert [(r["delivery"], r["trainable"]) for r in rig.rows()] == [("confirmed" if reads else "generated", reads)]
    assert [r["record"] for r in rig.records("close")] == ["close"]


async def test_closing_aborts_and_seals(rig: Rig) -> None:
    rig.stub.hold = asyncio.Event()
    session = rig.session()
    task = asyncio.create_task(rig.ask(chat("hi")))
    await rig.stub.arrived.get()
    await session.close(harness_exited=False)
    status, raw = await task
    assert (status, error_code(raw)) == (409, "session_closed")
    await rig.stub.aborted.get()
    rig.stub.hold.set()
    status, raw = await rig.ask(chat("late"))
    assert (status, error_code(raw)) == (409, "session_closed")
    kinds = [r["record"] for r in json.loads(session.summary())["records"]]
    assert kinds == ["open", "close"]
    assert len(rig.stub.bodies) == 1


async def test_answer_that_ignores_the_abort_is_not_recorded(rig: Rig) -> None:
    """The upstream answers in the moment the session is sealed: the answer is there, the record is not."""
    session = rig.session()

    async def seal_then_answer(body: Json) -> object:
        from aiohttp import web

        session.closed = True
        return web.json_response(completion(body, "late"))

    rig.stub.script.append(seal_then_answer)  # type: ignore[arg-type]
    status, raw = await rig.ask(chat("hi"))
    assert (status, error_code(raw)) == (409, "session_closed")
    assert (rig.records("call"), rig.records("delivery")) == ([], [])


# pi 0.73.1 retries an error whose text matches (agent-session.js), whatever its status.
PI_RETRIES = re.compile(
    "overloaded|provider.?returned.?error|rate.?limit|too many requests|429|500|502|503|504|service.?unavailable|"
    "server.?error|internal.?error|network.?error|connection.?error|connection.?refused|connection.?lost|"
    "websocket.?closed|websocket.?error|other side closed|fetch failed|upstream.?connect|reset before headers|"
    "socket hang up|ended without|http2 request did not get a response|timed? out|timeout|terminated|retry delay",
    re.IGNORECASE,
)


@pytest.mark.parametrize("limits", [{"turns": 500}, {"tokens": 429}, {"policy_failed": "status 503: timeout"}])
async def test_final_refusals_are_retried_by_no_harness(rig: Rig, limits: Json) -> None:
    failed = limits.pop("policy_failed", None)
    session = rig.session(**limits)
    session.sent, session.response_tokens, session.policy_failed = set(range(500)), 429, failed
    headers = {"x-api-key": session.config.secret}
    async with rig.harness.post(rig.url(), json=chat("hi"), headers=headers) as r:
        # mini-swe-agent gives up on 404 only; OpenAI's and Anthropic's clients obey the header.
        assert (r.status, r.headers["x-should-retry"]) == (404, "false")
        assert not PI_RETRIES.search(await r.text())


async def test_turn_budget(rig: Rig) -> None:
    session = rig.session(turns=2)
    assert [(await rig.ask(chat(str(i))))[0] for i in range(2)] == [200, 200]
    assert not session.budget_exhausted
    status, raw = await rig.ask(chat("2"))
    assert (status, error_code(raw)) == (404, "budget_exhausted")
    assert session.budget_exhausted and len(rig.stub.bodies) == 2


async def test_turn_budget_holds_for_calls_in_flight(rig: Rig) -> None:
    rig.stub.hold = asyncio.Event()
    rig.session(turns=2)
    tasks = [asyncio.create_task(rig.ask(chat(str(i)))) for i in range(6)]
    for _ in range(2):
        await rig.stub.arrived.get()
    refused = 0
    while refused < 4:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        refused += len(done)
        tasks = [t for t in tasks if t not in done]
    rig.stub.hold.set()
    assert [(await t)[0] for t in tasks] == [200, 200]
    assert len(rig.stub.bodies) == 2


async def test_token_budget_clamps_then_refuses(rig: Rig) -> None:
    rig.stub.says("12345", "1234", finish="length")  # 6 and 5 sampled tokens with the end token
    session = rig.session(tokens=11)
    await rig.ask(chat("a"))
    assert not session.budget_exhausted
    await rig.ask(chat("b"))
    assert [b["max_tokens"] for b in rig.stub.bodies] == [11, 5]
    assert session.budget_exhausted, "the budget cut this answer off"
    status, raw = await rig.ask(chat("c"))
    assert (status, error_code(raw)) == (404, "budget_exhausted")
    assert session.state()["response_tokens"] == 11


async def test_token_budget_holds_for_calls_at_once(rig: Rig) -> None:
    async def all_of_it(body: Json) -> web.StreamResponse:
        # The end token is sampled too.
        return web.json_response(completion(body, "x" * (body["max_tokens"] - 1), "length"))

    rig.stub.script.extend([all_of_it] * 20)
    rig.stub.hold = asyncio.Event()
    session = rig.session(tokens=50, sampling=SAMPLING | {"max_tokens": 15})
    tasks = [asyncio.create_task(rig.ask(chat(f"q{i}"))) for i in range(20)]
    for _ in range(4):
        await rig.stub.arrived.get()
    refused = 0
    while refused < 16:
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        refused += len(done)
        assert {(status, error_code(raw)) for status, raw in (t.result() for t in done)} == {(404, "budget_exhausted")}
        tasks = list(pending)
    assert not session.budget_exhausted, "nothing was sampled yet"
    rig.stub.hold.set()
    assert [(await t)[0] for t in tasks] == [200] * 4
    assert sorted(b["max_tokens"] for b in rig.stub.bodies) == [5, 15, 15, 15]
    assert (session.state()["response_tokens"], session.budget_exhausted) == (50, True)


async def test_what_a_call_did_not_sample_or_never_began_is_free_again(rig: Rig) -> None:
    session = rig.session(tokens=20)
    rig.stub.hold = asyncio.Event()
    await rig.hang_up(chat("a"))
    await rig.stub.aborted.get()
    rig.stub.hold = None
    generation = session.generation(Request("chat", "m", [], None, {}, None, False, False, None, 0, "sha"))
    generation.task.cancel()
    await asyncio.gather(generation.task, return_exceptions=True)
    for text in ("b", "c", "d"):
        assert (await rig.ask(chat(text)))[0] == 200
    # "ok N" and the end token are five.
    assert [b["max_tokens"] for b in rig.stub.bodies] == [20, 20, 15, 10]


async def test_late_stream_keeps_alive_then_answers(rig: Rig) -> None:
    rig.stub.hold = asyncio.Event()
    rig.gate.status_seconds = 0.01
    session = rig.session()
    headers = {"x-api-key": session.config.secret}
    async with rig.harness.post(rig.url(), json=chat("hi", stream=True), headers=headers) as r:
        assert r.status == 200
        assert await r.content.readline() == b": keep-alive\n"
        rig.stub.hold.set()
        raw = await r.read()
    assert assemble(raw.lstrip())["message"] == {"role": "assistant", "content": "ok 1"}
    assert session.state()["turns"] == 1


async def test_late_stream_tells_errors_as_events(rig: Rig) -> None:
    rig.stub.hold = asyncio.Event()
    rig.gate.status_seconds = 0.01
    overflow = recorded("overflow")
    rig.stub.answers(overflow["status"], overflow["body"])
    session = rig.session()
    headers = {"x-api-key": session.config.secret}
    async with rig.harness.post(rig.url(), json=chat("hi", stream=True), headers=headers) as r:
        assert r.status == 200
        await r.content.readline()
        rig.stub.hold.set()
        last = (await r.read()).decode().strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "context_length_exceeded"
    assert session.state()["turns"] == 0


async def test_upstream_without_token_ids_is_recorded_and_not_trainable(rig: Rig) -> None:
    body = recorded("plain")["body"]
    foreign = {k: v for k, v in body.items() if k != "prompt_token_ids"}
    foreign["choices"] = [{k: v for k, v in body["choices"][0].items() if k not in ("token_ids", "logprobs")}]
    rig.stub.answers(200, foreign)
    session = rig.session()
    assert (await rig.ask(chat("hi")))[0] == 200
    await session.close(harness_exited=True)
    (row,) = rig.rows()
    assert (row["trainable"], row["reason"], row["prompt_tokens"]) == (
        False,
        "no_token_ids",
        body["usage"]["prompt_tokens"],
    )
    assert session.state()["response_tokens"] == body["usage"]["completion_tokens"]
