"""The control side on the port: its key, what opens a session, and what is nobody else's."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from proxy_rig import SAMPLING, SECRET, chat
from proxy_stub import Json, StubUpstream

from openforge.proxy.client import start_proxy
from openforge.proxy.control import Control
from openforge.proxy.journal import read
from openforge.proxy.serving import Settings, serve

KEY = "control-key-of-some-length"
DEFAULTS = {"sampling": SAMPLING, "deadline_seconds": 60.0, "policy_version": "m@x", "context_window": 512}


@asynccontextmanager
async def served(stub: StubUpstream, journal: Path, **changed: Any) -> AsyncIterator[tuple[Control, str]]:
    """The proxy in this process; its control side and its URL."""
    up: asyncio.Future[tuple[Control, str]] = asyncio.get_running_loop().create_future()
    settings = Settings(
        **({"upstream": (stub.url,), "journal": journal, "port": 0, "control_key": KEY, "defaults": DEFAULTS} | changed)
    )
    task = asyncio.create_task(serve(settings, lambda c, _, port: up.set_result((c, f"http://127.0.0.1:{port}"))))
    await asyncio.wait({task, up}, return_when=asyncio.FIRST_COMPLETED)
    try:
        yield await up if up.done() else await task  # type: ignore[misc]
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Http:
    """A client of the port.

    Attributes:
        key: sent as Bearer; None for no key.
    """

    def __init__(self, base: str, session: aiohttp.ClientSession) -> None:
        self.base, self._session, self.key = base, session, KEY

    async def __call__(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        given = {"authorization": f"Bearer {self.key}"} if self.key is not None else {}
        async with self._session.request(method, self.base + path, data=data, headers=given | headers) as r:
            raw = await r.read()
            return r.status, json.loads(raw)

    async def ask(self, opened: Json, text: str) -> tuple[int, Any]:
        """A chat call with a session's own URL and key."""
        url, key = opened["base_url"], opened["api_key"]
        assert url.startswith(self.base)
        path = f"{url.removeprefix(self.base)}/v1/chat/completions"
        return await self("POST", path, chat(text), authorization=f"Bearer {key}")


@pytest.fixture
async def stub() -> AsyncIterator[StubUpstream]:
    made = StubUpstream()
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def http(stub: StubUpstream, tmp_path: Path) -> AsyncIterator[Http]:
    async with served(stub, tmp_path / "journal") as (_, base), aiohttp.ClientSession() as session:
        yield Http(base, session)


async def test_a_session_from_opening_to_close(http: Http, stub: StubUpstream, tmp_path: Path) -> None:
    status, opened = await http("POST", "/sessions", {"episode_id": "try"})
    assert (status, opened["base_url"], opened["closed"]) == (201, f"{http.base}/s/try", False)
    assert len(opened["api_key"]) >= 32
    status, answer = await http.ask(opened, "hi")
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "ok 1")
    assert (stub.bodies[0]["temperature"], stub.bodies[0]["max_tokens"]) == (0.7, 64)
    status, state = await http("GET", "/sessions/try")
    assert (status, state["calls"], state["turns"], "api_key" in state) == (200, 1, 1, False)
    assert await http("GET", "/sessions") == (200, [state])
    status, (row,) = await http("GET", "/sessions/try/calls")
    assert (row["prompt_suffix_ids"], row["response_token_ids"]) == (
        [256, *b"user\nhi", 257, 256, *b"assistant\n"],
        [*b"ok 1", 257],
    )
    assert (row["reason"], row["delivery"], row["policy_version"]) == ("unconfirmed", "sent", "m@x")
    status, closed = await http("POST", "/sessions/try/close", {"harness_exited": True})
    assert (status, closed["turns"], [r["record"] for r in closed["records"]]) == (
        200,
        1,
        ["open", "call", "delivery", "close"],
    )
    assert (await http("GET", "/sessions/try/calls"))[1][0]["trainable"] is True
    assert (await http.ask(opened, "late"))[0] == 409
    status, health = await http("GET", "/health")
    assert (health["open"], health["upstream"]) == (0, [{"url": f"{stub.url}/v1/chat/completions", "down": False}])
    assert opened["api_key"] not in "".join(p.read_text() for p in (tmp_path / "journal").iterdir())


