"""The proxy's HTTP side: sessions under /s/<episode_id>/, on a port or on listeners handed over by sandboxes.

Only the dialects' own paths are served and only one path is ever asked upstream, so the policy server's
unguarded control paths (weights, pause, metrics) cannot be reached through a session.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.http_parser import RawRequestMessage

from openforge.proxy import chat
from openforge.proxy.calls import Call, Refusal, Request
from openforge.proxy.journal import JournalError
from openforge.proxy.session import Generation, Session

log = logging.getLogger(__name__)

BODY_MOST = 64 * 2**20
# A connection may rest for as long as an episode's slowest command.
IDLE_SECONDS = 3600.0
SSE = {"content-type": "text/event-stream", "cache-control": "no-cache"}


@dataclass
class Gate:
    """Serves sessions.

    Attributes:
        status_seconds: how long a streamed request's status line waits for the answer.
        alive_seconds: time between keep-alive comments after that.
        control: answers what is asked of the port outside of sessions; None refuses it.
    """

    status_seconds: float = 10.0
    alive_seconds: float = 5.0
    control: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]] | None = None
    sessions: dict[str, Session] = field(default_factory=dict)
    _runners: dict[str | None, list[web.ServerRunner]] = field(default_factory=dict)

    # ---- listeners ------------------------------------------------------------------------------
    async def listen(self, listener: socket.socket, only: str | None = None, tls: ssl.SSLContext | None = None) -> None:
        """Serve on a listening socket, for session `only` if one is given, until it is closed."""

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            return await self.handle(request, only)

        loop = asyncio.get_running_loop()

        def make(message: RawRequestMessage, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
            return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=BODY_MOST)

        server = web.Server(
            handle,
            request_factory=make,
            # A client that hangs up cancels its handler, which aborts the generation.
            handler_cancellation=True,
            keepalive_timeout=IDLE_SECONDS,
            access_log=None,
        )
        runner = web.ServerRunner(server, shutdown_timeout=1.0)
        await runner.setup()
        await web.SockSite(runner, listener, ssl_context=tls).start()
        self._runners.setdefault(only, []).append(runner)

    async def release(self, only: str | None) -> None:
        """Close the listeners of a session (None: of all sessions) and what is connected to them."""
        for runner in self._runners.pop(only, []):
            await runner.cleanup()

    async def release_all(self) -> None:
        for only in list(self._runners):
            await self.release(only)

    # ---- requests -------------------------------------------------------------------------------
    async def handle(self, request: web.BaseRequest, only: str | None) -> web.StreamResponse:
        """Answer one request; every refusal is rendered in the dialect's shape."""
        if self.control is not None and only is None and not request.path.startswith("/s/"):
            return await self.control(request)
        try:
            session, action = self._route(request, only)
            session.authorize(request.headers)
            session.refuse_if_closed()
            if action == ("GET", "models"):
                return web.json_response(chat.models(session.config.context_window))
            return await self._chat(request, session)
        except Refusal as e:
            return refused(e)
        except web.HTTPRequestEntityTooLarge:
            return refused(Refusal(413, "request_too_large", f"the request body is over {BODY_MOST} bytes"))

    def _route(self, request: web.BaseRequest, only: str | None) -> tuple[Session, tuple[str, str]]:
        parts = request.path.split("/", 4)
        if len(parts) != 5 or parts[1] != "s" or parts[3] != "v1":
            raise Refusal(404, "not_found", f"path {request.path} is not served")
        episode_id, action = parts[2], (request.method, parts[4])
        session = self.sessions.get(episode_id)
        if session is None or only not in (None, episode_id):
            raise Refusal(404, "session_not_found", f"there is no session {episode_id!r} here")
        if action not in (("POST", chat.PATH), ("GET", "models")):
            raise Refusal(404, "not_found", f"{request.method} {request.path} is not served")
        return session, action

    async def _chat(self, request: web.BaseRequest, session: Session) -> web.StreamResponse:
        asked = chat.parse(await request.read(), request.headers)
        generation = session.generation(asked)
        try:
            with generation.joined() as task:
                limit = self.status_seconds if asked.stream else None
                await asyncio.wait({task}, timeout=limit)
                if not task.done():
                    return await self._late_stream(request, session, generation, asked)
                call = outcome(task, session)
                if asked.stream:
                    response = web.Response(body=chat.stream(call, asked), headers=SSE)
                else:
                    response = web.Response(body=chat.render(call, asked), content_type="application/json")
                return await send(request, response, session, call)
        finally:
            # Whatever came between the answer and its last byte: it is no turn unless it was marked as sent.
            if not generation.waiters:
                session.undelivered(generation.call)

    async def _late_stream(
        self, request: web.BaseRequest, session: Session, generation: Generation, asked: Request
    ) -> web.StreamResponse:
        """200 before the answer is there; comments keep the connection alive, errors become events."""
        response = web.StreamResponse(headers=SSE)
        flush_whole(request)
        with suppress(ConnectionError):
            await response.prepare(request)
            while not generation.task.done():
                await response.write(b": keep-alive\n\n")
                await asyncio.wait({generation.task}, timeout=self.alive_seconds)
            try:
                call = outcome(generation.task, session)
            except Refusal as e:
                await response.write_eof(chat.event(chat.error(e)))
            else:
                await response.write_eof(chat.stream(call, asked))
                mark_sent(session, call)
        return response


def outcome(task: asyncio.Task[Call], session: Session) -> Call:
    """The finished generation's call; `Refusal` if it was refused, or aborted because the session closed."""
    session.refuse_if_closed()
    if task.cancelled():
        raise Refusal(503, "aborted", "the generation was aborted")
    return task.result()


async def send(request: web.BaseRequest, response: web.Response, session: Session, call: Call) -> web.StreamResponse:
    """Write the whole response here, not after the handler, to know whether it went out."""
    flush_whole(request)
    with suppress(ConnectionError):
        await response.prepare(request)
        await response.write_eof()
        mark_sent(session, call)
    return response


def flush_whole(request: web.BaseRequest) -> None:
    """Let a write wait until the kernel has every byte: only then is an answer `sent`."""
    if request.transport is not None:
        request.transport.set_write_buffer_limits(0)


def mark_sent(session: Session, call: Call) -> None:
    try:
        session.delivered(call.call)
    except JournalError as e:
        # The answer is out and recorded; without this record it merely stays untrained.
        log.error("%s", e)


def refused(e: Refusal) -> web.Response:
    # OpenAI's and Anthropic's clients obey x-should-retry; what could be retried, this proxy has retried.
    headers = {"x-should-retry": "false", "content-type": "application/json"}
    return web.Response(status=e.status, body=json.dumps(chat.error(e)).encode(), headers=headers)
