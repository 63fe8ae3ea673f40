"""The proxy's side towards the rollout job: HTTP on a UNIX socket, and the door for handed-over listeners."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from pathlib import Path

from aiohttp import web

from openforge.proxy.calls import Json
from openforge.proxy.journal import Journal, JournalError
from openforge.proxy.server import Gate
from openforge.proxy.session import Config, Session
from openforge.proxy.upstream import Upstream

log = logging.getLogger(__name__)

UNIX_PATH_MOST = 107


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
    """POST /sessions, POST /sessions/{id}/close, GET /sessions/{id}, GET /health."""

    def __init__(self, gate: Gate, journal: Journal, upstream: Upstream, model: str) -> None:
        self.gate, self.journal, self.upstream, self.model = gate, journal, upstream, model
        self._closing: set[asyncio.Task[None]] = set()

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.get("/health", self.health),
                web.post("/sessions", self.open),
                web.get("/sessions/{id}", self.get),
                web.post("/sessions/{id}/close", self.close),
            ]
        )
        return app

    async def health(self, _request: web.Request) -> web.Response:
        running = sum(not s.closed for s in self.gate.sessions.values())
        return web.json_response({"pid": os.getpid(), "journal": str(self.journal.path), "open": running})

    async def open(self, request: web.Request) -> web.Response:
        try:
            config = Config.read(await _json(request), self.model)
        except (ValueError, TypeError) as e:
            return _error(400, str(e))
        if "/" in config.episode_id:
            return _error(400, f"episode_id {config.episode_id!r} must not contain '/': it is part of a URL")
        if config.episode_id in self.gate.sessions:
            return _error(409, f"session {config.episode_id} exists; an episode has one session")
        try:
            session = Session(config, self.journal, self.upstream)
        except JournalError as e:
            return _error(507, str(e))
        self.gate.sessions[config.episode_id] = session
        return web.json_response(session.state(), status=201)

    async def get(self, request: web.Request) -> web.Response:
        session = self.gate.sessions.get(request.match_info["id"])
        return _missing(request) if session is None else web.json_response(session.state())

    async def close(self, request: web.Request) -> web.Response:
        session = self.gate.sessions.get(request.match_info["id"])
        if session is None:
            return _missing(request)
        body = await _json(request)
        if not isinstance(body.get("harness_exited"), bool):
            return _error(400, "key 'harness_exited' must be true (the harness ended by itself) or false")
        try:
            await session.close(body["harness_exited"])
        except JournalError as e:
            return _error(507, str(e))
        # Its listeners' connections may take a moment to end; nobody waits for that.
        task = asyncio.create_task(self.gate.release(session.config.episode_id))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return web.Response(body=session.summary(), content_type="application/json")

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


async def _json(request: web.Request) -> Json:
    try:
        body = json.loads(await request.read())
    except ValueError as e:
        raise web.HTTPBadRequest(text=f"the body is not JSON: {e}") from None
    if not isinstance(body, dict):
        raise web.HTTPBadRequest(text="the body must be a JSON object")
    return body


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)


def _missing(request: web.Request) -> web.Response:
    return _error(404, f"there is no session {request.match_info['id']!r}")
