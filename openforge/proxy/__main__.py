"""`python -m openforge.proxy`: one recording proxy for one rollout job."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import socket
import sys
from pathlib import Path

import aiohttp
from aiohttp import web

from openforge.proxy import wire
from openforge.proxy.control import Control, door_of, unix_listener
from openforge.proxy.journal import Journal
from openforge.proxy.server import Gate
from openforge.proxy.upstream import Upstream

# vLLM's HTTP server drops idle connections after 5 s; a request on one that is being dropped would fail.
REUSE_SECONDS = 4.0


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m openforge.proxy", description=__doc__)
    p.add_argument("--upstream", required=True, metavar="URL", help="OpenAI base URL of the policy server")
    p.add_argument("--api", choices=["vllm", "openai"], default="vllm", help="which fields it takes")
    p.add_argument("--model", default="policy", help="name the policy server knows the policy by")
    p.add_argument("--journal", required=True, type=Path, metavar="DIR", help="folder of the journal")
    p.add_argument("--control", required=True, type=Path, metavar="PATH", help="UNIX socket to control it by")
    p.add_argument("--port", type=int, metavar="N", help="also serve on 127.0.0.1:N; 0 takes a free one")
    p.add_argument("--fsync", type=float, metavar="SECONDS", help="fsync the journal in groups, this often")
    p.add_argument("--status-seconds", type=float, default=10.0, help="a stream's status line waits so long")
    p.add_argument("--alive-seconds", type=float, default=5.0, help="time between a stream's keep-alives")
    p.add_argument("--patience-seconds", type=float, default=10.0, help="silence that puts the policy server in doubt")
    p.add_argument("--probe-seconds", type=float, default=20.0, help="it must then sample one token within these")
    p.add_argument("--parent", type=int, metavar="PID", help="end when this process, our parent, is gone")
    return p


async def serve(args: argparse.Namespace) -> None:
    """Serve until SIGTERM, SIGINT or the parent's end; prints one JSON line once everything listens."""
    over = asyncio.Event()
    watch_end(over, args.parent)
    journal = Journal(args.journal)
    gate = Gate(args.status_seconds, args.alive_seconds)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=REUSE_SECONDS)
    # Deadlines are the sessions' own.
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    paths = [args.control, door_of(args.control)]
    # An endpoint out in the world may be reachable by the environment's HTTP proxy only.
    trust = not wire.is_loopback(args.upstream)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=trust) as client:
        # By the environment only: every user of a machine can read command lines.
        key = os.environ.get("OPENFORGE_UPSTREAM_KEY")
        upstream = Upstream(args.upstream, key, client, args.api, args.patience_seconds, args.probe_seconds)
        control = Control(gate, journal, upstream, args.model)
        sockets = [unix_listener(path) for path in paths]
        runner = web.AppRunner(control.app(), access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        await web.SockSite(runner, sockets[0]).start()
        tasks = [asyncio.create_task(control.door(sockets[1]))]
        if args.fsync:
            tasks.append(asyncio.create_task(sync(journal, args.fsync)))
        port = None
        if args.port is not None:
            listener = socket.create_server(("127.0.0.1", args.port), backlog=1024)
            listener.setblocking(False)
            port = listener.getsockname()[1]
            await gate.listen(listener)
        print(json.dumps({"pid": os.getpid(), "port": port, "journal": str(journal.path)}), flush=True)
        try:
            await over.wait()
        finally:
            for task in tasks:
                task.cancel()
            await gate.release_all()
            await runner.cleanup()
            for path in paths:
                path.unlink(missing_ok=True)
            journal.close()


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


def main() -> int:
    args = parser().parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(serve(args))
    except OSError as e:
        print(f"the recording proxy cannot start: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
