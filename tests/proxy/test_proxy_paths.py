"""What is served below a session, and how each dialect is refused, kept alive and failed over HTTP."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web
from dialect_rig import Json, events, read_messages, read_responses
from proxy_rig import SECRET, Rig, assemble
from proxy_stub import completion, recorded

from openforge.proxy import server

PATHS = ["chat/completions", "responses", "messages"]
RESENT = {"x-stainless-retry-count": "1"}
PROMPT = b"user\nhi"


def body(path: str, *turns: str, **more: Any) -> Json:
    """The same conversation in each dialect."""
    roles = ("user", "assistant")
    said = [{"role": roles[i % 2], "content": t} for i, t in enumerate(turns or ("hi",))]
    return {"model": "m", "input" if path == "responses" else "messages": said, "max_tokens": 50, **more}


def error(path: str, raw: bytes) -> tuple[str, str]:
    """Type (Anthropic) or code (OpenAI) of an error body, and its sentence; asserts the body's shape."""
    found = json.loads(raw)
    if path.startswith("messages"):
        assert found.keys() == {"type", "error"} and found["type"] == "error"
        assert found["error"].keys() == {"type", "message"}
        return found["error"]["type"], found["error"]["message"]
    assert found.keys() == {"error"} and found["error"].keys() == {"message", "type", "param", "code"}
    return found["error"]["code"], found["error"]["message"]


def text(path: str, raw: bytes, streamed: bool) -> str:
    """What an answer says."""
    if path == "responses":
        whole = read_responses(raw) if streamed else json.loads(raw)
        return str(whole["output"][0]["content"][0]["text"])
    if path == "messages":
        return str((read_messages(raw) if streamed else json.loads(raw))["content"][0]["text"])
    return str((assemble(raw) if streamed else json.loads(raw)["choices"][0])["message"]["content"])


# ---- answers -----------------------------------------------------------------------------------
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("streamed", [False, True])
async def test_each_dialect_is_one_recorded_call(rig: Rig, path: str, streamed: bool) -> None:
    rig.stub.says("all is well")
    rig.session()
    status, raw = await rig.ask(body(path, stream=streamed), path=path)
    assert (status, text(path, raw, streamed)) == (200, "all is well")
    (record,) = rig.records("call")
    assert record["dialect"] == path.partition("/")[0]
    assert record["messages"] == rig.stub.bodies[0]["messages"] == [{"role": "user", "content": "hi"}]
    assert list(record["prompt_token_ids"]) == [256, *PROMPT, 257, 256, *b"assistant\n"]
    assert rig.stub.paths == ["/v1/chat/completions"]


@pytest.mark.parametrize("path", PATHS)
async def test_dialects_of_one_conversation_are_one_thread(rig: Rig, path: str) -> None:
    """What differs in the dialect only is the same prompt: a conversation that one begins, the other goes on."""
    rig.stub.says("a", "b")
    session = rig.session()
    await rig.ask(body("chat/completions", "hi"))
    await rig.ask(body(path, "hi", "a", "on"), path=path)
    await session.close(harness_exited=True)
    assert [(r["thread"], r["parent"], r["reason"]) for r in rig.rows()] == [(0, None, None), (0, 0, None)]


async def test_calls_that_differ_in_claudes_billing_line_merge(rig: Rig) -> None:
    """Fault 6: the line changes with every call, and cache marks move."""
    rig.stub.says("a", "b")
    session = rig.session()
    mark = {"cache_control": {"type": "ephemeral"}}
    for turns, cch in ((("hi",), "1f"), (("hi", "a", "on"), "2e")):
        asked = body("messages", *turns)
        asked["messages"][-1]["content"] = [{"type": "text", "text": turns[-1], **mark}]
        line = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={cch};"}
        await rig.ask(
            asked | {"system": [line, {"type": "text", "text": "You are.", **mark}]}, path="messages?beta=true"
        )
    await session.close(harness_exited=True)
    first, second = rig.rows()
    assert (second["thread"], second["parent"], second["prefix_len"]) == (0, 0, first["prompt_tokens"] + 2)
    assert first["system_sha256"] == second["system_sha256"]
    assert b"cch" not in rig.journal.path.read_bytes()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_resend_is_the_same_call(rig: Rig, path: str, streamed: bool) -> None:
    """Fault 18: with the client's own count of resends; the same body without it is a call of its own."""
    session = rig.session()
    asked = body(path, stream=streamed)
    first = await rig.ask(asked, path=path)
    assert await rig.ask(asked, RESENT, path=path) == first
    assert (len(rig.records("call")), session.state()["turns"]) == (1, 1)
    assert (await rig.ask(asked, path=path))[1] != first[1]
    assert (len(rig.records("call")), session.state()["turns"]) == (2, 2)


