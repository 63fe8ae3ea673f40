"""A stand-in for the proxy: takes a sandbox's listener, records each request's bytes, gives scripted answers."""

from __future__ import annotations

import json
import socket
from functools import partial
from typing import Any

from aiohttp import web

Answer = dict[str, Any]


def text(content: str) -> Answer:
    return {"role": "assistant", "content": content}


def bash_call(command: str, name: str = "bash") -> Answer:
    call = {"name": name, "arguments": json.dumps({"command": command})}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": call}]}


class Capture:
    """Answers call i of an episode with script[i], the last one for all further calls.

    Attributes:
        bodies: raw request bodies by episode id, in order.
    """

    def public_url(self, episode_id: str) -> str:
        raise AssertionError(f"episode {episode_id} is on this host")

    def __init__(self, script: list[Answer]) -> None:
        self.script = script
        self.bodies: dict[str, list[bytes]] = {}
        self.keys: set[str] = set()
        self._runners: list[web.AppRunner] = []

    async def adopt(self, episode_id: str, listener: socket.socket) -> None:
        app = web.Application()
        app.router.add_post(f"/s/{episode_id}/v1/chat/completions", partial(self._answer, episode_id))
        runner = web.AppRunner(app)
        await runner.setup()
        listener.setblocking(False)
        await web.SockSite(runner, listener).start()
        self._runners.append(runner)

    async def close(self) -> None:
        for runner in self._runners:
            await runner.cleanup()

    async def _answer(self, episode_id: str, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        bodies = self.bodies.setdefault(episode_id, [])
        message = self.script[min(len(bodies), len(self.script) - 1)]
        bodies.append(body)
        self.keys.add(request.headers["authorization"])
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        head = {"id": "chatcmpl-1", "created": 1, "model": "policy"}
        usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
        if not json.loads(body).get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": reason}
            return web.json_response({**head, "object": "chat.completion", "choices": [choice], "usage": usage})
        delta = dict(message)
        if delta.get("tool_calls"):
            delta["tool_calls"] = [{"index": i, **c} for i, c in enumerate(delta["tool_calls"])]
        chunk = {**head, "object": "chat.completion.chunk", "usage": usage}
        chunk["choices"] = [{"index": 0, "delta": delta, "finish_reason": reason}]
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode())
        return response
