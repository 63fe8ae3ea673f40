"""The server's process: its state folder, its socket, its end."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

from aiohttp import web

from openforge.sandboxes.protocol import SandboxError
from openforge.sandboxes.server import ways
from openforge.sandboxes.server.app import Api
from openforge.sandboxes.server.host import Host
from openforge.sandboxes.server.settings import Settings

_HEADER_BYTES = 1 << 16
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
    with alone(settings.state):
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
            site = web.TCPSite(runner, host, port, backlog=2048)
            await site.start()
            for hosted in list(sandboxes.hosted.values()):
                await ways.reopen(sandboxes, hosted)
            ready(runner.addresses[0][1])
            await stop.wait()
        finally:
            # Sandboxes first: whoever waits for one is told, and nothing keeps the connections open.
            await sandboxes.close()
            await runner.cleanup()


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
