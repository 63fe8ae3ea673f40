"""Commands and files over Orchard's REST alone: each call sends `inside.py` along and runs it, under a name of ours.

Every call may arrive twice, or late: it names itself, and inside the sandbox the name decides (see `inside`). So a lost
answer, a restarted orchestrator and a second replica cost time and never a second run.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import json
import secrets
import socket
import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import httpx

from openforge.sandboxes import files
from openforge.sandboxes.join import BASE_ENV, HOME, WORK
from openforge.sandboxes.orchard import inside, supervisor
from openforge.sandboxes.orchard.service import Again, Service, said
from openforge.sandboxes.protocol import (
    Adopter,
    ExecResult,
    FileEntry,
    SandboxError,
    SandboxFileError,
    SandboxLost,
    SandboxUnsupported,
)

GRACE = 15.0  # seconds beyond a command's time limit: a supervisor that the agent has stopped cannot keep it
QUICK = 1.0  # seconds that a command has to end within the call that starts it; the sandbox runs no other meanwhile
LONGEST_POLL = 2.0
LOOK = 15.0  # seconds after which the supervisor itself is asked after, not only its files
_ANSWERLESS = 3  # calls that may end without an answer of ours before it counts as a fault of the image
_MESSAGE = 64 << 10  # bytes of a message within the command line, whose limit is 128 KiB; a longer one goes in files
_CALL_SECONDS = 600  # of one call, which should end within seconds: Orchard's own time-out kills the sandbox
_SERVICE_PYTHON = "/opt/sandbox-agent"

# The service's own Python needs its own dynamic linker; an image's own Python is second best.
_LAUNCH = """A=%(agent)s
if [ -x $A/bin/python3 ]; then
L=$(ls $A/lib/ld-linux-* 2>/dev/null | head -n 1); export PYTHONHOME=$A LD_LIBRARY_PATH=$A/lib
P="${L:+$L --library-path $A/lib} $A/bin/python3 -s"
elif command -v python3 >/dev/null; then P='python3 -I'
else echo; echo '%(mark)s{"error": "the image has no Python, and %(agent)s none either", "errno": null}'; exit; fi
exec $P -S -c '%(loader)s' '%(message)s'"""
_LOADER = (
    "import sys; sys.path = [p for p in sys.path if p]\n"  # nothing of the current folder, which is the agent's
    "import base64, json, types, zlib\n"
    'for n, s in json.loads(zlib.decompress(base64.b64decode("%s"))).items():\n'
    " sys.modules[n] = types.ModuleType(n)\n"
    ' exec(compile(s, n, "exec"), sys.modules[n].__dict__)\n'
    'sys.modules["inside"].main(sys.argv[1])'
)


@cache
def _loader() -> str:
    sources = {m.__name__.rpartition(".")[2]: Path(m.__file__ or "").read_text() for m in (files, supervisor, inside)}
    return _LOADER % base64.b64encode(zlib.compress(json.dumps(sources).encode(), 9)).decode()


class Plain:
    """What goes on inside one sandbox."""

    def __init__(self, service: Service, sandbox_id: str) -> None:
        self._service = service
        self._id = sandbox_id
        self._path = f"/sandboxes/{sandbox_id}"
        self._done: list[str] = []  # calls whose files nobody needs any more
        self._running: set[str] = set()
        self._base = ""
        self._spare: list[list[int]] = []
        self._pumps: set[asyncio.Task[None]] = set()  # of connections into it

    @property
    def started(self) -> bool:
        """Whether `start` has been called."""
        return bool(self._base)

    async def start(self, markers: Sequence[str] = ()) -> dict[str, Any]:
        """The first call, before any agent runs: {uid, kernel, markers}, `markers` being those paths that exist."""
        found = await self._call("hello", folders=[WORK, HOME], markers=list(markers))
        self._base, self._spare = found["base"], found["processes"]
        return found

    # ---- commands ----------------------------------------------------------------------------------------------
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
        """See `Sandbox.exec`. The environment is the image's, with a home of our own."""
        key = name()
        own = {k: v for k, v in BASE_ENV.items() if k != "PATH"}
        self._running.add(key)
        try:
            state = await self._call(
                "run",
                key,
                stdin or b"",
                argv=list(argv),
                cwd=cwd,
                env={**own, **env},
                timeout=timeout,
                limits=dict(limits),
                log=log is not None,
                wait=0.0 if log is not None else QUICK,
                path=cwd,
            )
            return await self._ended(key, state, timeout, log)
        except asyncio.CancelledError:
            with suppress(TimeoutError, SandboxError):
                await asyncio.shield(asyncio.wait_for(self._call("end", key), GRACE))
            raise
        finally:
            self._running.discard(key)
            self._done.append(key)

    async def _ended(self, key: str, state: dict[str, Any], timeout: float | None, log: Path | None) -> ExecResult:
        loop = asyncio.get_running_loop()
        patience = None if timeout is None else loop.time() + timeout + GRACE
        looked, wait, pieces = loop.time(), 0.1, 0
        while True:
            if log is not None and state["pieces"] > pieces:
                pieces, wait = await self._append(key, log, pieces, state["pieces"]), 0.1
            if (ended := state["ended"]) is not None:
                return ExecResult(ended["exit"], *await self._outputs(key, ended), ended["timed_out"])
            if patience is not None and loop.time() > patience:
                ended = (await self._call("end", key))["ended"]
                return ExecResult(None, *await self._outputs(key, ended), True)
            await asyncio.sleep(wait)
            wait = min(2 * wait, LONGEST_POLL)
            content = await self._download(f"{self._base}/{key}/state")
            if content is not None and loop.time() - looked < LOOK:
                state = json.loads(content)
            else:
                looked, state = loop.time(), await self._call("look", key)

    async def _outputs(self, key: str, ended: dict[str, Any]) -> tuple[bytes, bytes]:
        found = []
        for which in ("out", "err"):
            inline = ended.get(which, "")
            path = f"{self._base}/{key}/{which}"
            data = await self._download(path) if inline is None else base64.b64decode(inline)
            if data is None:
                raise SandboxError(f"the output of a command is no longer in sandbox {self._id}: something removed it")
            found.append(data)
        return found[0], found[1]

    async def _append(self, key: str, log: Path, first: int, end: int) -> int:
        for i in range(first, end):
            data = await self._download(f"{self._base}/{key}/log.{i}")
            if data is None:
                raise SandboxError(f"the log of a command is no longer in sandbox {self._id}: something removed it")
            with open(log, "ab") as f:
                f.write(data)
        return end

    async def end_processes(self) -> None:
        """Kill everything but what the service itself runs; commands in flight end by signal 9."""
        jobs = list(self._running)
        for _ in range(3):
            if (await self._call("kill", spare=self._spare, jobs=jobs))["left"] == 0:
                return
        raise SandboxError(f"processes of sandbox {self._id} do not die")

    # ---- files -------------------------------------------------------------------------------------------------
    async def write(self, root: str, parts: Sequence[str], data: bytes, mode: int) -> None:
        """Write root/parts, replacing whatever is in its place."""
        path = "/".join([root, *parts])
        await self._call("write", None, data, root=root, parts=list(parts), mode=mode, path=path)

    async def read(self, path: str, limit: int) -> bytes:
        """A regular file of at most `limit` bytes."""
        key = name()
        try:
            found = await self._call("stage", key, path=path, limit=limit, inline=_MESSAGE)
            if "content" in found:
                return base64.b64decode(found["content"])
            data = bytearray()
            async for piece in self._pieces(key, found["pieces"]):
                data += piece
        finally:
            self._done.append(key)
        if hashlib.sha256(data).hexdigest() != found["sha256"]:
            raise SandboxError(f"{path} of sandbox {self._id} arrived damaged")
        return bytes(data)

    async def _pieces(self, key: str, count: int) -> AsyncIterator[bytes]:
        for i in range(count):
            piece = await self._download(f"{self._base}/{key}.out.{i}")
            if piece is None:
                raise SandboxError(f"a file of sandbox {self._id} was removed while it was read")
            yield piece

    async def entries(self, path: str) -> list[FileEntry]:
        """Entries of a folder, by name."""
        return [FileEntry(**e) for e in (await self._call("list", path=path))["entries"]]

    async def unpack(self, archive: bytes, inside_path: str) -> None:
        """Put what an archive calls "root" at a path."""
        await self._call("unpack", None, archive, inside=inside_path, path=inside_path)

    # ---- ways out and in -----------------------------------------------------------------------------------------
    async def route(self, target: Adopter, episode_id: str, port: int) -> str:
        """The public address: a pod has no way but the cluster's network."""
        return target.public_url(episode_id)

    async def connect(self, port: int) -> socket.socket:
        """None: Orchard's REST has no way into a port."""
        raise SandboxUnsupported(
            f"Orchard has no way in to port {port} of sandbox {self._id}: services of an environment need "
            "`openforge sandboxes serve` or local sandboxes"
        )

    # ---- the wire ----------------------------------------------------------------------------------------------
    async def _call(self, op: str, key: str | None = None, payload: bytes = b"", **fields: Any) -> dict[str, Any]:
        """Have an operation carried out, once however often it is sent; what it answers.

        Raises:
            SandboxFileError: it failed on a file.
            SandboxError: the image cannot run it.
            SandboxLost: the sandbox is gone.
        """
        key = key or name()
        done, self._done = self._done, []
        request = {"op": op, "id": key, "done": done, **fields}
        raw = json.dumps(request).encode() + b"\n" + payload
        for _ in range(2):
            reply = await self._run(await self._message(raw))
            if "damaged" not in reply:
                break
        else:
            raise SandboxError(f"an upload to sandbox {self._id} arrives damaged: {reply['damaged']}")
        if op not in ("run", "end", "look", "stage"):
            self._done.append(key)
        if "error" in reply:
            raise SandboxFileError(reply["error"], reply["errno"])
        return reply

    async def _message(self, raw: bytes) -> str:
        """How a message is named on the command line: itself, or the pieces that it is laid down in."""
        if len(raw) * 4 // 3 <= _MESSAGE:
            return base64.b64encode(raw).decode()
        key, size = name(), inside.PIECE
        for i in range(0, len(raw), size):
            content = base64.b64encode(raw[i : i + size]).decode()
            body = {"path": f"{self._base}/{key}.in.{i // size}", "content": content}
            response = await self._service.ask("POST", f"{self._path}/files", sandbox=self._id, json=body)
            await self._checked(response)
        self._done.append(key)
        return f"@{key} {(len(raw) + size - 1) // size} {hashlib.sha256(raw).hexdigest()}"

    async def _run(self, message: str) -> dict[str, Any]:
        """Run `inside.main` until it gives an answer: a call may be killed, or its answer be lost, at any time."""
        fills = {"agent": _SERVICE_PYTHON, "mark": inside.MARK, "loader": _loader(), "message": message}
        body = {"command": _LAUNCH % fills, "timeout_seconds": _CALL_SECONDS, "cwd": "/", "wait": True}
        again, answerless = Again(self._service.patience), 0
        while True:
            response = await self._service.ask("POST", f"{self._path}/exec", sandbox=self._id, json=body)
            if response.status_code == 404:
                problem = said(response)  # unknown, or its agent is not ready yet
            else:
                job = (await self._checked(response)).json()
                _, mark, line = job.get("stdout", "").rpartition(f"\n{inside.MARK}")
                if mark:
                    reply: dict[str, Any] = json.loads(line)
                    return reply
                problem = job.get("error") or f"exit code {job.get('exit_code')}, {job.get('stderr', '')[-300:]!r}"
                # No exit code: the service lost sight of it. One: it ran, and could not say a word.
                answerless += job.get("exit_code") is not None
            await self._service.alive(self._id)
            if answerless == _ANSWERLESS:
                raise SandboxError(f"sandbox {self._id} cannot run our side of a call: {problem}")
            if not await again.wait():
                raise SandboxLost(f"sandbox {self._id} does not answer for {again.patience:.0f} s: {problem}")

    async def _download(self, path: str) -> bytes | None:
        """A file of ours; None if it is not there."""
        response = await self._service.ask("GET", f"{self._path}/files", sandbox=self._id, params={"path": path})
        if response.status_code == 404:
            await self._service.alive(self._id)
            return None
        content: str = (await self._checked(response)).json()["content"]
        try:
            return base64.b64decode(content, validate=True)
        except binascii.Error as e:
            raise SandboxError(f"{path} of sandbox {self._id} arrived damaged: {e}") from None

    async def _checked(self, response: httpx.Response) -> httpx.Response:
        """The answer, which must be a success."""
        if not response.is_success:
            await self._service.alive(self._id)
            raise SandboxError(f"{self._service.url} answers {said(response)} about sandbox {self._id}")
        return response


def name() -> str:
    """A new name of a call."""
    return secrets.token_hex(12)