@pytest.mark.parametrize("path", PATHS)
async def test_who_hangs_up_had_no_turn(rig: Rig, path: str) -> None:
    """Fault 19: the generation is aborted, and an answer to nobody is none."""
    rig.stub.hold = asyncio.Event()
    session = rig.session()
    task = asyncio.create_task(rig.ask(body(path, stream=True), path=path))
    await rig.stub.arrived.get()
    task.cancel()
    await rig.stub.aborted.get()
    await session.close(harness_exited=True)
    assert (session.state()["calls"], session.state()["turns"], rig.rows()) == (0, 0, [])


@pytest.mark.parametrize("path", PATHS)
async def test_half_a_character_is_shown_as_unknown(rig: Rig, path: str) -> None:
    """What a harness cut by UTF-16 units has no UTF-8: a tokenizer refuses it, and it stays in the history."""
    rig.session()
    good = "한국어 \U0001f600 \u00fc"
    for sent in (f"{good} \ud83d!", good):
        asked = json.dumps(body(path, sent, stop=["\udc00"])).encode()
        assert (await rig.ask(asked, path=path))[0] == 200
    raw = json.dumps(body(path, "x-x"), ensure_ascii=False).encode().replace(b"x-x", b"\xed\xa0\x80")
    assert (await rig.ask(raw, path=path))[0] == 200
    shown = [b["messages"][0]["content"] for b in rig.stub.bodies]
    assert shown == [f"{good} \ufffd!", good, "\ufffd"]


# ---- refusals ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("chat/completions", "max_tokens"),
        ("chat/completions", "max_completion_tokens"),
        ("messages", "max_tokens"),
        ("responses", "max_output_tokens"),
    ],
)
async def test_an_answer_of_no_tokens_is_refused(rig: Rig, path: str, key: str) -> None:
    rig.session()
    status, raw = await rig.ask(body(path, **{key: 0}), path=path)
    assert (status, error(path, raw)[1]) == (400, f"{key} is 0; it must be a whole number, 1 or more")
    assert rig.stub.bodies == []


@pytest.mark.parametrize("path", [*PATHS, "messages/count_tokens"])
async def test_refusals_have_the_dialects_shape(rig: Rig, path: str) -> None:
    anthropic = path.startswith("messages")
    session = rig.session(turns=1)

    async def refused(given: Json | bytes, status: int, kind: str, code: str, **where: Any) -> str:
        got, raw = await rig.ask(given, path=path, **where)
        told, sentence = error(path, raw)
        assert (got, told) == (status, kind if anthropic else code)
        return sentence

    await refused(body(path), 401, "authentication_error", "invalid_api_key", headers={"authorization": "Bearer no"})
    await refused(body(path), 404, "not_found_error", "session_not_found", episode_id="e9")
    await refused(b"{", 400, "invalid_request_error", "invalid_request")
    await refused(b'{"a":' * 990 + b"1" + b"}" * 990, 400, "invalid_request_error", "invalid_request")
    vllm = recorded("overflow")
    rig.stub.answers(vllm["status"], vllm["body"])
    told = await refused(body(path), 400, "invalid_request_error", "context_length_exceeded")
    assert ("prompt is too long: 513 tokens > 512 maximum" if anthropic else "maximum context length is 512") in told
    if path in PATHS:
        assert (await rig.ask(body(path), path=path))[0] == 200
        await refused(body(path), 404, "not_found_error", "budget_exhausted")
    await session.close(harness_exited=True)
    await refused(body(path), 409, "invalid_request_error", "session_closed")


@pytest.mark.parametrize("path", PATHS)
async def test_what_cannot_be_written_is_refused(rig: Rig, path: str) -> None:
    """A schema nested so deeply that the proxy could read but not write it."""
    rig.session()
    schema: Json = {}
    for _ in range(970):
        schema = {"a": schema}
    tools = {
        "chat/completions": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
        "responses": [{"type": "function", "name": "f", "parameters": schema}],
        "messages": [{"name": "f", "input_schema": schema}],
    }
    raw = b'{"tools": %b, %b' % (_deep(tools[path]).encode(), json.dumps(body(path)).encode()[1:])
    status, told = await rig.ask(raw, path=path)
    assert (status, rig.stub.bodies) == (400, [])
    assert "nested too deeply" in error(path, told)[1]


def _deep(value: Any) -> str:
    """JSON of what the json module would not write."""
    if isinstance(value, list):
        return f"[{','.join(map(_deep, value))}]"
    if not isinstance(value, dict):
        return json.dumps(value)
    front, level = "", value
    while list(level) == ["a"]:
        front, level = front + '{"a":', level["a"]
    inner = ",".join(f"{json.dumps(k)}:{_deep(v)}" for k, v in level.items())
    return f"{front}{{{inner}}}{'}' * (len(front) // 5)}"


