"""The proxy's side towards whoever opens sessions: HTTP, and the door for handed-over listeners."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
import socket
from collections.abc import Collection
from functools import partial
from pathlib import Path

from aiohttp import web

from openforge.proxy import opening, wire
from openforge.proxy.calls import Json, Refusal
from openforge.proxy.journal import Journal, JournalError, whole
from openforge.proxy.lineage import call_rows
from openforge.proxy.opening import Config
from openforge.proxy.server import COUNT, DIALECTS, MODELS, Gate, dialect_of, refused
from openforge.proxy.session import Session
from openforge.proxy.upstream import Upstream

log = logging.getLogger(__name__)

UNIX_PATH_MOST = 107


class Refused(ValueError):
    """What was asked of the control side cannot be done; one sentence."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def door_of(control: Path) -> Path:
    """The socket that takes listeners, beside the control socket."""
    return control.with_name(control.name + ".door")


def unix_listener(path: Path) -> socket.socket:
    """A listening UNIX socket that only this user may use.

    Raises:
        OSError: the path is too long for a UNIX socket, or taken.
    """
    if len(os.fsencode(path)) > UNIX_PATH_MOST:
        raise OSError(f"socket path {path} is longer than the {UNIX_PATH_MOST} bytes a UNIX socket may have")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # Between bind and chmod another user could connect.
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(before)
    listener.listen(128)
    listener.setblocking(False)
    return listener


