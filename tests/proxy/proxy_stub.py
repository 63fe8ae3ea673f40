"""A stub policy server for the proxy's tests: vLLM's shape of answers, bytes in place of a tokenizer."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

Json = dict[str, Any]
Reply = Callable[[Json], Awaitable[web.StreamResponse]]
START, END = 256, 257
RECORDED = Path(__file__).parent / "recorded"


def recorded(name: str) -> Json:
    """An exchange recorded from vLLM 0.32.0 with a random model: request, status, body."""
    data: Json = json.loads((RECORDED / f"{name}.json").read_text())
    return data


def template(messages: list[Json]) -> list[int]:
    """Prompt ids of a chat: START role newline text END for each message, and the head of the answer."""
    ids: list[int] = []
    for m in messages:
        ids += [START, *f"{m['role']}\n{m.get('content') or ''}".encode(), END]
    return [*ids, START, *b"assistant\n"]


def completion(body: Json, text: str, finish: str = "stop") -> Json:
    """vLLM's answer to `body` with this text; logprobs are -0.001 per place and known to the tests."""
    prompt, ids = template(body["messages"]), [*text.encode(), END]
    content = [
        {"token": chr(i), "logprob": -0.001 * n, "bytes": None, "top_logprobs": []} for n, i in enumerate(ids, 1)
    ]
    return {
        "id": "chatcmpl-upstream",
        "object": "chat.completion",
        "created": 1,
        "model": "policy",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text, "refusal": None, "reasoning": None},
                "logprobs": {"content": content},
                "finish_reason": finish,
                "stop_reason": None,
                "token_ids": ids,
            }
        ],
        "usage": {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(ids),
            "total_tokens": len(prompt) + len(ids),
            "prompt_tokens_details": None,
        },
        "prompt_token_ids": prompt,
    }


class StubUpstream:
    """Answers `ok N` unless a reply is scripted; counts what arrives and notices who hangs up."""

    def __init__(self) -> None:
        self.bodies: list[Json] = []
        self.paths: list[str] = []
        self.script: deque[Reply] = deque()
        self.arrived: asyncio.Queue[Json] = asyncio.Queue()
        self.aborted: asyncio.Queue[Json] = asyncio.Queue()
        self.hold: asyncio.Event | None = None
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        self.paths.append(request.path)
        body = await request.json()
        self.bodies.append(body)
        self.arrived.put_nowait(body)
        try:
            if self.hold is not None:
                await self.hold.wait()
            if self.script:
                return await self.script.popleft()(body)
            return web.json_response(completion(body, f"ok {len(self.bodies)}"))
        except asyncio.CancelledError:
            self.aborted.put_nowait(body)
            raise

    def says(self, *texts: str, finish: str = "stop") -> None:
        """Script the next answers."""
        for text in texts:

            async def reply(body: Json, text: str = text) -> web.StreamResponse:
                return web.json_response(completion(body, text, finish))

            self.script.append(reply)

    def answers(self, status: int, body: Json) -> None:
        """Script one raw answer."""

        async def reply(_: Json) -> web.StreamResponse:
            return web.json_response(body, status=status)

        self.script.append(reply)