@pytest.mark.parametrize("path", PATHS)
async def test_a_body_over_the_limit(rig: Rig, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "BODY_MOST", 1000)
    rig.session()
    status, raw = await rig.ask(body(path, "x" * 2000), path=path)
    assert (status, error(path, raw)[0]) == (413, "request_too_large")
    assert rig.stub.bodies == []


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "nonsense"])
async def test_a_body_that_is_not_in_the_encoding_it_names(rig: Rig, path: str, encoding: str) -> None:
    rig.session()
    async with rig.harness.post(
        rig.url(path), data=b"\x00garbage", headers={"x-api-key": SECRET, "content-encoding": encoding}
    ) as r:
        assert r.status == 400
    assert (await rig.ask(body(path), path=path))[0] == 200


# ---- streams -----------------------------------------------------------------------------------
@pytest.mark.parametrize("path", PATHS)
async def test_a_late_stream_is_kept_alive_and_answered(rig: Rig, path: str) -> None:
    rig.stub.hold = asyncio.Event()
    rig.gate.status_seconds = 0.01
    session = rig.session()
    async with rig.harness.post(rig.url(path), json=body(path, stream=True), headers={"x-api-key": SECRET}) as r:
        first = await r.content.readline()
        rig.stub.hold.set()
        raw = first + await r.read()
    begun = {
        "chat/completions": b": keep-alive\n",
        "responses": b"event: response.created\n",
        "messages": b"event: ping\n",
    }
    assert first == begun[path]
    if path == "responses":
        assert text(path, raw, True) == "ok 1"
        assert len({e["response"]["id"] for e in events(raw) if "response" in e}) == 1
    else:
        kept = b": keep-alive\n\n" if path != "messages" else b'event: ping\ndata: {"type":"ping"}\n\n'
        while raw.startswith(kept):
            raw = raw.removeprefix(kept)
        assert text(path, raw, True) == "ok 1"
    assert session.state()["turns"] == 1


@pytest.mark.parametrize("path", PATHS)
async def test_an_error_in_a_stream_is_the_dialects_event(rig: Rig, path: str) -> None:
    rig.stub.hold = asyncio.Event()
    rig.gate.status_seconds = 0.01
    rig.stub.answers(401, {"error": "Unauthorized"})
    session = rig.session()
    async with rig.harness.post(rig.url(path), json=body(path, stream=True), headers={"x-api-key": SECRET}) as r:
        await r.content.readline()
        rig.stub.hold.set()
        raw = await r.read()
    last = raw.decode().removesuffix("\n\n").split("\n\n")[-1]
    if path == "responses":
        name, data = last.split("\n")
        failed = json.loads(data.removeprefix("data: "))
        assert (name, failed["response"]["status"]) == ("event: response.failed", "failed")
        assert failed["response"]["error"]["code"] == "server_error"
    elif path == "messages":
        name, data = last.split("\n")
        assert (name, error(path, data.removeprefix("data: ").encode())[0]) == ("event: error", "api_error")
    else:
        assert error(path, last.strip().removeprefix("data: ").encode())[0] == "policy_failed"
    assert session.state()["turns"] == 0


# ---- several choices ---------------------------------------------------------------------------
@pytest.mark.parametrize("streamed", [False, True])
async def test_every_choice_is_a_call_with_a_seed_of_its_own(rig: Rig, streamed: bool) -> None:
    session = rig.session(seed=7)
    asked = body("chat/completions", n=3, stream=streamed, stream_options={"include_usage": True})
    status, raw = await rig.ask(asked)
    assert status == 200
    said = {r["call"]: r["response"]["content"] for r in rig.records("call")}
    if streamed:
        texts = {i: "" for i in range(3)}
        chunks = [json.loads(e[6:]) for e in raw.decode().split("\n\n")[:-2]]
        for chunk in chunks:
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["delta"].get("content") or ""
        usage = chunks[-1]["usage"]
    else:
        whole = json.loads(raw)
        texts = {c["index"]: c["message"]["content"] for c in whole["choices"]}
        usage = whole["usage"]
    assert texts == said and len(set(said.values())) == 3
    assert len({b["seed"] for b in rig.stub.bodies}) == 3
    # "ok N" and the stop token: four letters and one.
    prompt = len(PROMPT) + 3 + len(b"assistant\n")
    assert usage == {"prompt_tokens": prompt, "completion_tokens": 15, "total_tokens": prompt + 15}
    assert session.state()["turns"] == 3
    # A resend of the request finds all three.
    assert await rig.ask(asked, RESENT) == (status, raw)
    assert len(rig.stub.bodies) == 3
    await session.close(harness_exited=True)
    assert [r["reason"] for r in rig.rows()] == [None] * 3


