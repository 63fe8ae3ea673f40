"""A TCP relay for a host that nobody can connect to, such as a GPU node behind a firewall.

This file is self-contained (standard library only, Python >= 3.11), so that it can be copied to the relay's machine:

    python3 relay.py serve --public 0.0.0.0:8443 --hosts 0.0.0.0:7000     # where both sides can connect to
    python3 relay.py join --relay RELAY:7000 --to 127.0.0.1:8080          # beside the recording proxy

`join` keeps a few connections open to the relay; each carries the bytes of one client as they are, so TLS that the
proxy speaks ends at the client, not here. Both sides know OPENFORGE_RELAY_KEY: the relay asks for its HMAC of a number
drawn for the connection. An address is HOST:PORT, [IPv6]:PORT or unix:PATH.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import hmac
import os
import secrets
import signal
import socket
import sys
from collections import deque
from collections.abc import Awaitable, Callable

KEY = "OPENFORGE_RELAY_KEY"
READY = 4  # connections that wait for a client
WAIT_SECONDS = 20.0  # a client waits so long for one of them
ANSWER_SECONDS = 3.0  # a host that says nothing for so long is gone, whatever TCP thinks
HELLO_SECONDS = 10.0
RETRY_SECONDS = 1.0
GO = b"go\n"

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class RelayError(ValueError):
    """A wrong address or key; one sentence."""


def address(text: str) -> tuple[str, int] | str:
    """HOST:PORT as a pair, unix:PATH as the path.

    Raises:
        RelayError: it is neither.
    """
    if text.startswith("unix:") and len(text) > len("unix:"):
        return text.removeprefix("unix:")
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isascii() and port.isdecimal() and int(port) < 65536):
        raise RelayError(f"address {text!r} must be HOST:PORT or unix:PATH")
    return host.strip("[]"), int(port)


async def connect(to: tuple[str, int] | str) -> Stream:
    stream = await (asyncio.open_unix_connection(to) if isinstance(to, str) else asyncio.open_connection(*to))
    keep_alive(stream)
    return stream


async def listen(at: tuple[str, int] | str, serve: Callable[..., Awaitable[None]]) -> asyncio.Server:
    return await (asyncio.start_unix_server(serve, at) if isinstance(at, str) else asyncio.start_server(serve, *at))


def keep_alive(stream: Stream) -> None:
    """Have the kernel find out that the other end is gone: an idle connection says nothing for hours."""
    sock = stream[1].get_extra_info("socket")
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)


def proof(key: str, nonce: bytes) -> bytes:
    return hmac.new(key.encode(), nonce.strip(), hashlib.sha256).hexdigest().encode() + b"\n"


async def splice(a: Stream, b: Stream) -> None:
    """Copy both ways until one side ends; then end both, which aborts what a client has hung up on."""
    ways = {asyncio.create_task(copy(a[0], b[1])), asyncio.create_task(copy(b[0], a[1]))}
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        a[1].close()
        b[1].close()


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()


class Relay:
    """The side that everybody connects to."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._idle: deque[Stream] = deque()
        self._more = asyncio.Condition()

    async def host(self, *stream: *Stream) -> None:
        """A connection from `join`: keep it for a client if it knows the key."""
        keep_alive(stream)
        nonce = secrets.token_hex(32).encode() + b"\n"
        said = b""
        with contextlib.suppress(OSError, ValueError, asyncio.IncompleteReadError):
            async with asyncio.timeout(HELLO_SECONDS):
                stream[1].write(nonce)
                said = await stream[0].readuntil(b"\n")
        if not hmac.compare_digest(said, proof(self._key, nonce)):
            stream[1].close()
            return
        async with self._more:
            self._idle.append(stream)
            self._more.notify()

    async def client(self, *stream: *Stream) -> None:
        """A client: give it one of the host's connections, or hang up."""
        keep_alive(stream)
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                host = await self._take()
        except TimeoutError:
            stream[1].close()
            return
        await splice(stream, host)

    async def _take(self) -> Stream:
        while True:
            async with self._more:
                await self._more.wait_for(lambda: self._idle)
                host = self._idle.popleft()
            with contextlib.suppress(OSError, ValueError, asyncio.IncompleteReadError):
                async with asyncio.timeout(ANSWER_SECONDS):
                    host[1].write(GO)
                    if await host[0].readuntil(b"\n") == GO:
                        return host
            host[1].close()


async def join(relay: tuple[str, int] | str, to: tuple[str, int] | str, key: str) -> None:
    """Keep `READY` connections at the relay, for ever."""
    said: set[str] = set()
    clients: set[asyncio.Task[None]] = set()

    async def one() -> None:
        while True:
            stream: Stream | None = None
            try:
                stream = await connect(relay)
                async with asyncio.timeout(HELLO_SECONDS):
                    stream[1].write(proof(key, await stream[0].readuntil(b"\n")))
                if await stream[0].readline() != GO:
                    raise OSError(f"it hung up; is its {KEY} another one?")
                said.clear()
                task = asyncio.create_task(carry(stream, to))
                clients.add(task)
                task.add_done_callback(clients.discard)
                stream = None
            except (OSError, ValueError, asyncio.IncompleteReadError) as e:
                if str(e) not in said:  # not once a second
                    said.add(str(e))
                    print(f"relay: {e or type(e).__name__}; trying again", file=sys.stderr, flush=True)
                await asyncio.sleep(RETRY_SECONDS)
            finally:
                if stream is not None:
                    stream[1].close()

    await asyncio.gather(*(one() for _ in range(READY)))


async def carry(stream: Stream, to: tuple[str, int] | str) -> None:
    stream[1].write(GO)
    try:
        target = await connect(to)
    except OSError as e:
        print(f"relay: {e}", file=sys.stderr, flush=True)
        stream[1].close()
        return
    await splice(stream, target)


async def serve(public: tuple[str, int] | str, hosts: tuple[str, int] | str, key: str) -> None:
    relay = Relay(key)
    servers = [await listen(public, relay.client), await listen(hosts, relay.host)]
    print("relay: listening", flush=True)
    await asyncio.gather(*(s.serve_forever() for s in servers))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sides = parser.add_subparsers(dest="side", required=True)
    side = sides.add_parser("serve", help="the relay")
    side.add_argument("--public", required=True, metavar="ADDRESS", help="where clients connect")
    side.add_argument("--hosts", required=True, metavar="ADDRESS", help="where `join` connects")
    side = sides.add_parser("join", help="beside what clients want to reach")
    side.add_argument("--relay", required=True, metavar="ADDRESS", help="its --hosts")
    side.add_argument("--to", required=True, metavar="ADDRESS", help="what clients want to reach")
    args = parser.parse_args(argv)
    key = os.environ.get(KEY, "")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if len(key) < 16:
            raise RelayError(f"{KEY} must be set to the same secret of at least 16 characters on both sides")
        if args.side == "serve":
            asyncio.run(serve(address(args.public), address(args.hosts), key))
        else:
            asyncio.run(join(address(args.relay), address(args.to), key))
    except (RelayError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
