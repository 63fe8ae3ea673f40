"""The way from an agent to the tools of its task: an MCP server and a plain POST, outside the sandbox.

It runs in the rollout process. The agent reaches it, but not what it writes down: every call is a dispatch, checked
against the tool's schema, sent to the service in the companion sandbox, and recorded with its answer.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import jsonschema
from aiohttp import web

from openforge.environments.claw_eval import inside, mcp
from openforge.environments.claw_eval.services import Services
from openforge.environments.claw_eval.setup import Tool
from openforge.sandboxes.protocol import SandboxError, SandboxUnsupported

PORT = 8081  # inside the agent's sandbox, beside the proxy's
CALL_SECONDS = 60.0  # a tool's call
BODY_MOST = 4 << 20  # of a request
CONNECTIONS_MOST = 64  # at once
CALLS_MOST = 10_000  # dispatches that are kept; an agent that calls on and on is refused
# What a dispatch has for a status where no service answered.
BAD_ARGUMENTS, NO_TOOL, NO_ANSWER, TOO_MANY = 400, 404, 502, 429

Dispatch = dict[str, Any]


class Gateway:
    """The tools of one episode; an `Adopter` of its sandbox's connections.

    Attributes:
        dispatches: every call so far, in the order in which they ended (`evidence.DISPATCH`).
    """

    def __init__(self, tools: Sequence[Tool], services: Services) -> None:
        self.tools = tools
        self.dispatches: list[Dispatch] = []
        self._services = services
        self._by_name = {t.name: t for t in tools}
        self._begun = 0
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None

    # ---- the adopter ---------------------------------------------------------------------------------------------
    def public_url(self, episode_id: str) -> str:
        raise SandboxUnsupported(
            f"episode {episode_id}: the task's tools are reached by sandboxes of this host only; "
            "use sandbox backend local"
        )

    async def adopt(self, episode_id: str, listener: socket.socket) -> None:
        app = web.Application(client_max_size=BODY_MOST)
        app.router.add_post(f"/s/{episode_id}/mcp", self._mcp)
        app.router.add_get(f"/s/{episode_id}/tools", self._list)
        app.router.add_post(f"/s/{episode_id}/tools/{{name}}", self._post)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.0)
        await self._runner.setup()
        self._server = await asyncio.get_running_loop().create_server(self._connection, sock=listener)

    def _connection(self) -> asyncio.BaseProtocol:
        """A new connection's protocol. An agent may open as many as it likes, but not take all of this process's
        descriptors, which other episodes need."""
        handler = self._runner.server if self._runner is not None else None
        if handler is None or len(handler.connections) >= CONNECTIONS_MOST:
            return _Refused()
        protocol: asyncio.BaseProtocol = handler()
        return protocol

    async def close(self) -> None:
        """End every connection: what is dispatched then is all there will be."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    # ---- HTTP ----------------------------------------------------------------------------------------------------
    async def _mcp(self, request: web.Request) -> web.Response:
        try:
            message = json.loads(await request.read())
        except (ValueError, RecursionError):
            return web.json_response(mcp.unreadable(), status=400)
        # Before 2025-06-18 several messages may come as one list.
        many = message if isinstance(message, list) else [message]
        answers = [a for m in many if (a := await mcp.answer(m, self.tools, self._called)) is not None]
        if not answers:
            return web.Response(status=202)
        return web.json_response(answers if isinstance(message, list) else answers[0])

    async def _called(self, name: str, arguments: Any) -> tuple[str, bool]:
        done = await self.call(name, arguments)
        return _text(done), done["response_status"] >= 400

    async def _list(self, _: web.Request) -> web.Response:
        shown = ("name", "description", "input_schema")
        return web.json_response([{key: getattr(t, key) for key in shown} for t in self.tools])

    async def _post(self, request: web.Request) -> web.Response:
        body = await request.read()
        try:
            arguments = json.loads(body) if body.strip() else {}
        except (ValueError, RecursionError):
            arguments = body.decode(errors="replace")
        done = await self.call(request.match_info["name"], arguments)
        return web.Response(text=_text(done), status=done["response_status"])

    # ---- calls ---------------------------------------------------------------------------------------------------
    async def call(self, name: str, arguments: Any) -> Dispatch:
        """Carry out one call; its dispatch, which is recorded too. Nothing that an agent sends raises."""
        self._begun += 1
        start, began = time.monotonic(), datetime.now(UTC)
        url, status, answer = await self._carried_out(name, arguments)
        done = {
            "tool_use_id": f"call_{self._begun}",
            "tool_name": name,
            "endpoint_url": url,
            "request_body": arguments if isinstance(arguments, dict) else {"arguments": arguments},
            "response_status": status,
            "response_body": answer,
            "latency_ms": (time.monotonic() - start) * 1000,
            "timestamp": began.isoformat(),
        }
        if status != TOO_MANY:
            self.dispatches.append(done)
        return done

    async def _carried_out(self, name: str, arguments: Any) -> tuple[str, int, Any]:
        """The endpoint, and the status and value of a call's answer."""
        if self._begun > CALLS_MOST:
            return "", TOO_MANY, _error(f"this episode has made {CALLS_MOST} calls, which is all it may")
        tool = self._by_name.get(name)
        if tool is None:
            known = ", ".join(self._by_name) or "none"
            return "", NO_TOOL, _error(f"there is no tool {name!r}; tools: {known}")
        problem = problem_of(arguments, tool)
        if problem is not None:
            return tool.url, BAD_ARGUMENTS, _error(problem)
        try:
            status, body = await self._services.call(tool.method, tool.url, arguments, CALL_SECONDS)
        except inside.Unreachable as e:
            return tool.url, NO_ANSWER, _error(f"the service of {name} gave no answer: {e}")
        except SandboxError:
            # The episode is lost, which its own steps say.
            return tool.url, NO_ANSWER, _error(f"the service of {name} is gone")
        return tool.url, status, _read(body)


class _Refused(asyncio.Protocol):
    """Closes a connection as it comes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


def problem_of(arguments: Any, tool: Tool) -> str | None:
    """The sentence on arguments that do not fit a tool's schema; None if they do."""
    if not isinstance(arguments, dict):
        return f"the arguments of {tool.name} must be a JSON object, not {_dumped(arguments)[:100]}"
    validator = jsonschema.validators.validator_for(tool.input_schema, jsonschema.Draft202012Validator)
    try:
        found = jsonschema.exceptions.best_match(validator(tool.input_schema).iter_errors(arguments))
    except RecursionError:
        return f"the arguments of {tool.name} are nested too deeply"
    if found is None:
        return None
    where = ".".join(map(str, found.absolute_path))
    return f"the arguments of {tool.name} do not fit its schema: {f'{where}: ' if where else ''}{found.message[:300]}"


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _read(body: bytes) -> Any:
    """An answer's body: the JSON that it is, or else its text."""
    text = body.decode(errors="replace")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _error(text: str) -> dict[str, str]:
    return {"error": text}


def _text(done: Dispatch) -> str:
    """What the agent is told: a text as it stands, anything else as JSON."""
    value = done["response_body"]
    return value if isinstance(value, str) else _dumped(value)
