"""Ways out of a sandbox (routes) and into it (ports): bytes between its own network and the server's."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from aiohttp import WSMsgType, web

from openforge.sandboxes.protocol import SandboxError
from openforge.sandboxes.server import settings
from openforge.sandboxes.server.problems import Problem

if TYPE_CHECKING:
    from openforge.sandboxes.server.host import Host
    from openforge.sandboxes.server.hosted import Hosted

_CONNECT_SECONDS = 10.0
_CHUNK = 1 << 16


async def open_route(host: Host, hosted: Hosted, port: int, target: str) -> None:
    """Have 127.0.0.1:`port` inside lead to `target`; again with the same target is harmless.

    Raises:
        Problem: forbidden (by the operator or the sandbox's own list), exists, invalid.
    """
    name, number = settings.target(target)
    if hosted.network.mode != "proxy":
        raise Problem(
            "forbidden", f"sandbox {hosted.sandbox_id} has network {hosted.network.mode}; a route takes proxy"
        )
    own = hosted.network.allow
    for patterns, whose in ((host.settings.allow, "this server"), (own, f"sandbox {hosted.sandbox_id}")):
        if patterns is not None and not settings.allowed(target, tuple(patterns)):
            raise Problem("forbidden", f"{whose} allows no way to {target} (allowed: {', '.join(patterns) or 'none'})")
    if port in hosted.servers:
        if hosted.kept.routes.get(str(port)) == target:
            return
        raise Problem("exists", f"port {port} of sandbox {hosted.sandbox_id} leads elsewhere; delete that route first")
    local = await host.running(hosted.sandbox_id)
    try:
        listener = await host.spawner.listen(local.holder_pid, port)
    except SandboxError as e:
        raise Problem("exists", str(e)) from None
    listener.setblocking(False)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _splice(reader, writer, name, int(number))

    hosted.servers[port] = await asyncio.start_server(serve, sock=listener)
    hosted.kept.routes[str(port)] = target
    host.save(hosted)


def close_route(host: Host, hosted: Hosted, port: int) -> None:
    """End a route; one that is not there is none."""
    server = hosted.servers.pop(port, None)
    if server is not None:
        server.close()
    if hosted.kept.routes.pop(str(port), None) is not None:
        host.save(hosted)


async def reopen(host: Host, hosted: Hosted) -> None:
    """Open the routes of a sandbox again, after a restart of the server."""
    for port, target in list(hosted.kept.routes.items()):
        with contextlib.suppress(Problem):  # the operator allows it no more, or somebody inside took the port
            await open_route(host, hosted, int(port), target)


async def _splice(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str, port: int) -> None:
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            there, away = await asyncio.open_connection(name, port)
    except (OSError, TimeoutError):
        writer.close()  # as a refused connection looks through any relay
        return
    try:
        await asyncio.gather(_copy(reader, away), _copy(there, writer))
    finally:
        away.close()
        writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
        writer.write_eof()


async def enter(host: Host, request: web.Request) -> web.WebSocketResponse:
    """The handler of WS /sandboxes/{id}/ports/{port}."""
    text = request.match_info["port"]
    port = int(text) if text.isdecimal() else 0
    if not 0 < port < 1 << 16:
        raise Problem("invalid", f"port {text!r} is no number from 1 to 65535")
    local = await host.running(request.match_info["id"])
    try:
        sock = await local.connect(port)
    except ConnectionRefusedError as e:
        raise Problem("refused", e.strerror or str(e)) from None
    sock.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=sock)
    ws = web.WebSocketResponse(max_msg_size=16 << 20, heartbeat=30)
    await ws.prepare(request)
    back = asyncio.create_task(_outwards(reader, ws))
    try:
        async for message in ws:
            if message.type is not WSMsgType.BINARY:
                await ws.close(code=4400, message=b"binary frames only")
                break
            with contextlib.suppress(ConnectionError):
                if message.data:
                    writer.write(message.data)
                    await writer.drain()
                elif writer.can_write_eof():
                    writer.write_eof()  # an empty frame: the client sends no more
    finally:
        back.cancel()
        writer.close()
    return ws


async def _outwards(reader: asyncio.StreamReader, ws: web.WebSocketResponse) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK):
            await ws.send_bytes(data)
    await ws.close()
