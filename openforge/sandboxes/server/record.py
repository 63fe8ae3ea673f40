"""A job on disk: STATE/jobs/<job_id>.job, .out and .err (see `openforge.sandboxes.job` for what they hold)."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import fcntl
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Status = Literal["queued", "running", "succeeded", "failed"]


@dataclass(eq=False)
class Job:
    """A job: what was asked for, and what became of it.

    Attributes:
        request: the `ExecRequest` as it came, without what only shapes the answer.
        key: the caller's Idempotency-Key.
        start: (pid, start) of the process outside that runs it, once it does; with it, a later server finds it.
        end: how it ended, as the record's last line says it.
        done: set when it has ended.
    """

    job_id: str
    sandbox_id: str
    request: dict[str, Any]
    key: str | None
    created_at: float
    started_at: float | None = None
    start: tuple[int, int] | None = None
    end: dict[str, Any] | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def status(self) -> Status:
        """As the wire says it."""
        if self.end is not None:
            return "succeeded" if self.end.get("exit") == 0 else "failed"
        return "queued" if self.started_at is None else "running"

    @property
    def stdin(self) -> bytes | None:
        """Standard input; None is empty."""
        given: str | None = self.request["stdin"]
        return None if given is None else base64.b64decode(given)

    def first_line(self) -> bytes:
        """The record's first line."""
        names = ("job_id", "sandbox_id", "request", "key", "created_at")
        return line({name: getattr(self, name) for name in names})

    def read(self, said: dict[str, Any]) -> None:
        """Take in a later line of the record."""
        if "ended" in said:
            self.end = said
        elif "pid" in said:
            self.start, self.started_at = (said["pid"], said["start"]), said["started"]


def line(of: dict[str, Any]) -> bytes:
    """A line of a record."""
    return json.dumps(of).encode() + b"\n"


def create(path: Path, job: Job) -> int:
    """Write a new job's record; a locked descriptor of it, open for appending.

    Raises:
        FileExistsError: there is one of this name.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.write(fd, job.first_line())
    except OSError:  # a full disk must not leave half a record behind
        os.close(fd)
        path.unlink()
        raise
    return fd


def load(path: Path) -> Job | None:
    """The job of a record; None if its first line was never whole, so nobody was told that it had been taken."""
    lines = path.read_bytes().split(b"\n")[:-1]
    if not lines:
        return None
    job = Job(**json.loads(lines[0]))
    refresh(job, path)
    return job


def refresh(job: Job, path: Path) -> None:
    """Take in what the record says by now."""
    for text in path.read_bytes().split(b"\n")[1:-1]:
        job.read(json.loads(text))


def taken(path: Path) -> int | None:
    """A locked descriptor of a record that nobody works on; None while somebody does."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def outputs(folder: Path, job_id: str) -> tuple[bytes, bytes]:
    """What is kept of a job's outputs."""
    return _content(folder / f"{job_id}.out"), _content(folder / f"{job_id}.err")


def remove(folder: Path, job_id: str) -> None:
    """Remove a job's files, the record last."""
    for suffix in ("out", "err", "job"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(folder / f"{job_id}.{suffix}")


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:  # a job without output has no file
        return b""