async def test_one_choice_that_fails_refuses_all_and_stops_the_rest(rig: Rig) -> None:
    async def never(_: Json) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    rig.stub.script.append(never)
    rig.stub.answers(422, {"error": {"message": "odd"}})
    session = rig.session()
    status, raw = await rig.ask(body("chat/completions", n=2))
    assert (status, error("chat", raw)[1]) == (422, "odd")
    await rig.stub.aborted.get()
    assert (session.state()["calls"], session.open) == (0, set())


async def test_choices_beyond_the_budget_are_refused_together(rig: Rig) -> None:
    rig.stub.hold = asyncio.Event()
    session = rig.session(turns=2)
    status, raw = await rig.ask(body("chat/completions", n=3))
    assert (status, error("chat", raw)[0]) == (404, "budget_exhausted")
    assert (session.state()["turns"], session.open) == (0, set())


# ---- what is beside the answers ----------------------------------------------------------------
@pytest.mark.parametrize("path", ["", "/", "/api/hello"])
@pytest.mark.parametrize("method", ["HEAD", "GET"])
async def test_who_looks_whether_anybody_is_there_is_answered(rig: Rig, path: str, method: str) -> None:
    rig.session()
    root = f"http://127.0.0.1:{rig.port}/s"
    async with rig.harness.request(method, f"{root}/e1{path}") as r:
        assert (r.status, await r.read()) == (200, b"")
    async with rig.harness.request(method, f"{root}/e2{path}") as r:
        assert r.status == 404
    assert rig.stub.paths == []


@pytest.mark.parametrize(
    "line",
    [
        b"OPTIONS * HTTP/1.1",
        b"GET /s HTTP/1.1",
        b"POST /s/ HTTP/1.1",
        b"GET /s/e1/v1 HTTP/1.1",
        b"GET /s/e1//api/hello HTTP/1.1",
        b"GET /s/%ff%fe/v1/models HTTP/1.1",
        b"POST http://elsewhere/v1/messages HTTP/1.1",
        b"GET //s/e1/ HTTP/1.1",
    ],
)
async def test_odd_targets_are_not_served(rig: Rig, line: bytes) -> None:
    rig.session()
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
    writer.write(line + b"\r\nHost: x\r\nx-api-key: " + SECRET.encode() + b"\r\nConnection: close\r\n\r\n")
    raw = await reader.read()
    writer.close()
    assert raw.startswith(b"HTTP/1.1 404 ")
    assert error("chat", raw.partition(b"\r\n\r\n")[2])[0] in ("not_found", "session_not_found")
    assert rig.stub.paths == []


async def test_models_in_each_clients_shape(rig: Rig) -> None:
    rig.session()
    key = {"x-api-key": SECRET}

    async def got(path: str, headers: Json) -> Json:
        async with rig.harness.get(rig.url(path), headers=headers) as r:
            assert r.status == 200
            found: Json = await r.json()
            return found

    anthropic = key | {"anthropic-version": "2023-06-01"}
    listed = await got("models", anthropic)
    model = {"type": "model", "id": "policy", "display_name": "policy", "created_at": "1970-01-01T00:00:00Z"}
    assert listed == {"data": [model], "has_more": False, "first_id": "policy", "last_id": "policy"}
    assert await got("models/claude-x", anthropic) == model | {"id": "claude-x", "display_name": "claude-x"}
    alone = await got("models/org/name", key)
    assert (alone["id"], alone["object"], alone["max_model_len"]) == ("org/name", "model", 512)
    async with rig.harness.get(rig.url("models")) as r:
        assert r.status == 401
    async with rig.harness.post(rig.url("models"), headers=anthropic) as r:
        assert (r.status, error("messages", await r.read())[0]) == (404, "not_found_error")


async def test_tokens_are_counted_by_the_policy_server(rig: Rig) -> None:
    session = rig.session(turns=1)
    asked = body("messages") | {"tools": [{"name": "f", "input_schema": {}}]}
    status, raw = await rig.ask(asked, path="messages/count_tokens?beta=true")
    assert (status, json.loads(raw)) == (200, {"input_tokens": len(PROMPT) + 3 + len(b"assistant\n")})
    (sent,) = rig.stub.bodies
    assert (sent["max_tokens"], [t["function"]["name"] for t in sent["tools"]]) == (1, ["f"])
    # It is no call: nobody is shown what was sampled.
    assert (rig.records("call"), session.state()["turns"]) == ([], 0)
    reply = completion(sent, "x")
    del reply["usage"]
    rig.stub.answers(200, reply)
    status, raw = await rig.ask(asked, path="messages/count_tokens")
    assert (status, error("messages", raw)[0]) == (503, "api_error")
    rig.stub.answers(401, {"error": "Unauthorized"})
    assert (await rig.ask(asked, path="messages/count_tokens"))[0] == 503
