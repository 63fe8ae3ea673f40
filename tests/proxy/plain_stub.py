"""A plain OpenAI-compatible endpoint: it refuses what OpenAI's chat completions do not know, in OpenAI's words."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web

Json = dict[str, Any]
# https://platform.openai.com/docs/api-reference/chat/create, the fields that matter here.
KNOWN = {
    *("model", "messages", "temperature", "top_p", "max_tokens", "max_completion_tokens", "presence_penalty"),
    *("frequency_penalty", "stop", "tools", "tool_choice", "parallel_tool_calls", "response_format", "seed"),
    *("logprobs", "top_logprobs", "stream", "stream_options", "n", "user"),
}
KNOWN_IN_MESSAGES = {"role", "content", "name", "refusal", "tool_calls", "tool_call_id", "function_call", "audio"}


def error(status: int, message: str, param: str | None = None, code: str | None = None) -> web.Response:
    told = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    return web.json_response({"error": told}, status=status)


class PlainStub:
    """Answers with the texts of `says` in turn, the last one again and again.

    Attributes:
        models: what /models lists; None for no such route.
        key: API key asked for; None for none.
        reasoning: like a reasoning model, it takes neither max_tokens nor temperature nor top_p.
        changed: laid over the answer's body, and `choice` over its choice.
    """

    def __init__(self) -> None:
        self.models: list[Json] | None = [{"id": "gpt-x", "object": "model", "owned_by": "someone"}]
        self.key: str | None = None
        self.reasoning = False
        self.says = ["yes"]
        self.changed: Json = {}
        self.choice: Json = {}
        self.bodies: list[Json] = []
        self.heads: list[str | None] = []
        self.answered = 0
        self.url = ""

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def stop(self) -> None:
        await self._runner.cleanup()

    def _refused(self, request: web.Request) -> web.Response | None:
        head = request.headers.get("authorization")
        self.heads.append(head)
        if self.key is None or head == f"Bearer {self.key}":
            return None
        return error(401, f"Incorrect API key provided: {head}.", code="invalid_api_key")

    async def _models(self, request: web.Request) -> web.Response:
        if (refused := self._refused(request)) is not None:
            return refused
        if self.models is None:
            return web.Response(status=404, text="404 page not found")
        return web.json_response({"object": "list", "data": self.models})

    async def _chat(self, request: web.Request) -> web.Response:
        if (refused := self._refused(request)) is not None:
            return refused
        body = json.loads(await request.read())
        self.bodies.append(body)
        for field in body:
            if field not in KNOWN:
                return error(400, f"Unknown parameter: '{field}'.", field, "unknown_parameter")
        for i, message in enumerate(body["messages"]):
            for field, value in message.items():
                if field not in KNOWN_IN_MESSAGES or (value is None and field != "content"):
                    where = f"messages[{i}].{field}"
                    return error(400, f"Unknown parameter: '{where}'.", where, "unknown_parameter")
        if self.reasoning and "max_tokens" in body:
            told = "Unsupported parameter: 'max_tokens' is not supported with this model. Use "
            return error(400, f"{told}'max_completion_tokens' instead.", "max_tokens", "unsupported_parameter")
        for field in ("temperature", "top_p"):
            if self.reasoning and field in body:
                told = f"Unsupported parameter: '{field}' is not supported with this model."
                return error(400, told, field, "unsupported_parameter")
        text = self.says[min(self.answered, len(self.says) - 1)]
        self.answered += 1
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text, "refusal": None, "annotations": []},
            "logprobs": None,
            "finish_reason": "stop",
        }
        usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
        answer = {"id": "c", "object": "chat.completion", "created": 1, "model": body["model"], "usage": usage}
        return web.json_response(answer | {"choices": [choice | self.choice]} | self.changed)