async def test_what_is_not_given_is_drawn_and_what_is_given_holds(http: Http, stub: StubUpstream) -> None:
    (_, one), (_, two) = [await http("POST", "/sessions") for _ in range(2)]
    assert one["episode_id"] != two["episode_id"] and one["api_key"] != two["api_key"]
    sampling = {"temperature": 0.0, "max_tokens": 5}
    given = {"episode_id": "mine", "secret": "my-own-key", "sampling": sampling, "limits": {"turns": 1}, "model": "n"}
    _, opened = await http("POST", "/sessions", given)
    assert opened["api_key"] == "my-own-key"
    assert (await http.ask(opened, "hi"))[0] == 200
    sent = stub.bodies[0]
    assert (sent["temperature"], sent["top_p"], sent["max_tokens"], sent["model"]) == (0.0, 1.0, 5, "n")
    status, refused = await http.ask(opened, "again")
    assert (status, refused["error"]["code"]) == (404, "budget_exhausted")


REQUESTS = [
    ("GET", "/health"),
    ("GET", "/sessions"),
    ("POST", "/sessions"),
    ("GET", "/sessions/e1"),
    ("GET", "/sessions/e1/calls"),
    ("POST", "/sessions/e1/close"),
    ("GET", "/nothing"),
    ("GET", "/"),
]


@pytest.mark.parametrize(("method", "path"), REQUESTS)
async def test_nothing_is_told_or_done_without_the_key(http: Http, method: str, path: str) -> None:
    _, opened = await http("POST", "/sessions", {"episode_id": "e1"})
    right = http.key
    # A session's key is no control key, and a prefix of the right one is not the right one.
    for http.key in (None, "", "wrong", right[:-1], right + "x", opened["api_key"], "schlüssel"):
        status, told = await http(method, path)
        assert (status, list(told)) == (401, ["error"])
    http.key = right
    _, state = await http("GET", "/sessions/e1")
    assert state["closed"] is False and len((await http("GET", "/sessions"))[1]) == 1
    http.key = None
    assert (await http("GET", "/sessions", **{"x-api-key": right}))[0] == 200


async def test_an_agent_without_its_sessions_url_is_told_where_sessions_are(http: Http, stub: StubUpstream) -> None:
    http.key = None
    where = "a session is at /s/ID/v1 (the base URL of OpenAI's clients) and /s/ID (of Anthropic's)"
    for path in ("/v1/chat/completions", "/v1/responses", "/chat/completions"):
        status, told = await http("POST", path, chat("hi"))
        assert (status, told["error"]["code"]) == (404, "not_found")
        assert told["error"]["message"] == f"POST {path} is not served: {where}"
    status, told = await http("POST", "/v1/messages?beta=true", chat("hi"))
    assert (status, told["type"], told["error"]["type"]) == (404, "error", "not_found_error")
    assert told["error"]["message"] == f"POST /v1/messages is not served: {where}"
    assert (await http("GET", "/v1/models"))[0] == 404
    assert stub.bodies == []


async def test_nothing_of_one_episode_reaches_anothers(http: Http, stub: StubUpstream) -> None:
    (_, one), (_, two) = [await http("POST", "/sessions", {"episode_id": e}) for e in ("e1", "e2")]
    http.key = None
    tries = [
        one | {"api_key": two["api_key"]},
        one | {"api_key": KEY},
        one | {"api_key": ""},
        two | {"base_url": two["base_url"].replace("e2", "e3")},
        two | {"base_url": two["base_url"].replace("e2", "e2/../e1")},
        two | {"base_url": two["base_url"].replace("e2", "e2%2f..%2fe1")},
    ]
    statuses = [(await http.ask(t, "spy"))[0] for t in tries]
    assert statuses[:4] == [401, 401, 401, 404] and set(statuses[4:]) <= {401, 404}
    assert stub.bodies == []
    await http.ask(one, "secret of one")
    await http.ask(two, "two's own")
    http.key = KEY
    _, rows = await http("GET", "/sessions/e2/calls")
    assert "secret of one" not in json.dumps(rows) and len(rows) == 1


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"{", "the body is not JSON"),
        ([1], "the body must be a JSON object"),
        ({"episode": "x"}, "key 'episode' is unknown; a session is opened with episode_id, secret,"),
        ({"episode_id": "a/b"}, "key 'episode_id' is 'a/b'; it must be 1 to 200 letters"),
        ({"episode_id": ".."}, "key 'episode_id' is '..'"),
        ({"episode_id": ""}, "key 'episode_id' is ''"),
        ({"episode_id": 5}, "key 'episode_id' is 5"),
        ({"secret": "two words"}, "key 'secret' must be the harness's API key"),
        ({"secret": "schlüssel"}, "key 'secret' must be"),
        ({"sampling": []}, "key 'sampling' is []; it must be an object"),
        ({"sampling": {"temp": 1}}, "sampling.temp is unknown; fields are temperature, top_p"),
        ({"sampling": {"temperature": "hot"}}, 'sampling.temperature is "hot"; it must be a valid number'),
        ({"sampling": {"temperature": None}}, "sampling.temperature is null; it must be a valid number"),
        ({"sampling": {"temperature": -0.1}}, "sampling.temperature is -0.1; it must be greater than or equal to 0"),
        ({"sampling": {"top_k": 1.5}}, "sampling.top_k is 1.5; it must be a valid integer"),
        ({"sampling": {"top_k": -2}}, "sampling.top_k is -2; it must be greater than or equal to -1"),
        (b'{"sampling": {"top_p": NaN}}', "sampling.top_p is NaN; it must be"),
        ({"sampling": {"top_p": 0}}, "sampling.top_p is 0; it must be greater than 0"),
        ({"sampling": {"top_p": 1.1}}, "sampling.top_p is 1.1; it must be less than or equal to 1"),
        ({"sampling": {"min_p": 1.1}}, "sampling.min_p is 1.1; it must be less than or equal to 1"),
        ({"sampling": {"repetition_penalty": 0}}, "sampling.repetition_penalty is 0; it must be greater than 0"),
        ({"sampling": {"presence_penalty": 2.5}}, "sampling.presence_penalty is 2.5; it must be less than"),
        ({"sampling": {"frequency_penalty": -3}}, "sampling.frequency_penalty is -3; it must be greater than"),
        ({"sampling": {"max_tokens": 0}}, "sampling.max_tokens is 0; it must be greater than or equal to 1"),
        (b"[" * 100_000, "the body is nested too deeply"),
        ({"limits": {"turns": "5"}}, "limits.turns is '5'; limits are turns and tokens"),
        ({"limits": {"seconds": 5}}, "limits.seconds is 5"),
        ({"deadline_seconds": 0}, "key 'deadline_seconds' is 0"),
        ({"context_window": True}, "key 'context_window' is True"),
        ({"policy_version": None}, "key 'policy_version' is required to open a session: a text"),
        ({"seed": "x"}, "key 'seed' is 'x'; it must be a whole number"),
    ],
)
async def test_a_wrong_body_is_one_sentence(http: Http, body: Any, told: str) -> None:
    status, got = await http("POST", "/sessions", body)
    assert (status, got["error"][: len(told)]) == (400, told)
    assert "two words" not in got["error"]
    assert (await http("GET", "/sessions"))[1] == []


