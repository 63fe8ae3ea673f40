"""The stub policy server on an event loop of its own, for what blocks its caller."""

from __future__ import annotations

import asyncio
import threading

from aiohttp import web
from proxy_stub import StubUpstream


class Policy(StubUpstream):
    """The stub policy server on an event loop of its own, since an episode by hand blocks its caller."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self.start(), self.loop).result()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            return web.json_response({"data": [{"id": "policy", "owned_by": "vllm"}]})
        return await super()._serve(request)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.stop(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
