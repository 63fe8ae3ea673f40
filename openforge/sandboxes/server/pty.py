"""WS /sandboxes/{id}/exec/pty: a command on a terminal inside, with Orchard's frames and close codes."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import fcntl
import json
import os
import signal
import struct
import termios
from typing import TYPE_CHECKING, Any

from aiohttp import WSMsgType, web
from pydantic import BaseModel, Field, ValidationError

from openforge.sandboxes.paths import inside
from openforge.sandboxes.protocol import SandboxError
from openforge.sandboxes.requests import Terminal
from openforge.sandboxes.server.problems import Problem

if TYPE_CHECKING:
    from openforge.sandboxes import LocalSandbox
    from openforge.sandboxes.server.host import Host

BAD_INIT, UNAUTHORIZED, UNKNOWN, NOT_READY, INTERNAL, GONE = 4400, 4401, 4404, 4409, 4500, 4503
CLOSE_CODES = {"unauthorized": UNAUTHORIZED, "forbidden": UNAUTHORIZED, "unknown": UNKNOWN, "not_ready": NOT_READY}
MESSAGE_BYTES = 4 << 20
_INIT_SECONDS = 10.0
_PING_SECONDS = 30.0
_TERM_SECONDS = 5.0  # between SIGTERM and the end of a command whose client is gone
_CHUNK = 1 << 16
_SIGNALS = {name: getattr(signal, f"SIG{name}") for name in ("TERM", "KILL", "INT", "HUP", "QUIT")}


class Init(BaseModel):
    """The client's first frame."""

    type: str = Field(pattern="^init$")
    cmd: list[str] = Field(min_length=1)
    env: dict[str, str] | None = None
    cwd: str | None = None
    rows: int = Field(default=24, ge=1, le=65535)
    cols: int = Field(default=80, ge=1, le=65535)
    login_shell: bool = False


async def serve(host: Host, request: web.Request, refused: Problem | None) -> web.WebSocketResponse:
    """The handler; `refused` is why the client may not."""
    ws = web.WebSocketResponse(
        max_msg_size=MESSAGE_BYTES,
        heartbeat=_PING_SECONDS,
        protocols=request.headers.getall("Sec-WebSocket-Protocol", []),
    )
    await ws.prepare(request)
    try:
        if refused is not None:
            raise refused
        sandbox = await host.running(request.match_info["id"])
        init = await _init(ws)
        terminal = await host.spawner.terminal(_for_spawner(init, sandbox))
    except Problem as e:
        await _give_up(ws, str(e), CLOSE_CODES.get(e.code, GONE if e.code == "sandbox_lost" else BAD_INIT))
        return ws
    except SandboxError as e:
        await _give_up(ws, str(e), INTERNAL)
        return ws
    await _converse(ws, terminal)
    return ws


async def _give_up(ws: web.WebSocketResponse, why: str, code: int) -> None:
    await _say(ws, type="error", message=why)
    await ws.close(code=code, message=why.encode()[:120])  # a close frame holds 123 bytes


async def _say(ws: web.WebSocketResponse, **frame: Any) -> None:
    with contextlib.suppress(ConnectionError):
        await ws.send_str(json.dumps(frame))


async def _init(ws: web.WebSocketResponse) -> Init:
    try:
        message = await ws.receive(_INIT_SECONDS)
        return Init.model_validate_json(message.data if message.type is WSMsgType.TEXT else b"")
    except TimeoutError:
        raise Problem("invalid", f"no init frame came within {_INIT_SECONDS:g} s") from None
    except ValidationError as e:
        first = e.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the frame"
        raise Problem("invalid", f"the first frame is no init: {where}: {first['msg']}") from None


def _for_spawner(init: Init, sandbox: LocalSandbox) -> dict[str, Any]:
    argv = init.cmd
    if init.login_shell:
        argv = [sandbox.shell, "--login", "-i", "-c", '"$@"', "bash", *argv]
    return {
        "holder": sandbox.holder_pid,
        "argv": argv,
        "cwd": inside(init.cwd or "."),
        "env": {**sandbox.env, "TERM": "xterm-256color", **(init.env or {})},
        "limits": sandbox.limits.rlimits(),
        "groups": sandbox.group.processes(),
        "rows": init.rows,
        "cols": init.cols,
    }


async def _converse(ws: web.WebSocketResponse, terminal: Terminal) -> None:
    """Pass frames and the terminal's bytes on until the command has ended or the client is gone."""
    output = asyncio.create_task(_output(ws, terminal))
    try:
        await _say(ws, type="ready", pid=terminal.pid)
        async for message in ws:
            if message.type is not WSMsgType.TEXT:
                continue
            try:
                await _frame(json.loads(message.data), terminal)
            except (ValueError, TypeError, KeyError, AttributeError, struct.error, binascii.Error) as e:
                await _say(ws, type="error", message=f"this frame makes no sense: {e}")
        if not output.done():  # the client went first
            terminal.signal(signal.SIGTERM)
            await asyncio.wait([output], timeout=_TERM_SECONDS)
    finally:
        output.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await output
        terminal.close()  # kills what is left of the command


async def _frame(frame: dict[str, Any], terminal: Terminal) -> None:
    kind = frame["type"]
    if kind == "stdin":
        await terminal.write(base64.b64decode(frame["data"], validate=True))
    elif kind == "signal":
        if frame["sig"] not in _SIGNALS:
            raise ValueError(f"signal {frame['sig']!r}; there are {', '.join(_SIGNALS)}")
        terminal.signal(_SIGNALS[frame["sig"]])
    elif kind == "resize":
        size = struct.pack("HHHH", int(frame["rows"]), int(frame["cols"]), 0, 0)
        fcntl.ioctl(terminal.fd, termios.TIOCSWINSZ, size)
    elif kind == "close":
        terminal.signal(signal.SIGTERM)
    else:
        raise ValueError(f"type {kind!r}")


async def _output(ws: web.WebSocketResponse, terminal: Terminal) -> None:
    """Send what the terminal says, then the exit, then close."""
    loop, wake = asyncio.get_running_loop(), asyncio.Event()
    ended = asyncio.ensure_future(terminal.ended())
    ended.add_done_callback(lambda _: wake.set())
    loop.add_reader(terminal.fd, wake.set)
    try:
        while not ended.done():
            await wake.wait()
            wake.clear()
            while data := _read(terminal.fd):
                await _say(ws, type="stdout", data=base64.b64encode(data).decode())
            if data is None:  # nobody has the terminal open any more; its command may still run
                loop.remove_reader(terminal.fd)
        while data := _read(terminal.fd):
            await _say(ws, type="stdout", data=base64.b64encode(data).decode())
        await _say(ws, type="exit", code=ended.result())
        await ws.close()
    finally:
        loop.remove_reader(terminal.fd)
        ended.cancel()


def _read(fd: int) -> bytes | None:
    """What there is; empty: nothing now; None: nobody holds the other end."""
    try:
        return os.read(fd, _CHUNK) or None
    except BlockingIOError:
        return b""
    except OSError:
        return None
