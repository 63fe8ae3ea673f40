"""Ways in and out: routes, ports, companions, binds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from served import Served


@pytest.fixture
async def echo() -> AsyncIterator[int]:
    """A server outside that answers each line in capitals."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(line.upper())
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


def say(port: int, text: str) -> str:
    """A bash command that sends a line to a port and prints one."""
    return f"exec 3<>/dev/tcp/127.0.0.1/{port} && printf '{text}\\n' >&3 && head -n 1 <&3"


async def test_a_route_leads_to_an_allowed_target_and_nowhere_else(served: Served, echo: int) -> None:
    made = served.create(network={"mode": "proxy", "allow": [f"127.0.0.1:{echo}"]})
    sandbox = made["sandbox_id"]
    assert made["network"] == {"mode": "proxy", "allow": [f"127.0.0.1:{echo}"]}
    routes = f"/sandboxes/{sandbox}/routes"
    asked = {"port": 8080, "target": f"127.0.0.1:{echo}"}

    async def run(command: str) -> dict[str, object]:
        return await asyncio.to_thread(served.exec, sandbox, command)

    assert (await run(say(8080, "hi")))["exit_code"] == 1
    for _ in range(2):
        answer = served.api.post(routes, json=asked)
        assert (answer.status_code, answer.json()) == (200, {"sandbox_id": sandbox, **asked})
    assert (await run(say(8080, "hi")))["stdout"] == "HI\n"
    assert served.api.get(routes).json() == {"routes": [asked]}
    for target, status in (
        ("127.0.0.1:1", 403),  # the operator allows it, the sandbox's own list does not
        ("example.com:443", 403),
        ("127.0.0.1:0", 422),
        ("127.0.0.1", 422),
        ("*:1", 422),
    ):
        assert served.api.post(routes, json={"port": 8081, "target": target}).status_code == status, target
    assert served.api.post(routes, json={"port": 0, "target": asked["target"]}).status_code == 422
    # No other way out, the server's own port included.
    port = int(served.url.rpartition(":")[2])
    assert (await run(say(port, "x")))["exit_code"] == 1
    assert (await run(say(echo, "x")))["exit_code"] == 1
    for _ in range(2):
        assert served.api.delete(f"{routes}/8080").status_code == 200
    assert (await run(say(8080, "hi")))["exit_code"] == 1
    assert served.api.post(routes, json=asked).status_code == 200, "a deleted route's port is free"
    served.api.delete(f"/sandboxes/{sandbox}")


async def test_a_sandbox_without_network_has_no_routes(served: Served, sandbox: str, echo: int) -> None:
    asked = {"port": 8080, "target": f"127.0.0.1:{echo}"}
    answer = served.api.post(f"/sandboxes/{sandbox}/routes", json=asked)
    assert answer.status_code == 403 and "network none" in answer.json()["detail"]


SERVICE = """
import socket
with socket.create_server(("127.0.0.1", 7000)) as s:
    open("up", "w").close()
    while True:
        c, _ = s.accept()
        with c:
            data = b""
            while chunk := c.recv(65536):
                data += chunk
            c.sendall(data[::-1])
"""


async def test_a_way_in_to_a_port(served: Served, sandbox: str) -> None:
    url = f"{served.url}/sandboxes/{sandbox}/ports/7000"
    headers = {"X-API-Key": served.key}
    async with aiohttp.ClientSession(headers=headers) as session:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await session.ws_connect(url)
        assert refused.value.status == 502
        body = {"command": ["python3", "-c", SERVICE], "parallel": True}
        served.api.post(f"/sandboxes/{sandbox}/exec", json=body)
        await asyncio.to_thread(served.exec, sandbox, "until [ -e up ]; do sleep 0.01; done")
        data = bytes(range(256)) * 4000
        for _ in range(2):
            ws = await session.ws_connect(url, max_msg_size=0)
            for i in range(0, len(data), 100_000):
                await ws.send_bytes(data[i : i + 100_000])
            await ws.send_bytes(b"")  # no more from here
            back = b""
            async for message in ws:
                back += message.data
            assert back == data[::-1]
        for path, status in (("ports/0", 422), ("ports/x", 422), ("ports/99999", 422)):
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await session.ws_connect(f"{served.url}/sandboxes/{sandbox}/{path}")
            assert refused.value.status == status
    async with aiohttp.ClientSession() as stranger:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await stranger.ws_connect(url)
        assert refused.value.status == 401
        ws = await stranger.ws_connect(f"{url}?api_key={served.key}")
        await ws.close()


def test_companions(served: Served, sandbox: str) -> None:
    first = served.create(companion_of=sandbox)["sandbox_id"]
    second = served.create(companion_of=first)
    assert second["companion_of"] == first
    served.exec(sandbox, "echo secret > f")
    assert served.exec(first, "cat f")["exit_code"] == 1, "they share nothing"
    served.api.delete(f"/sandboxes/{sandbox}")
    for gone in (first, second["sandbox_id"]):
        assert served.api.get(f"/sandboxes/{gone}").status_code == 404


def test_binds_below_a_share(served: Served, tmp_path: Path) -> None:
    (share,) = served.api.get("/capabilities").json()["shares"]
    made = served.create(binds=[{"host": share}, {"host": f"{share}/words", "inside": "/opt/given"}])["sandbox_id"]
    assert served.exec(made, ["cat", f"{share}/words", "/opt/given"])["stdout"] == "shared\nshared\n"
    assert served.exec(made, ["touch", f"{share}/x"])["exit_code"] == 1
    served.api.delete(f"/sandboxes/{made}")
    (tmp_path / "secret").write_text("secret")
    link = Path(share) / "link"
    link.symlink_to(tmp_path)
    for host in (f"{share}/link/secret", f"{share}/../{tmp_path.name}", "words", "/"):
        answer = served.api.post("/sandboxes", json={"binds": [{"host": host}]})
        assert answer.status_code == 403, host
    assert served.api.post("/sandboxes", json={"binds": [{"host": f"{share}/none"}]}).status_code == 422
    link.unlink()
