"""The server's process: its state folder, its socket, its end."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from aiohttp import web

from openforge.sandboxes.protocol import SandboxError
from openforge.sandboxes.server import ways
from openforge.sandboxes.server.app import Api
from openforge.sandboxes.server.host import Host
from openforge.sandboxes.server.settings import Settings

_HEADER_BYTES = 1 << 16
_BACKLOG = 2048
_KEEP_ALIVE_SECONDS = 120.0  # as Orchard's


class ServeError(SandboxError):
    """The server cannot start; the message says why."""


async def serve(settings: Settings, host: str, port: int, ready: Callable[[int], None]) -> None:
    """Serve until SIGTERM or SIGINT, then delete every sandbox.

    Args:
        port: 0 takes a free one.
        ready: called with the port once requests are taken.

    Raises:
        ServeError: another server has the state folder, or the keeper does not start.
        OSError: it cannot listen.
    """
    settings.state.mkdir(parents=True, exist_ok=True, mode=0o700)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    with alone(settings.state), contextlib.ExitStack() as open_sockets:
        # First: a port that is in use must not cost the sandboxes of a server that was killed.
        sockets = [open_sockets.enter_context(s) for s in await listeners(host, port)]
        sandboxes = Host(settings)
        await sandboxes.recover()
        runner = web.AppRunner(
            Api(sandboxes).application(),
            access_log=None,
            keepalive_timeout=_KEEP_ALIVE_SECONDS,
            max_field_size=_HEADER_BYTES,
            shutdown_timeout=1.0,
        )
        await runner.setup()
        try:
            for sock in sockets:
                await web.SockSite(runner, sock, backlog=_BACKLOG).start()
            for hosted in list(sandboxes.hosted.values()):
                await ways.reopen(sandboxes, hosted)
            ready(runner.addresses[0][1])
            await stop.wait()
        finally:
            # Sandboxes first: whoever waits for one is told, and nothing keeps the connections open.
            await sandboxes.close()
            await runner.cleanup()


async def listeners(host: str, port: int) -> list[socket.socket]:
    """Sockets that are bound to every address of a host; OSError. With port 0 all have the same."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    made: list[socket.socket] = []
    try:
        for family, address in dict.fromkeys((f, a) for f, _, _, _, a in found):
            made.append(socket.create_server((address[0], port), family=family, backlog=_BACKLOG))
            port = made[-1].getsockname()[1]
    except OSError:
        for sock in made:
            sock.close()
        raise
    return made


@contextlib.contextmanager
def alone(state: Path) -> Iterator[None]:
    """Hold the state folder. The lock goes with the process, however it ends.

    Raises:
        ServeError: another server has it.
    """
    fd = os.open(state / "server.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ServeError(f"another server runs on {state}; end it, or give --state another folder") from None
        yield
    finally:
        os.close(fd)
