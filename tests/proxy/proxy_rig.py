"""The proxy in the test's own process: gate, journal and upstream client, before a stub policy server."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import aiohttp
from proxy_stub import Json, StubUpstream

from openforge.proxy.journal import Journal, read
from openforge.proxy.lineage import call_rows
from openforge.proxy.opening import Config
from openforge.proxy.server import Gate
from openforge.proxy.session import Session
from openforge.proxy.upstream import Upstream

SECRET = "sk-episode"
SAMPLING = {
    "temperature": 0.7,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "max_tokens": 64,
}


def chat(*texts: str, **more: Any) -> Json:
    """A chat request: a user's text, then alternately assistant and user."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": t} for i, t in enumerate(texts)]
    return {"model": "gpt-x", "messages": messages, **more}


class Rig:
    def __init__(self, journal: Path, harness: aiohttp.ClientSession, upstream: aiohttp.ClientSession) -> None:
        self.stub, self.harness = StubUpstream(), harness
        self.journal_folder, self.journal = journal, Journal(journal)
        self.gate = Gate(status_seconds=30.0, alive_seconds=0.02)
        self._client = upstream
        self.port = 0

    async def start(self) -> None:
        await self.stub.start()
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        self.port = listener.getsockname()[1]
        await self.gate.listen(listener)

    async def stop(self) -> None:
        for session in self.gate.sessions.values():
            await session.close(False)
        await self.gate.release_all()
        await self.stub.stop()
        self.journal.close()

    def session(self, episode_id: str = "e1", **changed: Any) -> Session:
        given = {
            "episode_id": episode_id,
            "secret": SECRET,
            "sampling": SAMPLING,
            "turns": None,
            "tokens": None,
            "deadline_seconds": 60.0,
            "policy_version": "3@abc",
            "model": "policy",
            "context_window": 512,
        } | changed
        session = Session(Config(**given), self.journal, Upstream(self.stub.url, "sk-up", self._client))
        self.gate.sessions[episode_id] = session
        return session

    def url(self, path: str = "chat/completions", episode_id: str = "e1") -> str:
        return f"http://127.0.0.1:{self.port}/s/{episode_id}/v1/{path}"

    async def ask(self, body: Json | bytes, headers: Json | None = None, **where: str) -> tuple[int, bytes]:
        """POST to the session as a harness would; status and body."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"authorization": f"Bearer {SECRET}", "content-type": "application/json"} | (headers or {})
        async with self.harness.post(self.url(**where), data=data, headers=sent) as r:
            return r.status, await r.read()

    async def hang_up(self, body: Json) -> None:
        """Ask, and close the connection once the request is upstream."""
        task = asyncio.create_task(self.ask(body))
        await self.stub.arrived.get()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def records(self, kind: str, episode_id: str = "e1") -> list[Json]:
        return [r for r in read(self.journal_folder) if r["record"] == kind and r["episode_id"] == episode_id]

    def rows(self, episode_id: str = "e1") -> list[Json]:
        return call_rows([r for r in read(self.journal_folder) if r["episode_id"] == episode_id])[0]


def error_code(raw: bytes) -> str:
    code: str = json.loads(raw)["error"]["code"]
    return code


def events(raw: bytes) -> list[Json]:
    """Server-sent events of a finished stream; asserts that it ends as OpenAI's do."""
    blocks = [b for b in raw.decode().split("\n\n") if b and not b.startswith(":")]
    assert all(b.startswith("data: ") for b in blocks)
    assert blocks[-1] == "data: [DONE]"
    return [json.loads(b[6:]) for b in blocks[:-1]]


def assemble(raw: bytes) -> Json:
    """Put a stream together as a client does: message, finish_reason and usage."""
    message: Json = {}
    finish, usage = None, None
    for e in events(raw):
        usage = e.get("usage") or usage
        for choice in e["choices"]:
            finish = choice["finish_reason"] or finish
            for key, value in choice["delta"].items():
                if key == "tool_calls":
                    calls = message.setdefault("tool_calls", [])
                    for part in value:
                        assert part["index"] == len(calls)
                        calls.append({k: v for k, v in part.items() if k != "index"})
                elif isinstance(value, str) and key != "role":
                    message[key] = message.get(key, "") + value
                else:
                    message[key] = value
    return {"message": message, "finish_reason": finish, "usage": usage}