async def test_sampling_that_a_plain_endpoint_cannot_take_opens_nothing(stub: StubUpstream, tmp_path: Path) -> None:
    async with served(stub, tmp_path, api="openai") as (_, base), aiohttp.ClientSession() as session:
        http = Http(base, session)
        for field, value in (("top_k", 5), ("min_p", 0.2)):
            status, got = await http("POST", "/sessions", {"sampling": {field: value}})
            assert (status, got["error"].split(";")[0]) == (
                400,
                f"sampling.{field} is {value}, for which an OpenAI-compatible endpoint has no field",
            )
        assert (await http("GET", "/sessions"))[1] == []
        assert (await http("POST", "/sessions", {"sampling": {"top_k": -1}}))[0] == 201


async def test_what_is_not_there_or_is_there_already(http: Http) -> None:
    await http("POST", "/sessions", {"episode_id": "e1"})
    assert (await http("POST", "/sessions", {"episode_id": "e1"}))[0] == 409
    for method, path in (("GET", "/sessions/e9"), ("POST", "/sessions/e9/close"), ("GET", "/sessions/e9/calls")):
        assert await http(method, path, {} if method == "POST" else None) == (
            404,
            {"error": "there is no session 'e9'"},
        )
    assert (await http("DELETE", "/sessions/e1"))[0] == 404
    status, told = await http("POST", "/sessions/e1/close", {})
    assert status == 400 and "'harness_exited' must be true" in told["error"]


async def test_an_episode_of_an_earlier_process_keeps_its_name(stub: StubUpstream, tmp_path: Path) -> None:
    for status in (201, 409):
        async with served(stub, tmp_path) as (_, base), aiohttp.ClientSession() as session:
            assert (await Http(base, session)("POST", "/sessions", {"episode_id": "e1"}))[0] == status
    assert [r["record"] for r in read(tmp_path)] == ["open"]


async def test_a_port_that_is_taken_leaves_nothing_behind(stub: StubUpstream, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        async with served(stub, tmp_path / "journal", port=taken.getsockname()[1]):
            pass
    assert not (tmp_path / "journal").exists()


async def test_a_rollout_jobs_port_has_no_control_side(
    stub: StubUpstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENFORGE_PROXY_KEY", KEY)
    proxy = await start_proxy(stub.url, tmp_path, port=0)
    try:
        async with aiohttp.ClientSession() as session:
            http = Http(f"http://127.0.0.1:{proxy.port}", session)
            for method, path in REQUESTS:
                assert (await http(method, path))[0] == 404
    finally:
        await proxy.stop()
    assert SECRET not in proxy.log.read_text()
