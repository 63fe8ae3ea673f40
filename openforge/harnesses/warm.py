"""A harness imported once outside every sandbox and forked per episode into the episode's own: the client.

What costs seconds of imports a process costs a fork this way. The forked process joins the episode's sandbox
before it reads its job (see warm_mini.py): it has that sandbox's files, network and processes, and nothing of
the host.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openforge.harnesses.base import LOG_BYTES, Context, Ended, HarnessError
from openforge.sandboxes import join as join_module
from openforge.sandboxes.local_sandbox import LocalSandbox
from openforge.sandboxes.protocol import Sandbox, SandboxLost

START_SECONDS, STOP_SECONDS = 120.0, 5.0
JOB = ".job.json"  # below $HOME inside, removed when it has been read


class WarmDied(SandboxLost):
    """The warm process died, and the episodes forked from it with it."""


class WarmHarness:
    """Owner of one warm process; it is started again when it has died, and says so to every episode it had.

    Args:
        folder: the harness's software environment.
        env: environment of the process: what is the same in all episodes. Nothing of ours is inherited.
        version: the pinned version, which the process must report.
    """

    def __init__(self, folder: Path, env: Mapping[str, str], version: str) -> None:
        self._python, self._env, self._version = folder / "bin" / "python", dict(env), version
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._home: tempfile.TemporaryDirectory[str] | None = None
        self._starting = asyncio.Lock()
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.starts = 0

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._alive() and self._process is not None else None

    def _alive(self) -> bool:
        return self._reader is not None and not self._reader.done()

    async def start(self) -> None:
        """Start the process unless it runs; returns when it is ready to fork.

        Raises:
            HarnessError: it ended or said nothing in time, with the end of what it printed.
        """
        async with self._starting:
            if self._alive():
                return
            await self._end()
            self._home = tempfile.TemporaryDirectory(prefix="openforge-warm-")
            errors = Path(self._home.name) / "errors"
            script = Path(__file__).with_name("warm_mini.py")
            with errors.open("wb") as stderr:
                self._process = await asyncio.create_subprocess_exec(
                    str(self._python),
                    "-I",
                    str(script),
                    join_module.__file__,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=stderr,
                    cwd=self._home.name,
                    env={**self._env, "HOME": self._home.name, "TMPDIR": self._home.name},
                    start_new_session=True,
                )
            self.starts += 1
            told: dict[str, Any] = {}
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(START_SECONDS):
                    told = await self._line()
            if told.get("version") != self._version:
                tail = errors.read_bytes()[-500:].decode(errors="replace")
                await self._end()
                raise HarnessError(
                    f"the warm harness did not get ready as version {self._version}: "
                    f"it said {told or 'nothing'}; {tail}"
                )
            self._reader = asyncio.create_task(self._read())

    async def run(
        self, sandbox: Sandbox, argv: Sequence[str], env: Mapping[str, str], ctx: Context, keep_log: Path | None = None
    ) -> Ended:
        """Run the harness's command line in a process forked into the sandbox.

        Args:
            keep_log: new file for what it prints, which stays.

        Raises:
            WarmDied: the warm process died under the episode.
            SandboxLost: the sandbox cannot be joined: it is gone.
        """
        if not isinstance(sandbox, LocalSandbox):
            raise HarnessError("launch 'fork' needs a sandbox of this machine; use launch 'command' here")
        job = {"argv": list(argv), "env": dict(env), "cwd": ctx.cwd}
        await sandbox.upload_content(json.dumps(job).encode(), f"{ctx.home}/{JOB}", 0o600)
        await self.start()
        ident = next(self._ids)
        told: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[ident] = told
        assert self._home is not None
        log = keep_log or Path(self._home.name) / f"{ident}.log"
        timed_out = False
        try:
            self._send(
                id=ident,
                holder=sandbox.holder_pid,
                job=f"{ctx.home}/{JOB}",
                log=str(log),
                limits=sandbox.limits.rlimits(),
            )
            done, _ = await asyncio.wait([told], timeout=ctx.seconds)
            if not done:
                timed_out = True
                self._send(id=ident, kill=True)
            end = await told
            return Ended(None if timed_out else end["exit"], _tail(log), end["cpu"])
        except asyncio.CancelledError:
            self._send(id=ident, kill=True)
            raise
        finally:
            self._waiting.pop(ident, None)
            if keep_log is None:
                log.unlink(missing_ok=True)

    async def close(self) -> None:
        """End the process and every episode forked from it."""
        async with self._starting:
            await self._end()

    # ---- the pipe ----------------------------------------------------------------------------------
    def _send(self, **order: object) -> None:
        if self._alive() and self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")

    async def _line(self) -> dict[str, Any]:
        """The next answer; empty at the end of the stream."""
        assert self._process is not None and self._process.stdout is not None
        line = await self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line.endswith(b"\n") else {}
        return answer

    async def _read(self) -> None:
        """Hand answers on until the process ends."""
        assert self._process is not None
        answers = asyncio.create_task(self._answers())
        try:
            await _ended(self._process.pid)
        finally:
            answers.cancel()
            died = f"the warm harness process died: {self._errors() or 'no output'}"
            for told in self._waiting.values():
                if not told.done():
                    told.set_exception(WarmDied(died))

    async def _answers(self) -> None:
        while answer := await self._line():
            told = self._waiting.get(answer["id"])
            if told is None or told.done():
                continue
            if "error" in answer:
                told.set_exception(SandboxLost(f"the harness was not started: {answer['error']}"))
            else:
                told.set_result(answer)

    def _errors(self) -> str:
        if self._home is None:
            return ""
        with contextlib.suppress(OSError):
            return (Path(self._home.name) / "errors").read_bytes()[-500:].decode(errors="replace").strip()
        return ""

    async def _end(self) -> None:
        if self._process is not None:
            if self._process.stdin is not None:
                self._process.stdin.close()  # it ends its episodes and itself
            if self._reader is None or not self._reader.done():
                await self._stop(self._process)
            self._process = None
        if self._reader is not None:
            await asyncio.gather(self._reader, return_exceptions=True)
            self._reader = None
        if self._home is not None:
            self._home.cleanup()
            self._home = None

    async def _stop(self, process: asyncio.subprocess.Process) -> None:
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await _ended(process.pid)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await _ended(process.pid)


async def _ended(pid: int) -> None:
    """Wait for a child's end. Not by `Process.wait`, which on this Python also waits for its pipes to be closed: the
    processes that it leaves behind hold them until their sandboxes are deleted.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return  # dead and reaped
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    loop.add_reader(pidfd, _settle, ended)
    try:
        await ended
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _tail(path: Path) -> bytes:
    with path.open("rb") as f:
        f.seek(max(0, path.stat().st_size - LOG_BYTES))
        return f.read()
