"""The proxy's HTTP side: sessions under /s/<episode_id>/, on a port or on listeners handed over by sandboxes.

Below it are the dialects' own paths (`DIALECTS`), POST v1/messages/count_tokens, GET v1/models and v1/models/<name>,
and, for clients that look whether anybody is there, HEAD or GET on the prefix itself and on api/hello.

No other path is served and only one is ever asked upstream, so the policy server's unguarded control paths (weights,
pause, metrics) cannot be reached through a session.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from aiohttp import web
from aiohttp.http_parser import RawRequestMessage

from openforge.proxy import chat, messages, responses, wire
from openforge.proxy.calls import Call, Json, Refusal, Request
from openforge.proxy.dialect import Dialect, bad, sha256
from openforge.proxy.journal import JournalError
from openforge.proxy.session import Generation, Session
from openforge.proxy.upstream import PolicyFailed

log = logging.getLogger(__name__)

BODY_MOST = 64 * 2**20
# A connection may rest for as long as an episode's slowest command.
IDLE_SECONDS = 3600.0
DIALECTS: dict[str, Dialect] = {"v1/chat/completions": chat, "v1/responses": responses, "v1/messages": messages}
COUNT, MODELS, HELLO = "v1/messages/count_tokens", "v1/models", ("", "api/hello")
COUNT_SECONDS = 60.0
SSE = {"content-type": "text/event-stream", "cache-control": "no-cache"}
PLAIN = {"content-type": "application/json; charset=utf-8"}
# Above aiohttp's 64 KiB, from which on a write waits for the transport.
TLS_PIECE = 1 << 17


@dataclass
class Gate:
    """Serves sessions.

    Attributes:
        status_seconds: how long a streamed request's status line waits for the answer.
        alive_seconds: time between keep-alives after that.
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
        _, prefix, episode_id, path = (*request.path.split("/", 3), "", "", "")[:4]
        dialect = dialect_of(request, path)
        try:
            if prefix != "s":
                raise not_served(request)
            session = self._session(episode_id, only)
            if path in HELLO and request.method in ("GET", "HEAD"):
                return web.Response()
            model = path == MODELS or path.startswith(f"{MODELS}/")
            if request.method not in (("GET", "HEAD") if model else ("POST",)):
                raise not_served(request)
            if not model and path != COUNT and path not in DIALECTS:
                raise not_served(request)
            session.authorize(request.headers)
            session.refuse_if_closed()
            if model:
                return web.json_response(models(session, path, dialect))
            if path == COUNT:
                return web.json_response({"input_tokens": await prompt_tokens(request, session)})
            return await self._answer(request, session, dialect)
        except Refusal as e:
            return refused(e, dialect)
        except web.HTTPRequestEntityTooLarge:
            return refused(Refusal(413, "request_too_large", f"the request body is over {BODY_MOST} bytes"), dialect)
        except web.RequestPayloadError as e:
            response = refused(bad(f"the request body cannot be read: {' '.join(str(e).split())}"), dialect)
            response.force_close()
            with suppress(ConnectionError):
                await response.prepare(request)
                await response.write_eof()
            # aiohttp would read on where it cannot.
            request.protocol.force_close()
            return response
        except RecursionError:
            return refused(bad("the request body is nested too deeply"), dialect)

    def _session(self, episode_id: str, only: str | None) -> Session:
        session = self.sessions.get(episode_id)
        if session is None or only not in (None, episode_id):
            raise Refusal(404, "session_not_found", f"there is no session {episode_id!r} here")
        return session

    async def _answer(self, request: web.BaseRequest, session: Session, dialect: Dialect) -> web.StreamResponse:
        asked = dialect.parse(await request.read(), request.headers)
        with generations(session, asked) as running:
            tasks = [g.task for g in running]
            limit = self.status_seconds if asked.stream else None
            await asyncio.wait(tasks, timeout=limit, return_when=asyncio.FIRST_EXCEPTION)
            calls = outcome(tasks, session)
            if calls is None:
                return await self._late_stream(request, session, tasks, asked, dialect)
            body = dialect.stream(calls, asked) if asked.stream else dialect.render(calls, asked)
            return await send(request, body, SSE if asked.stream else PLAIN, session, calls)

    async def _late_stream(
        self,
        request: web.BaseRequest,
        session: Session,
        tasks: Sequence[asyncio.Task[Call]],
        asked: Request,
        dialect: Dialect,
    ) -> web.StreamResponse:
        """200 before the answer is there; events keep the connection alive, errors become events."""
        response = web.StreamResponse(headers=SSE)
        flush_whole(request)
        ident, sent = f"chatcmpl-{uuid.uuid4().hex}", 0
        with suppress(ConnectionError):
            await response.prepare(request)
            try:
                while (calls := outcome(tasks, session)) is None:
                    await response.write(dialect.alive(ident, asked, sent))
                    sent += 1
                    await asyncio.wait(tasks, timeout=self.alive_seconds, return_when=asyncio.FIRST_EXCEPTION)
            except Refusal as e:
                await response.write_eof(dialect.failed(e, ident, asked, sent))
            else:
                # The stream may have told its id already.
                named = [replace(c, id=ident) for c in calls]
                await write_whole(request, response, dialect.stream(named, asked, sent))
                mark_sent(session, calls)
        return response