class Control:
    """Opens, closes and reads sessions, over HTTP on the UNIX socket and, guarded by a key, on the port.

    GET /health, GET /sessions, POST /sessions, GET /sessions/{id}, GET /sessions/{id}/calls,
    POST /sessions/{id}/close. What is refused has a JSON body with one sentence under `error`.

    Args:
        model: the name that the policy server knows the policy by.
        key: what the port asks for, as Bearer or x-api-key; None where no port is open to control.
        base: URL of the port as its clients reach it; None likewise.
        defaults: laid under the body of POST /sessions, the sampling by field. With them a session needs no key at
            all: the rest is drawn.
        taken: episodes that the journal's folder holds from other processes.
    """

    def __init__(
        self,
        gate: Gate,
        journal: Journal,
        upstream: Upstream,
        model: str,
        key: str | None = None,
        base: str | None = None,
        defaults: Json | None = None,
        taken: Collection[str] = (),
    ) -> None:
        self.gate, self.journal, self.upstream, self.model = gate, journal, upstream, model
        self._key, self.base, self._defaults, self._taken = key, base, defaults, taken
        self._closing: set[asyncio.Task[None]] = set()

    async def guarded(self, request: web.BaseRequest) -> web.StreamResponse:
        """`handle` for whoever shows the control key; an agent that was not given its session's URL is told so."""
        path = request.path.strip("/")
        path = path if path.startswith("v1/") else f"v1/{path}"
        if path in (*DIALECTS, COUNT, MODELS):
            told = "a session is at /s/ID/v1 (the base URL of OpenAI's clients) and /s/ID (of Anthropic's)"
            message = f"{request.method} {request.path} is not served: {told}"
            return refused(Refusal(404, "not_found", message), dialect_of(request, path))
        headers = request.headers
        given = [headers.get("x-api-key", ""), headers.get("authorization", "")[len("Bearer ") :]]
        key = (self._key or "").encode()
        if not key or not any(hmac.compare_digest(g.encode(errors="replace"), key) for g in given):
            return _error(401, "the control key is missing or wrong: Authorization: Bearer KEY")
        # The port aborts what its client hangs up on; a session must not be left half closed.
        return await asyncio.shield(asyncio.create_task(self.handle(request)))

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await self._routed(request)
        except Refused as e:
            return _error(e.status, str(e))
        except JournalError as e:
            return _error(507, str(e))
        except web.HTTPRequestEntityTooLarge:
            return _error(413, "the request body is too large")

    async def _routed(self, request: web.BaseRequest) -> web.Response:
        match request.method, *request.path.strip("/").split("/"):
            case "GET", "health":
                return self._health()
            case "GET", "sessions":
                return web.json_response([s.state() for s in self.gate.sessions.values()])
            case "POST", "sessions":
                return self._open(await _json(request))
            case "GET", "sessions", episode_id:
                return web.json_response(self._session(episode_id).state())
            case "GET", "sessions", episode_id, "calls":
                return await self._calls(self._session(episode_id))
            case "POST", "sessions", episode_id, "close":
                return await self._close(self._session(episode_id), await _json(request))
        raise Refused(404, f"{request.method} {request.path} is not served")

    def _session(self, episode_id: str) -> Session:
        session = self.gate.sessions.get(episode_id)
        if session is None:
            raise Refused(404, f"there is no session {episode_id!r}")
        return session

    def _health(self) -> web.Response:
        running = sum(not s.closed for s in self.gate.sessions.values())
        upstream = [{"url": r.url, "down": r.down} for r in self.upstream.replicas]
        journal = str(self.journal.path)
        return web.json_response({"pid": os.getpid(), "journal": journal, "open": running, "upstream": upstream})

    def _open(self, body: Json) -> web.Response:
        session, secret = self.open(body)
        return web.json_response(session.state() | self.access(session, secret), status=201)

    def open(self, body: Json) -> tuple[Session, str]:
        """Open a session as POST /sessions does; it and its API key.

        Raises:
            Refused: a key is missing, unknown or no value for it, the policy server takes no such sampling, or the
                episode has a session.
        """
        given = opening.filled(body, self._defaults)
        try:
            opening.check(given)
        except ValueError as e:
            raise Refused(400, str(e)) from None
        config = Config.read(given, self.model)
        told = wire.not_taken(config.sampling) if self.upstream.api == "openai" else None
        if told is not None:
            raise Refused(400, told)
        name = config.episode_id
        if name in self.gate.sessions or name in self._taken:
            raise Refused(409, f"session {name} exists in {self.journal.path.parent}; an episode has one session")
        self.gate.sessions[name] = session = Session(config, self.journal, self.upstream)
        return session, config.secret

    def access(self, session: Session, secret: str) -> Json:
        """How a harness reaches a session on the port; nothing where there is none.

        `base_url` is what Anthropic's clients take; OpenAI's take it with /v1.
        """
        if self.base is None:
            return {}
        return {"base_url": f"{self.base}/s/{session.config.episode_id}", "api_key": secret}

    async def _calls(self, session: Session) -> web.Response:
        """The session's rows of the calls table so far. Their lineage may take a while: not on the event loop."""
        records = json.loads(session.summary())["records"]
        rows, _ = await asyncio.to_thread(lambda: call_rows(whole(records)))
        return web.json_response(rows, dumps=partial(json.dumps, default=str))

    async def _close(self, session: Session, body: Json) -> web.Response:
        if not isinstance(body.get("harness_exited"), bool):
            raise Refused(400, "key 'harness_exited' must be true (the harness ended by itself) or false")
        await session.close(body["harness_exited"])
        # Its listeners' connections may take a moment to end; nobody waits for that.
        task = asyncio.create_task(self.gate.release(session.config.episode_id))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return web.Response(body=session.summary(), content_type="application/json")

    async def close_all(self) -> None:
        """Seal what is open as killed: whether an agent had ended by itself, nobody has said."""
        sessions = list(self.gate.sessions.values())
        for e in await asyncio.gather(*(s.close(harness_exited=False) for s in sessions), return_exceptions=True):
            if isinstance(e, BaseException):
                log.error("a session was not closed: %s", e)

    # ---- the door -------------------------------------------------------------------------------
    async def door(self, listener: socket.socket) -> None:
        """Take listeners for ever: one connection a hand-over, one JSON line and one file descriptor."""
        loop = asyncio.get_running_loop()
        while True:
            conn, _ = await loop.sock_accept(listener)
            with conn:
                try:
                    async with asyncio.timeout(5):
                        reply = await self._take(conn)
                        await loop.sock_sendall(conn, reply)
                except (OSError, ValueError, KeyError) as e:
                    log.error("a listener was not taken over: %s", e)

    async def _take(self, conn: socket.socket) -> bytes:
        data, fds = b"", list[int]()
        try:
            while not data.endswith(b"\n"):
                await _readable(conn)
                more, got, _flags, _address = socket.recv_fds(conn, 65536, 4)
                fds += got
                if not more:
                    return b"the hand-over ended before its line did\n"
                data += more
            episode_id = str(json.loads(data)["episode_id"])
            session = self.gate.sessions.get(episode_id)
            if session is None or session.closed:
                return f"there is no open session {episode_id!r}\n".encode()
            if len(fds) != 1:
                return f"a hand-over carries one listening socket, not {len(fds)}\n".encode()
            sock = socket.socket(fileno=fds.pop())
        finally:
            for fd in fds:
                os.close(fd)
        if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            sock.close()
            return b"the socket handed over does not listen\n"
        sock.setblocking(False)
        await self.gate.listen(sock, only=episode_id)
        return b"ok\n"


async def _readable(conn: socket.socket) -> None:
    """Wait for bytes without taking them: asyncio's own reads would drop the file descriptors."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(conn, wake)
    try:
        await ready
    finally:
        loop.remove_reader(conn)


async def _json(request: web.BaseRequest) -> Json:
    """A request's body; none is an empty object."""
    try:
        body = json.loads(await request.read() or b"{}")
    except ValueError as e:
        raise Refused(400, f"the body is not JSON: {e}") from None
    except RecursionError:
        raise Refused(400, "the body is nested too deeply") from None
    if not isinstance(body, dict):
        raise Refused(400, "the body must be a JSON object")
    return body


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)
