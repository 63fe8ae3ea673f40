"""A stub of an OpenAI-compatible endpoint that says the given messages, or fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiohttp import web


class ChatStub:
    """Answers each request with the next of `says`: a text, or a status code that it fails with.

    Attributes:
        asked: the bodies of the requests.
        keys: their authorization headers.
    """

    def __init__(self, says: Sequence[str | int | None]) -> None:
        self.says = list(says)
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> ChatStub:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json())
        self.keys.append(request.headers.get("Authorization"))
        say = self.says.pop(0)
        if isinstance(say, int):
            return web.Response(status=say, text="no")
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": say}}]})