def dialect_of(request: web.BaseRequest, path: str) -> Dialect:
    """The dialect of a path; of one that several share, the client's own."""
    if path in DIALECTS:
        return DIALECTS[path]
    return messages if path == COUNT or "anthropic-version" in request.headers else chat


def not_served(request: web.BaseRequest) -> Refusal:
    return Refusal(404, "not_found", f"{request.method} {request.path} is not served")


@contextmanager
def generations(session: Session, asked: Request) -> Iterator[list[Generation]]:
    """The calls that answer a request, one for each choice, waited for until the end of the block."""
    running: list[Generation] = []
    try:
        with ExitStack() as waiting:
            for i in range(asked.n):
                # A resend finds each of its choices again.
                one = asked if i == 0 else replace(asked, sha256=sha256(f"{asked.sha256}/{i}".encode()))
                generation = session.generation(one)
                waiting.enter_context(generation.joined())
                running.append(generation)
            yield running
    finally:
        # Whatever came between the answer and its last byte: it is no turn unless it was marked as sent.
        for generation in running:
            if not generation.waiters:
                session.undelivered(generation.call)


def outcome(tasks: Sequence[asyncio.Task[Call]], session: Session) -> list[Call] | None:
    """The finished generations' calls, None while one is running.

    Raises:
        Refusal: one was refused, or aborted because the session closed.
    """
    session.refuse_if_closed()
    done = [t for t in tasks if t.done()]
    if any(t.cancelled() for t in done):
        raise Refusal(503, "aborted", "the generation was aborted")
    calls = [t.result() for t in done]
    return calls if len(done) == len(tasks) else None


async def prompt_tokens(request: web.BaseRequest, session: Session) -> int:
    """How many tokens a request's prompt has, by the policy server's own count of a one-token answer.

    Not a call: nobody reads that token. An exact count has no other source that every policy server offers.
    """
    asked = messages.parse(await request.read(), request.headers)
    config, up = session.config, session.upstream
    body = wire.payload(up.api, asked, config.model, config.sampling, 1)
    deadline = min(session.deadline, time.monotonic() + COUNT_SECONDS)
    try:
        answer = await up.complete(body, deadline, config.context_window, lambda _: None, config.episode_id)
    except PolicyFailed as e:
        raise Refusal(503, "policy_failed", str(e)) from None
    session.refuse_if_closed()
    if not isinstance(tokens := answer.usage.get("prompt_tokens"), int):
        raise Refusal(503, "no_usage", "the policy server tells no usage, so tokens cannot be counted")
    return tokens


def models(session: Session, path: str, dialect: Dialect) -> Json:
    """The one model of a session: in the list under the name that harnesses are given, alone under any."""
    name, alone = path.removeprefix(MODELS).lstrip("/"), path != MODELS
    entry: Json = {"id": name or "policy"}
    if dialect is messages:
        entry |= {"type": "model", "display_name": entry["id"], "created_at": "1970-01-01T00:00:00Z"}
        pages = {"first_id": entry["id"], "last_id": entry["id"], "has_more": False}
        return entry if alone else {"data": [entry], **pages}
    entry |= {"object": "model", "created": 0, "owned_by": "openforge", "max_model_len": session.config.context_window}
    return entry if alone else {"object": "list", "data": [entry]}


async def send(
    request: web.BaseRequest, body: bytes, headers: Mapping[str, str], session: Session, calls: Sequence[Call]
) -> web.StreamResponse:
    """Write the whole response here, not after the handler, to know whether it went out."""
    response = web.StreamResponse(headers=headers)
    response.content_length = len(body)
    flush_whole(request)
    with suppress(ConnectionError):
        await response.prepare(request)
        await write_whole(request, response, body)
        mark_sent(session, calls)
    return response


def over_tls(transport: asyncio.BaseTransport) -> bool:
    return transport.get_extra_info("sslcontext") is not None


def flush_whole(request: web.BaseRequest) -> None:
    """Let a write wait until the kernel has every byte: only then is an answer `sent`."""
    if (transport := request.transport) is not None:
        # A TLS transport holds back at the limit and not above it: at 0 also when it has nothing left.
        transport.set_write_buffer_limits(1 if over_tls(transport) else 0)


async def write_whole(request: web.BaseRequest, response: web.StreamResponse, body: bytes) -> None:
    """Write a body's end, and wait for it. A TLS transport counts as written what it has encrypted, however much: so
    it gets a piece, and the next one when the socket has taken most of that."""
    begin = 0
    if (transport := request.transport) is not None and over_tls(transport):
        while len(body) - begin > TLS_PIECE:
            await response.write(body[begin : begin + TLS_PIECE])
            begin += TLS_PIECE
    await response.write_eof(body[begin:])


def mark_sent(session: Session, calls: Sequence[Call]) -> None:
    try:
        for call in calls:
            session.delivered(call.call)
    except JournalError as e:
        # The answer is out and recorded; without this record it merely stays untrained.
        log.error("%s", e)


def refused(e: Refusal, dialect: Dialect) -> web.Response:
    # OpenAI's and Anthropic's clients obey x-should-retry; what could be retried, this proxy has retried.
    headers = {"x-should-retry": "false", "content-type": "application/json"}
    return web.Response(status=e.status, body=dialect.error(e), headers=headers)
