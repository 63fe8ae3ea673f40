"""Jobs: taken once, run one after another in a sandbox, found again after a kill of the server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Coroutine, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from openforge.sandboxes.owner import start_time
from openforge.sandboxes.paths import inside
from openforge.sandboxes.protocol import SandboxLost
from openforge.sandboxes.requests import Request, Spawner, close_all, readable
from openforge.sandboxes.server import problems, record
from openforge.sandboxes.server.problems import Problem
from openforge.sandboxes.server.record import Job

if TYPE_CHECKING:
    from openforge.sandboxes import LocalSandbox

_DEFAULT_SECONDS = 300.0
_NO_RESULT = "the command ended without a result: what kept it was killed"
_ANSWER_ONLY = {"wait", "encoding", "job_id"}  # fields of a request that are not part of what is run


class Host(Protocol):
    """What jobs ask of the sandboxes they run in."""

    @property
    def spawner(self) -> Spawner:
        """What starts commands."""

    async def running(self, sandbox_id: str) -> LocalSandbox:
        """The sandbox, once it is ready; `Problem`."""


class Jobs:
    """The jobs of a server, on disk below `folder`; one that has ended is kept for `ttl` seconds."""

    def __init__(self, folder: Path, host: Host, ttl: float) -> None:
        self._folder, self._host, self._ttl = folder, host, ttl
        folder.mkdir(exist_ok=True)
        self._folder_fd = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        self.jobs: dict[str, Job] = {}
        self._keys: dict[tuple[str, str], Job] = {}
        self._turns: dict[str, asyncio.Lock] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._channels: dict[str, Request] = {}

    # ---- taking ------------------------------------------------------------------------------------------------
    def submit(self, sandbox_id: str, request: dict[str, Any], job_id: str | None, key: str | None) -> Job:
        """Take a job, or find the one that was taken under this name.

        Args:
            request: an `ExecRequest` as a dictionary.

        Raises:
            Problem: the name was used for something else; the disk is full.
        """
        request = {k: v for k, v in request.items() if k not in _ANSWER_ONLY}
        known = self.jobs.get(job_id or "") or self._keys.get((sandbox_id, key or ""))
        if known is not None:
            if (known.sandbox_id, known.request) != (sandbox_id, request):
                name = f"job_id {job_id!r}" if known.job_id == job_id else f"Idempotency-Key {key!r}"
                raise Problem("exists", f"{name} was used for another command; a new command takes a new name")
            return known
        job = Job(job_id or secrets.token_hex(8), sandbox_id, request, key, time.time())
        try:
            fd = record.create(self._path(job), job)
        except OSError as e:
            if e.errno in problems.FULL:
                raise Problem("disk_full", f"the server's disk is full: {self._folder}") from None
            raise
        self._know(job)
        self._go(job, self._run(job, fd))
        return job

    def get(self, job_id: str) -> Job:
        """A job by its id; `Problem` if there is none."""
        if job_id not in self.jobs:
            raise Problem("unknown", f"job {job_id} is unknown here: never submitted, or removed with its sandbox")
        return self.jobs[job_id]

    def outputs(self, job: Job) -> tuple[bytes, bytes]:
        """Standard output and error as far as they are kept; of a running job, their start."""
        return record.outputs(self._folder, job.job_id)

    def of(self, sandbox_id: str) -> list[Job]:
        """The jobs of a sandbox."""
        return [j for j in self.jobs.values() if j.sandbox_id == sandbox_id]

    def busy(self, sandbox_id: str) -> bool:
        """Whether a job of the sandbox waits or runs."""
        return any(j.end is None for j in self.of(sandbox_id))

    async def ended(self, sandbox_id: str, local: LocalSandbox) -> None:
        """End every process of a sandbox, those of jobs too that are still on their way in."""
        while True:
            pending = [j for j in self.of(sandbox_id) if j.end is None and j.started_at is not None]
            await local.end_processes()
            if not pending:
                return
            waits = [asyncio.ensure_future(j.done.wait()) for j in pending]
            await asyncio.wait(waits, timeout=0.05)
            for wait in waits:
                wait.cancel()

    def _know(self, job: Job) -> None:
        self.jobs[job.job_id] = job
        if job.key is not None:
            self._keys[job.sandbox_id, job.key] = job

    def _go(self, job: Job, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[job.job_id] = task
        task.add_done_callback(lambda _: self._over(job))

    def _over(self, job: Job) -> None:
        self._tasks.pop(job.job_id, None)
        if job.done.is_set():
            asyncio.get_running_loop().call_later(self._ttl, self.drop, job)

    def _path(self, job: Job) -> Path:
        return self._folder / f"{job.job_id}.job"

    # ---- running -----------------------------------------------------------------------------------------------
    @contextlib.asynccontextmanager
    async def _turn(self, job: Job) -> AsyncIterator[None]:
        if job.request["parallel"]:
            yield
            return
        # One at a time and in the order of submission, as in Orchard; asyncio's locks are fair.
        async with self._turns.setdefault(job.sandbox_id, asyncio.Lock()):
            yield

    async def _run(self, job: Job, fd: int) -> None:
        """Run a job whose record is open and locked as `fd`."""
        fds = [fd]
        end: dict[str, Any] | None = None  # one that nobody else writes down
        try:
            async with self._turn(job):
                sandbox = await self._host.running(job.sandbox_id)
                fds += [os.dup(self._folder_fd), _input(job.stdin)]
                child = await self._host.spawner.request(fds, sandbox.holder_pid)
                # From here on the keeper holds the lock too: whatever becomes of this process, the job runs once.
                job.started_at = time.time()
                self._channels[job.job_id] = child
                kills = sandbox.group.memory_kills()
                try:
                    await child.send(_for_spawner(job, sandbox))
                    answer = await child.answer()
                finally:
                    self._channels.pop(job.job_id, None)
                    child.close()
            if answer is None:
                end = _lost("the process that ran the command was killed")
            else:
                job.end = {**answer[0], "note": sandbox.note(answer[0].get("exit"), kills)}
        except Problem as e:
            end = _failed(str(e), e.code)
        except SandboxLost as e:
            end = _lost(str(e))
        except asyncio.CancelledError:
            end = job.end
            raise
        except OSError as e:
            end = _failed(f"the server cannot run it: {e}", "internal")
        finally:
            if end is not None:
                job.end = end
                with contextlib.suppress(OSError):
                    os.write(fd, record.line(end))
            close_all(fds)
            job.done.set()

    async def cancel(self, job: Job) -> None:
        """End a job with all that it started, and return when it has ended."""
        if job.end is None:
            child = self._channels.get(job.job_id)
            if child is not None:
                child.cancel()
            elif job.start is not None:
                if start_time(job.start[0]) == job.start[1]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(job.start[0], signal.SIGTERM)
            else:
                self._never(job, _failed("cancelled before it ran", "cancelled"))
        await job.done.wait()

    def _never(self, job: Job, end: dict[str, Any]) -> None:
        """Have a job that waits for its turn never run."""
        job.end = end
        if (task := self._tasks.get(job.job_id)) is not None:
            task.cancel()

    # ---- after a restart ---------------------------------------------------------------------------------------
    def recover(self, sandboxes: Iterable[str]) -> None:
        """Take in the jobs of these sandboxes that an earlier server left; remove those of others."""
        keep, found = set(sandboxes), []
        for path in self._folder.glob("*.job"):
            job = record.load(path)
            if job is None or job.sandbox_id not in keep:
                record.remove(self._folder, path.stem)
            else:
                found.append(job)
        # Those that run hold their sandbox's turn before any that waits.
        for job in sorted(found, key=lambda j: (j.start is None, j.created_at)):
            self._know(job)
            if job.end is not None:
                job.done.set()
                self._over(job)
                continue
            fd = record.taken(self._path(job))
            if fd is None:
                self._go(job, self._follow(job))
            elif job.start is None:
                self._go(job, self._run(job, fd))
            else:
                record.refresh(job, self._path(job))  # it may have ended between the reading and the lock
                job.end = job.end or _lost(_NO_RESULT)
                os.close(fd)
                job.done.set()

    async def _follow(self, job: Job) -> None:
        """Wait for a job that an earlier server handed over."""
        async with self._turn(job):
            fd = await self._begun(job)
            if fd is None:
                await _ended(job)
                record.refresh(job, self._path(job))
                job.end = job.end or _lost(_NO_RESULT)
                job.done.set()
        if fd is not None:
            await self._run(job, fd)

    async def _begun(self, job: Job) -> int | None:
        """Return when a job runs or has ended; the record's locked descriptor if it was never begun."""
        path = self._path(job)
        while job.start is None and job.end is None:
            fd = record.taken(path)
            record.refresh(job, path)
            if fd is not None:
                if job.start is None and job.end is None:
                    return fd
                os.close(fd)
            await asyncio.sleep(0.02)  # it is on its way through the keeper: a matter of a moment, once a restart
        return None

    # ---- end ---------------------------------------------------------------------------------------------------
    async def forget(self, sandbox_id: str) -> None:
        """Remove the jobs of a sandbox whose processes are dead."""
        jobs = self.of(sandbox_id)
        for job in jobs:
            if job.end is None and job.job_id not in self._channels and job.start is None:
                self._never(job, _lost("the sandbox was deleted before the command ran"))
        await asyncio.gather(*(j.done.wait() for j in jobs))
        for job in jobs:
            self.drop(job)
        self._turns.pop(sandbox_id, None)

    def drop(self, job: Job) -> None:
        """Remove a job that has ended; again is harmless."""
        if self.jobs.get(job.job_id) is not job:  # removed with its sandbox, and the name may be another's now
            return
        record.remove(self._folder, job.job_id)
        self.jobs.pop(job.job_id, None)
        if job.key is not None:
            self._keys.pop((job.sandbox_id, job.key), None)

    def close(self) -> None:
        """Close what is open."""
        os.close(self._folder_fd)


