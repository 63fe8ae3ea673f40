"""The terminal's WebSocket: Orchard's frames and close codes."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from served import Served

WAITS = "echo up; while :; do sleep 0.01; done"


@pytest.fixture
async def session(served: Served) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(base_url=served.url, headers={"X-API-Key": served.key}) as session:
        yield session


class Terminal:
    """A client of the frames."""

    def __init__(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        self.ws = ws
        self.seen = b""
        self.exit: int | None = None
        self.error = ""

    @classmethod
    async def open(cls, session: aiohttp.ClientSession, sandbox: str, *cmd: str, **init: Any) -> Terminal:
        ws = await session.ws_connect(f"/sandboxes/{sandbox}/exec/pty")
        terminal = cls(ws)
        await terminal.send("init", cmd=list(cmd), **init)
        return terminal

    async def send(self, kind: str, **fields: Any) -> None:
        await self.ws.send_str(json.dumps({"type": kind, **fields}))

    async def type(self, text: str) -> None:
        await self.send("stdin", data=base64.b64encode(text.encode()).decode())

    async def frame(self) -> str:
        """Take in the next frame; its type."""
        message = await self.ws.receive(30)
        if message.type is not aiohttp.WSMsgType.TEXT:
            return "closed"
        frame = json.loads(message.data)
        if frame["type"] == "stdout":
            self.seen += base64.b64decode(frame["data"])
        elif frame["type"] == "exit":
            self.exit = frame["code"]
        elif frame["type"] == "error":
            self.error = frame["message"]
        elif frame["type"] == "ready":
            assert frame["pid"] > 1
        return str(frame["type"])

    async def until(self, what: bytes) -> None:
        while what not in self.seen:
            assert await self.frame() == "stdout", self.seen

    async def end(self) -> int | None:
        while await self.frame() != "closed":
            pass
        return self.exit


async def test_a_conversation(session: aiohttp.ClientSession, sandbox: str) -> None:
    t = await Terminal.open(
        session, sandbox, "bash", "--norc", env={"PS1": "> ", "A": "b"}, cwd="/tmp", rows=40, cols=100
    )
    assert await t.frame() == "ready"
    await t.until(b"> ")
    await t.type("tty; stty size; echo $A-$PWD; echo to-err >&2\n")
    await t.until(b"to-err\r\n")
    assert b"/dev/pts/0\r\n40 100\r\nb-/tmp\r\n" in t.seen
    await t.send("resize", rows=50, cols=120)
    await t.type("stty size\n")
    await t.until(b"50 120\r\n")
    await t.type("exit 7\n")
    assert await t.end() == 7


async def test_signals_and_exits(session: aiohttp.ClientSession, sandbox: str) -> None:
    for how, code in (("TERM", -15), ("KILL", -9), ("HUP", -1), ("close", -15)):
        t = await Terminal.open(session, sandbox, "sh", "-c", "echo up; exec sleep 600")
        await t.frame()
        await t.until(b"up")
        if how == "close":
            await t.send("close")
        else:
            await t.send("signal", sig=how)
        assert await t.end() == code, how
    t = await Terminal.open(
        session, sandbox, "sh", "-c", "trap 'echo caught; exit 5' INT; echo up; while :; do sleep 0.01; done"
    )
    await t.frame()
    await t.until(b"up")
    await t.send("signal", sig="INT")
    assert await t.end() == 5 and b"caught" in t.seen


async def test_much_output_arrives_whole_and_before_the_exit(session: aiohttp.ClientSession, sandbox: str) -> None:
    t = await Terminal.open(session, sandbox, "sh", "-c", "stty -opost; seq 100000")
    assert await t.end() == 0
    assert t.seen == "".join(f"{i}\n" for i in range(1, 100001)).encode()


async def test_frames_that_make_no_sense_do_not_end_the_command(session: aiohttp.ClientSession, sandbox: str) -> None:
    t = await Terminal.open(session, sandbox, "cat")
    await t.frame()
    for frame in ("{", "[]", '{"type": "x"}', '{"type": "stdin", "data": "*"}', '{"type": "signal", "sig": "STOP"}'):
        await t.ws.send_str(frame)
        while await t.frame() != "error":
            pass
        assert "makes no sense" in t.error
    await t.type("still\n")
    await t.until(b"still\r\nstill\r\n")
    await t.type("\x04")
    assert await t.end() == 0


async def test_a_client_that_goes_ends_the_command(
    served: Served, session: aiohttp.ClientSession, sandbox: str
) -> None:
    t = await Terminal.open(
        session, sandbox, "sh", "-c", "trap 'echo told > told; exit' TERM; echo up; while :; do sleep 0.01; done"
    )
    await t.frame()
    await t.until(b"up")
    await t.ws.close()
    told = await asyncio.to_thread(served.exec, sandbox, "until [ -s told ]; do sleep 0.01; done; cat told")
    assert told["stdout"] == "told\n"


async def test_close_codes(served: Served, session: aiohttp.ClientSession, sandbox: str) -> None:
    async def code(ws: aiohttp.ClientWebSocketResponse) -> int | None:
        while not ws.closed:
            await ws.receive(30)
        return ws.close_code

    ws = await session.ws_connect("/sandboxes/unknown/exec/pty")
    assert await code(ws) == 4404
    for first in ("{", json.dumps({"type": "stdin", "data": ""}), json.dumps({"type": "init", "cmd": []})):
        ws = await session.ws_connect(f"/sandboxes/{sandbox}/exec/pty")
        await ws.send_str(first)
        assert await code(ws) == 4400
    t = await Terminal.open(session, sandbox, "true", cwd="/no/such")
    assert await code(t.ws) == 4500
    async with aiohttp.ClientSession(base_url=served.url) as stranger:
        path = f"/sandboxes/{sandbox}/exec/pty"
        for query in ("", "?api_key=wrong-key-of-the-tests"):
            assert await code(await stranger.ws_connect(path + query)) == 4401
        by_query = Terminal(await stranger.ws_connect(f"{path}?api_key={served.key}"))
        by_protocol = Terminal(await stranger.ws_connect(path, protocols=[f"api_key.{served.key}"]))
        for t in (by_query, by_protocol):
            await t.send("init", cmd=["echo", "in"], login_shell=True)
            assert await t.end() == 0 and b"in" in t.seen
