"""One recording proxy process: its listeners, its control side, its end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from openforge.proxy import wire
from openforge.proxy.calls import Json
from openforge.proxy.control import Control, door_of, unix_listener
from openforge.proxy.journal import Journal, opened
from openforge.proxy.server import Gate
from openforge.proxy.upstream import Upstream

# vLLM's HTTP server drops idle connections after 5 s; a request on one that is being dropped would fail.
REUSE_SECONDS = 4.0


@dataclass(frozen=True)
class Settings:
    """What a proxy process is started with.

    Attributes:
        upstream: OpenAI base URL of each policy server.
        upstream_key: their API key.
        api: which fields they take; see `wire`.
        model: name that they know the policy by.
        journal: folder of the journal.
        control: UNIX socket to control it by, with the door for listeners beside it; None for none.
        control_key: opens the control side on the port to whoever shows it; None keeps it closed there.
        defaults: of sessions opened on the port; see `control`.
        host, port: TCP address of the sessions; port None for none, 0 for a free one.
        tls: certificate chain and key (None: both in one file) of the port; None for plain HTTP.
        public_url: of the port as sandboxes off this host reach it; None where none do.
        fsync: seconds between grouped fsyncs of the journal; None for none.
        status_seconds, alive_seconds: see `server.Gate`.
        patience_seconds, probe_seconds, call_seconds: see `upstream.Upstream`.
        parent: pid of our parent, with which this process ends.
    """

    upstream: tuple[str, ...]
    journal: Path
    upstream_key: str | None = field(default=None, repr=False)
    api: wire.Api = "vllm"
    model: str = "policy"
    control: Path | None = None
    control_key: str | None = field(default=None, repr=False)
    defaults: Json | None = None
    host: str = "127.0.0.1"
    port: int | None = None
    tls: tuple[Path, Path | None] | None = None
    public_url: str | None = None
    fsync: float | None = None
    status_seconds: float = 10.0
    alive_seconds: float = 5.0
    patience_seconds: float = 10.0
    probe_seconds: float = 20.0
    call_seconds: float | None = None
    parent: int | None = None


class ServingError(RuntimeError):
    """The proxy cannot be started as told; one sentence."""


async def serve(settings: Settings, ready: Callable[[Control, Path, int | None], None]) -> None:
    """Serve until SIGTERM, SIGINT or the parent's end; sessions by hand are closed then.

    Args:
        ready: called once everything listens, with the journal and the port.

    Raises:
        OSError, ServingError: it cannot listen or write.
    """
    over = asyncio.Event()
    watch_end(over, settings.parent)
    tls = None if settings.tls is None else tls_context(*settings.tls)
    # Before the first file is written: a port that is taken leaves nothing behind.
    listener = None if settings.port is None else tcp_listener(settings.host, settings.port)
    port: int | None = None if listener is None else listener.getsockname()[1]
    key, base = settings.control_key, settings.public_url
    if port is not None and base is None:
        base = url_of(settings.host, port, tls is not None)
    async with AsyncExitStack() as stack:
        journal = Journal(settings.journal)
        stack.callback(journal.close)
        # The folder is ours from here on: no other process adds a name.
        taken = opened(settings.journal) if key is not None else set()
        client = await stack.enter_async_context(_client(settings.upstream))
        gate = Gate(settings.status_seconds, settings.alive_seconds)
        upstream = Upstream(
            settings.upstream,
            settings.upstream_key,
            client,
            settings.api,
            settings.patience_seconds,
            settings.probe_seconds,
            settings.call_seconds,
        )
        control = Control(gate, journal, upstream, settings.model, key, base, settings.defaults, taken)
        if settings.control is not None:
            await _listen_unix(settings.control, control, stack)
        if settings.fsync:
            _beside(sync(journal, settings.fsync), stack)
        if listener is not None:
            gate.control = None if key is None else control.guarded
            await gate.listen(listener, tls=tls)
        stack.push_async_callback(gate.release_all)
        ready(control, journal.path, port)
        await over.wait()
        if key is not None:
            # A run's shard closes its own sessions: it knows how each harness ended.
            await control.close_all()


def _client(upstream: Sequence[str]) -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=REUSE_SECONDS)
    # Deadlines are the sessions' own.
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    # An endpoint out in the world may be reachable by the environment's HTTP proxy only.
    trust = not all(map(wire.is_loopback, upstream))
    return aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=trust)


async def _listen_unix(path: Path, control: Control, stack: AsyncExitStack) -> None:
    """Take commands on `path` and listeners at the door beside it."""
    sockets = []
    for at in (path, door_of(path)):
        sockets.append(unix_listener(at))
        stack.callback(at.unlink, missing_ok=True)
    runner = web.ServerRunner(web.Server(control.handle, access_log=None), shutdown_timeout=1.0)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.SockSite(runner, sockets[0]).start()
    _beside(control.door(sockets[1]), stack)


def _beside(work: Coroutine[Any, Any, None], stack: AsyncExitStack) -> None:
    """Run until the stack unwinds."""
    stack.callback(asyncio.create_task(work).cancel)


def tcp_listener(host: str, port: int) -> socket.socket:
    """A listening TCP socket.

    Raises:
        OSError: the address is not this machine's, or taken.
    """
    listener = socket.create_server(
        (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=1024
    )
    listener.setblocking(False)
    return listener


def tls_context(cert: Path, key: Path | None) -> ssl.SSLContext:
    """TLS by a certificate chain and its key, in one file or two.

    Raises:
        ServingError: they cannot be read, or do not belong together.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as e:
        files = f"{cert}" if key is None else f"{cert} and {key}"
        raise ServingError(f"no TLS with {files}: {e.strerror or e}; a PEM certificate chain and its key") from None
    return context


def url_of(host: str, port: int, tls: bool) -> str:
    """URL of an address as a client on this machine would write it."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"{'https' if tls else 'http'}://{f'[{shown}]' if ':' in shown else shown}:{port}"


def watch_end(over: asyncio.Event, parent: int | None) -> None:
    """Set `over` on a signal or when the parent is gone. A pidfd cannot be fooled by a reused pid."""
    loop = asyncio.get_running_loop()
    for sig in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sig, over.set)
    if parent is not None:
        fd = os.pidfd_open(parent)
        if os.getppid() != parent:
            over.set()
        loop.add_reader(fd, over.set)


async def sync(journal: Journal, seconds: float) -> None:
    while True:
        await asyncio.sleep(seconds)
        await asyncio.to_thread(journal.sync)
