"""HTTP to a service inside a sandbox: httpcore over connections that the sandbox opens."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable
from typing import Any

import httpcore

from openforge.sandboxes.protocol import Sandbox

BODY_MOST = 8 << 20  # of an answer


class Unreachable(ConnectionError):
    """A service gave no answer; the message says why."""


async def request(
    sandbox: Sandbox, method: str, url: str, body: bytes | None = None, seconds: float = 30.0
) -> tuple[int, bytes]:
    """Ask the service at a URL whose host stands for the sandbox's own; its status and body.

    Raises:
        Unreachable: nobody listens, or no whole answer came in time.
        SandboxLost: the sandbox is gone.
    """
    headers = [(b"content-type", b"application/json")] if body is not None else []
    try:
        async with asyncio.timeout(seconds), httpcore.AsyncConnectionPool(network_backend=_Inside(sandbox)) as pool:
            # One connection a request: a service that is single-threaded must not be held by an idle one.
            headers.append((b"connection", b"close"))
            async with pool.stream(method, url, headers=headers, content=body) as response:
                read = b""
                async for piece in response.aiter_stream():
                    read += piece
                    if len(read) > BODY_MOST:
                        raise Unreachable(f"its answer has more than {BODY_MOST >> 20} MiB")
                return response.status, read
    except TimeoutError:
        raise Unreachable(f"it gave no answer in {seconds:g} s") from None
    except ConnectionRefusedError:
        raise Unreachable("nobody listens on its port") from None
    except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.UnsupportedProtocol) as e:
        raise Unreachable(f"{type(e).__name__}: {e}") from None


class _Inside(httpcore.AsyncNetworkBackend):
    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        connection = await self._sandbox.connect(port)
        return _Stream(*await asyncio.open_connection(sock=connection))


class _Stream(httpcore.AsyncNetworkStream):
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        try:
            return await self._reader.read(max_bytes)
        except OSError as e:
            raise httpcore.ReadError(str(e)) from e

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        try:
            self._writer.write(buffer)
            await self._writer.drain()
        except OSError as e:
            raise httpcore.WriteError(str(e)) from e

    async def aclose(self) -> None:
        self._writer.close()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        raise httpcore.UnsupportedProtocol("services of an episode speak plain HTTP")

    def get_extra_info(self, info: str) -> Any:
        return None
