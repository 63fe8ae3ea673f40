"""The MCP server: its messages by the specification, and its HTTP as a client of it sees it."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from service_setup import TOOLS

from openforge.environments.claw_eval import gateway, inside, mcp


async def answer(message: Any) -> Any:
    async def call(name: str, arguments: Any) -> tuple[str, bool]:
        return f"{name} {json.dumps(arguments)}", name == "bad"

    return await mcp.answer(message, TOOLS[:2], call)


def ask(method: str, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": 7, "method": method, "params": params}


@pytest.mark.parametrize(
    ("asked", "told"),
    [("2025-03-26", "2025-03-26"), ("2024-11-05", "2024-11-05"), ("1999-01-01", "2025-11-25"), (None, "2025-11-25")],
)
async def test_the_version_that_is_asked_for_is_kept_if_it_is_known(asked: str | None, told: str) -> None:
    got = await answer(ask("initialize", protocolVersion=asked, capabilities={}, clientInfo={"name": "c"}))
    assert (got["jsonrpc"], got["id"]) == ("2.0", 7)
    assert got["result"]["protocolVersion"] == told and got["result"]["capabilities"] == {"tools": {}}
    assert got["result"]["serverInfo"]["name"] == "task"


async def test_tools_are_listed_with_their_schemas_and_called_with_their_arguments() -> None:
    listed = (await answer(ask("tools/list")))["result"]["tools"]
    assert [t["name"] for t in listed] == ["mail_list", "mail_add"]
    assert listed[1]["inputSchema"]["required"] == ["text"] and listed[1]["inputSchema"]["type"] == "object"
    called = (await answer(ask("tools/call", name="mail_add", arguments={"text": "é"})))["result"]
    assert called == {"content": [{"type": "text", "text": 'mail_add {"text": "\\u00e9"}'}], "isError": False}
    assert (await answer(ask("tools/call", name="bad")))["result"]["isError"] is True


async def test_notifications_and_answers_get_none() -> None:
    assert await answer({"jsonrpc": "2.0", "method": "notifications/initialized"}) is None
    assert await answer({"jsonrpc": "2.0", "id": 1, "result": {}}) is None
    assert (await answer(ask("ping")))["result"] == {}


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (ask("resources/list"), -32601),
        (ask("tools/call"), -32602),
        ({**ask("tools/list"), "params": [1]}, -32602),
        ({"id": 1, "method": "ping"}, -32600),
        (3, -32600),
    ],
)
async def test_what_is_no_request_of_ours_is_an_error_of_the_protocol(message: Any, code: int) -> None:
    assert (await answer(message))["error"]["code"] == code


class StubServices:
    """Stands for the services: answers with what it was asked."""

    async def call(self, method: str, url: str, arguments: Any, seconds: float) -> tuple[int, bytes]:
        if url.endswith("/crash"):
            raise inside.Unreachable("nobody listens on its port")
        return 200, json.dumps([method, url, arguments]).encode()


@pytest.fixture
async def served() -> AsyncIterator[tuple[gateway.Gateway, httpx.AsyncClient]]:
    one = gateway.Gateway(TOOLS, StubServices())  # type: ignore[arg-type]
    listener = socket.create_server(("127.0.0.1", 0))
    await one.adopt("e1", listener)
    base = f"http://127.0.0.1:{listener.getsockname()[1]}/s/e1"
    async with httpx.AsyncClient(base_url=base, trust_env=False) as client:
        yield one, client
    await one.close()


async def test_the_transport_answers_requests_with_json_and_notifications_with_202(served: Any) -> None:
    one, client = served
    accept = {"Accept": "application/json, text/event-stream"}
    got = await client.post("/mcp", json=ask("tools/list"), headers=accept)
    assert got.status_code == 200 and got.headers["content-type"].startswith("application/json")
    note = {"jsonrpc": "2.0", "method": "notifications/initialized"}
    got = await client.post("/mcp", json=note, headers=accept)
    assert (got.status_code, got.content) == (202, b"")
    # No stream is offered, as the specification allows.
    assert (await client.get("/mcp", headers={"Accept": "text/event-stream"})).status_code == 405
    batch = await client.post("/mcp", json=[ask("ping"), note])
    assert [m["id"] for m in batch.json()] == [7]
    assert (await client.post("/mcp", content=b"{")).json()["error"]["code"] == -32700
    assert not one.dispatches


async def test_a_call_is_one_dispatch_by_either_way(served: Any) -> None:
    one, client = served
    got = await client.post("/mcp", json=ask("tools/call", name="mail_add", arguments={"text": "a"}))
    told = json.loads(got.json()["result"]["content"][0]["text"])
    assert told == ["POST", "http://localhost:9100/mail/add", {"text": "a"}]
    plain = await client.post("/tools/mail_add", json={"text": "a"})
    assert (plain.status_code, plain.json()) == (200, told)
    gone = await client.post("/mcp", json=ask("tools/call", name="mail_crash", arguments={}))
    assert gone.json()["result"]["isError"] is True
    assert [(d["tool_name"], d["response_status"]) for d in one.dispatches] == [
        ("mail_add", 200),
        ("mail_add", 200),
        ("mail_crash", 502),
    ]
    assert one.dispatches[0]["request_body"] == {"text": "a"} and one.dispatches[0]["response_body"] == told


async def test_calls_beyond_what_is_kept_are_refused(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "CALLS_MOST", 2)
    one, client = served
    statuses = [(await client.post("/tools/mail_list", json={})).status_code for _ in range(4)]
    assert statuses == [200, 200, 429, 429] and len(one.dispatches) == 2


async def test_connections_beyond_what_is_allowed_are_closed_and_the_others_served(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "CONNECTIONS_MOST", 2)
    _, client = served
    assert (await client.get("/tools")).status_code == 200
    port = client.base_url.port
    _, held = await asyncio.open_connection("127.0.0.1", port)
    # The client's own connection and this one: a third gets nothing.
    reader, third = await asyncio.open_connection("127.0.0.1", port)
    assert await reader.read() == b""
    assert (await client.get("/tools")).status_code == 200
    held.close()
    third.close()
