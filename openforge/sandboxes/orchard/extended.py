"""Commands and files over our own server, `openforge sandboxes serve`: Orchard's REST with what `wire` adds.

A command is the server's job under a name of ours, which the server takes once. Only one whose outputs are wanted as
they come goes `Plain`'s way, because the server keeps a start and an end.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import httpx

from openforge.sandboxes.orchard.plain import GRACE, Plain, name
from openforge.sandboxes.orchard.service import code
from openforge.sandboxes.protocol import (
    Adopter,
    ExecResult,
    FileEntry,
    SandboxError,
    SandboxFileError,
    SandboxLost,
    SandboxUnsupported,
)
from openforge.sandboxes.server.wire import KEY_HEADER, SECONDS_MOST, SIZE_HEADER

_WAIT = 30.0  # seconds of one question whether a command has ended
_FOR_EVER = SECONDS_MOST  # without one the server has five minutes
_PIECE = 8 << 20  # bytes of a file that travels in one call
_ERRNOS = {os.strerror(number): number for number in errno.errorcode} | {"no regular file": errno.EINVAL}
# As `files.write` does it: whatever the agent made of a folder in its place.
_MOVE = 'if [ -d "$1" ] && [ ! -L "$1" ]; then chmod -R u+rwx "$1"; rm -rf "$1"; fi; mv -fT "$0" "$1"'
_FILE_CODES = ("wrong_kind", "unknown", "invalid", "too_large", "disk_full")


class Extended(Plain):
    """What goes on inside one sandbox of our own server."""

    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout: float | None,
        cwd: str,
        env: Mapping[str, str],
        stdin: bytes | None,
        log: Path | None,
        limits: Mapping[str, int],
    ) -> ExecResult:
        """See `Sandbox.exec`; the limits are those that the sandbox was made with."""
        if log is not None:
            if not self.started:
                await self.start()
            return await super().exec(argv, timeout=timeout, cwd=cwd, env=env, stdin=stdin, log=log, limits=limits)
        key = name()
        body = {
            "command": list(argv),
            "timeout_seconds": _FOR_EVER if timeout is None else timeout,
            "cwd": cwd,
            "env": dict(env),
            "stdin": None if stdin is None else base64.b64encode(stdin).decode(),
            "job_id": key,
            "parallel": True,
            "encoding": "base64",
        }
        try:
            job = await self._job(key, body)
        except asyncio.CancelledError:
            with contextlib.suppress(TimeoutError, SandboxError):
                ended = self._service.ask("DELETE", f"/jobs/{key}", sandbox=self._id)
                await asyncio.shield(asyncio.wait_for(ended, GRACE))
            raise
        if job["error"] is not None and not job["timed_out"]:
            raise self._problem(job["code"], job["error"])
        out, err = base64.b64decode(job["stdout"]), base64.b64decode(job["stderr"])
        return ExecResult(job["exit_code"], out, err, job["timed_out"])

    async def _job(self, key: str, body: dict[str, Any]) -> dict[str, Any]:
        """The job of this name when it has ended: submitted, and again where the server has not heard of it."""
        path = f"{self._path}/exec"
        try:
            response = await self._service.once("POST", path, json={**body, "wait": True}, timeout=_WAIT)
            if response.status_code == 503:
                response = await self._service.ask("POST", path, sandbox=self._id, json=body)
        except httpx.TransportError:
            response = await self._asked(key)
        while True:
            if response.status_code == 404 and code(response) == "unknown":
                await self._service.alive(self._id)
                response = await self._service.ask("POST", path, sandbox=self._id, json=body)
            job: dict[str, Any] = self._checked_file(self._service.refused(response)).json()
            if job["status"] in ("succeeded", "failed"):
                return job
            response = await self._asked(key)

    async def _asked(self, key: str) -> httpx.Response:
        query = {"timeout": _WAIT, "encoding": "base64"}
        return await self._service.ask("GET", f"/jobs/{key}/wait", sandbox=self._id, params=query)

    async def end_processes(self) -> None:
        """Kill everything but the first process; commands in flight end by signal 9."""
        response = await self._service.ask("POST", f"{self._path}/end_processes", sandbox=self._id)
        await self._checked(response)
        if self._running:
            await self._call("kill", spare=[], jobs=list(self._running))

    # ---- files -------------------------------------------------------------------------------------------------
    async def write(self, root: str, parts: Sequence[str], data: bytes, mode: int) -> None:
        """Write root/parts: in one call if it is short, else in pieces beside it, which are then renamed."""
        path = "/".join([root, *parts])
        if len(data) <= _PIECE:
            await self._put(path, data, {"mode": f"{mode:04o}"})
            return
        beside = f"{os.path.dirname(path)}/.{name()}.upload"
        for i in range(0, len(data), _PIECE):
            await self._put(beside, data[i : i + _PIECE], {"mode": f"{mode:04o}", "offset": i})
        command = ["/bin/sh", "-c", _MOVE, beside, path]
        moved = await self.exec(command, timeout=None, cwd="/", env={}, stdin=None, log=None, limits={})
        if moved.exit_code != 0:
            raise SandboxFileError(f"{path} inside the sandbox: {moved.stderr.decode(errors='replace').strip()}")

    async def _put(self, path: str, data: bytes, query: dict[str, Any]) -> None:
        response = await self._service.ask(
            "PUT", f"{self._path}/files/raw", sandbox=self._id, params={"path": path, **query}, content=data
        )
        await self._found(response)

    async def read(self, path: str, limit: int) -> bytes:
        """A regular file of at most `limit` bytes, in pieces."""
        data, size = bytearray(), 1
        while len(data) < size:
            query: dict[str, Any] = {"path": path, "offset": len(data), "length": _PIECE}
            response = await self._service.ask("GET", f"{self._path}/files/raw", sandbox=self._id, params=query)
            await self._found(response)
            size = int(response.headers[SIZE_HEADER])
            if size > limit:
                raise SandboxFileError(f"{path} inside the sandbox: more than {limit} bytes", errno.EFBIG)
            if not response.content and len(data) < size:
                raise SandboxFileError(f"{path} inside the sandbox: it changed while it was read")
            data += response.content
        return bytes(data)

    async def entries(self, path: str) -> list[FileEntry]:
        """Entries of a folder, by name."""
        query = {"path": path}
        response = await self._service.ask("GET", f"{self._path}/files/list", sandbox=self._id, params=query)
        await self._found(response)
        return [FileEntry(f["name"], f["type"], f["size"], f["mtime"]) for f in response.json()["files"]]

    async def _found(self, response: httpx.Response) -> None:
        """A success, or the error that it is: 404 may be the file's or the sandbox's."""
        if response.status_code == 404:
            await self._service.alive(self._id)
        self._checked_file(response)

    def _checked_file(self, response: httpx.Response) -> httpx.Response:
        if not response.is_success:
            body = response.json()
            raise self._problem(body.get("code"), body["detail"])
        return response

    def _problem(self, kind: str | None, text: Any) -> SandboxError:
        """What the server says, as an error of the protocol; its sentences end in the system's own words."""
        if kind == "sandbox_lost":
            return SandboxLost(str(text))
        if kind in _FILE_CODES and "inside the sandbox" in str(text):
            return SandboxFileError(str(text), _ERRNOS.get(str(text).rpartition(": ")[2]))
        return SandboxError(f"{self._service.url} about sandbox {self._id}: {text}")

    # ---- ways out and in ---------------------------------------------------------------------------------------
    async def route(self, target: Adopter, episode_id: str, port: int) -> str:
        """A listener at 127.0.0.1:`port` inside that leads to the target's public address."""
        public = urlsplit(target.public_url(episode_id))
        if public.scheme != "http" or public.hostname is None:
            raise SandboxUnsupported(
                f"{public.geturl()} cannot be reached through 127.0.0.1 inside: give the server an http address of the "
                "proxy (OPFORGE_VLLM_PROXY_PUBLIC_SCHEME); what it carries to the sandbox stays on its machine"
            )
        host = f"[{public.hostname}]" if ":" in public.hostname else public.hostname
        body = {"port": port, "target": f"{host}:{public.port or 80}"}
        response = await self._service.ask("POST", f"{self._path}/routes", sandbox=self._id, json=body)
        await self._checked(response)
        return f"http://127.0.0.1:{port}{public.path}"

    async def connect(self, port: int) -> socket.socket:
        """A connection to 127.0.0.1:`port` inside, over a WebSocket of the server."""
        session = aiohttp.ClientSession()
        headers = {} if self._service.key is None else {KEY_HEADER: self._service.key}
        try:
            path = f"{self._service.url}{self._path}/ports/{port}"
            websocket = await session.ws_connect(path, headers=headers, max_msg_size=0)
        except aiohttp.WSServerHandshakeError as e:
            await session.close()
            if e.status == 502:
                raise ConnectionRefusedError(errno.ECONNREFUSED, f"nobody listens on port {port} inside") from None
            await self._service.alive(self._id)
            raise SandboxError(f"no way in to port {port} of sandbox {self._id}: {e.status} {e.message}") from None
        except BaseException as e:
            await session.close()
            if isinstance(e, aiohttp.ClientError):
                raise SandboxError(f"no way in to port {port} of sandbox {self._id}: {e}") from None
            raise
        ours, theirs = socket.socketpair()
        pump = asyncio.create_task(_pump(session, websocket, ours))
        self._pumps.add(pump)
        pump.add_done_callback(self._pumps.discard)
        return theirs


async def _pump(
    session: aiohttp.ClientSession, websocket: aiohttp.ClientWebSocketResponse, sock: socket.socket
) -> None:
    """Carry bytes both ways until either side ends."""
    reader, writer = await asyncio.open_unix_connection(sock=sock)

    async def up() -> None:
        while data := await reader.read(1 << 16):
            await websocket.send_bytes(data)

    async def down() -> None:
        async for message in websocket:
            if message.type is aiohttp.WSMsgType.BINARY:
                writer.write(message.data)
                await writer.drain()

    tasks = [asyncio.create_task(up()), asyncio.create_task(down())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        writer.close()
        await websocket.close()
        await session.close()