def _for_spawner(job: Job, sandbox: LocalSandbox) -> dict[str, Any]:
    asked = job.request
    command = asked["command"]
    argv = [sandbox.shell, "-c", command] if isinstance(command, str) else command
    if asked["login_shell"]:
        words = [command] if isinstance(command, str) else ['"$@"', "bash", *command]
        argv = [sandbox.shell, "--login", "-i", "-c", *words]
    return {
        "op": "job",
        "job": job.job_id,
        "holder": sandbox.holder_pid,
        "argv": argv,
        "cwd": inside(asked["cwd"] or "."),
        "env": {**sandbox.env, **(asked["env"] or {})},
        "timeout": asked["timeout_seconds"] or _DEFAULT_SECONDS,
        "limits": sandbox.limits.rlimits(),
        "groups": sandbox.group.processes(),
    }


def _failed(text: str, code: str) -> dict[str, Any]:
    return {"error": text, "code": code, "ended": time.time()}


def _lost(text: str) -> dict[str, Any]:
    return _failed(text, "sandbox_lost")


async def _ended(job: Job) -> None:
    """Return when the process outside that runs a job is gone."""
    assert job.start is not None
    pid, start = job.start
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if start_time(pid) == start:  # after the pidfd is held: from here on the pid cannot be another's
            await readable(pidfd)
    finally:
        os.close(pidfd)


def _input(data: bytes | None) -> int:
    if data is None:
        return os.open("/dev/null", os.O_RDONLY)
    fd = os.memfd_create("stdin")
    with open(fd, "wb", closefd=False) as f:
        f.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
