"""Progress of an unfinished shard: partial/<part>/<shard>/<digest>/ (docs/design.md, section 3).

The proxy's journal and one record per started and per ended attempt are appended; nothing here is a declared output.
A rerun with the same digest skips finished rollouts and runs open ones once more as attempt + 1. The folder outlives
its shard while rollouts of it failed for want of infrastructure: should the iteration miss its quorum, they are run on
from here (reopen.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

DIED = "the shard's job died under this attempt"


def digest(rows: Sequence[Mapping[str, Any]], versions: Iterable[str]) -> str:
    """Digest over the rollout rows and the versions (policy, environment, harness) that an episode depends on."""
    body = json.dumps([rows, sorted(versions)], default=_plain, sort_keys=True)
    return hashlib.sha256(body.encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    return value.hex() if isinstance(value, bytes) else str(value)


class PartialError(RuntimeError):
    """A shard's records cannot be read or written; one sentence that names the file."""


class ShardBusy(RuntimeError):
    """Another process works on the shard, e.g. one that outlived a killed Snakemake."""


def claim(lock: Path) -> int:
    """Claim a shard for this process until it ends; the descriptor holds the claim.

    Raises:
        ShardBusy: another process, named by its pid, holds it.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.read(fd, 20).decode() or "unknown"
        os.close(fd)
        raise ShardBusy(
            f"process {pid} still works on this shard (it outlived its Snakemake); wait until it ends, or end it"
        ) from None
    os.ftruncate(fd, 0)
    os.write(fd, str(os.getpid()).encode())
    return fd


class Partial:
    """The folder of one shard's progress.

    Attributes:
        folder: partial/<part>/<shard>/<digest>.
        ended: episode rows of ended attempts by rollout_id, oldest first.
        open: attempts by rollout_id that were started and never ended: an earlier process died under them.
        forgiven: failed attempts by rollout_id that count no more: the iteration missed its quorum, and the command
            was typed again.
    """

    def __init__(self, base: Path, name: str) -> None:
        self.folder = base / name
        # Another digest means other inputs: what it holds can never be used again.
        for other in base.glob("*"):
            if other != self.folder:
                shutil.rmtree(other, ignore_errors=True)
        self.journal.mkdir(parents=True, exist_ok=True)
        self.sandboxes.mkdir(exist_ok=True)
        self.artifacts.mkdir(exist_ok=True)
        self.ended: dict[str, list[dict[str, Any]]] = {}
        self.open: dict[str, list[dict[str, Any]]] = {}
        self.forgiven: dict[str, int] = {}
        self._running: list[list[Any]] = []  # (rollout_id, attempt) of this process
        self._load()
        self._fd = os.open(self.records, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    @property
    def journal(self) -> Path:
        return self.folder / "journal"

    @property
    def sandboxes(self) -> Path:
        return self.folder / "sandboxes"

    @property
    def artifacts(self) -> Path:
        return self.folder / "artifacts"

    @property
    def records(self) -> Path:
        return self.folder / "episodes.jsonl"

    def _load(self) -> None:
        if not self.records.exists():
            return
        data = self.records.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if whole != data:
            # A kill can tear the last line; it never told anyone that it ended.
            os.truncate(self.records, len(whole))
        for i, line in enumerate(whole.splitlines(), 1):
            try:
                self._take(json.loads(line))
            except (ValueError, KeyError, TypeError):
                raise PartialError(
                    f"{self.records}, line {i}: no record of an attempt; the file was altered or damaged: remove "
                    f"{self.folder} to run the shard's episodes anew"
                ) from None

    def _take(self, record: dict[str, Any]) -> None:
        event = record["event"]
        if event == "start":
            self.open.setdefault(record["rollout_id"], []).append(record | {"why": DIED})
        elif event == "end":
            row, key = record["row"], record["rollout_id"]
            row["started"] = datetime.fromisoformat(row["started"])
            self.open[key] = [r for r in self.open[key] if r["attempt"] != row["attempt"]]
            self.ended.setdefault(key, []).append(row)
        elif event == "stop":
            for lost in (r for attempts in self.open.values() for r in attempts):
                if [lost["rollout_id"], lost["attempt"]] in record["open"]:
                    lost["why"] = record["why"]
        elif event == "reopen":
            self.forgiven = {key: len(rows) for key, rows in self.ended.items()}
        else:
            raise ValueError(event)

    @property
    def begun(self) -> set[str]:
        """Rollouts of which an attempt was started."""
        return self.ended.keys() | self.open.keys()

    def next_attempt(self, rollout_id: str) -> int:
        """The first attempt number that was never started."""
        used = [r["attempt"] for r in self.ended.get(rollout_id, []) + self.open.get(rollout_id, [])]
        return max(used, default=-1) + 1

    def start(self, rollout_id: str, attempt: int, started: datetime) -> None:
        record = {"event": "start", "rollout_id": rollout_id, "attempt": attempt, "started": started.isoformat()}
        self._append(record)
        self._running.append([rollout_id, attempt])

    def end(self, row: Mapping[str, Any]) -> None:
        """Record an ended attempt; on disk when this returns."""
        self._append({"event": "end", "rollout_id": row["rollout_id"], "row": row})
        self._running.remove([row["rollout_id"], row["attempt"]])
        self.ended.setdefault(row["rollout_id"], []).append(dict(row))

    def stop(self, why: str) -> None:
        """Record why the shard stops under the attempts that are open; a full disk need not take it."""
        with contextlib.suppress(PartialError):
            self._append({"event": "stop", "why": why, "open": self._running})

    def _append(self, record: Mapping[str, Any]) -> None:
        append(self._fd, self.records, record)

    def close(self) -> None:
        os.close(self._fd)

    def remove(self) -> None:
        """After the parquet files stand: drop the progress, and its empty parents."""
        self.close()
        drop(self.folder)


def append(fd: int, path: Path, record: Mapping[str, Any]) -> None:
    """Append a record to a file of records.

    Raises:
        PartialError: it could not be written whole; the file then ends with the record before it.
    """
    line = (json.dumps(record, default=_time) + "\n").encode()
    try:
        # One write(2) a record: appends of several records never interleave, a kill tears the last one at most.
        written = os.write(fd, line)
    except OSError as e:
        raise PartialError(f"{path} cannot be written: {e.strerror}; what it holds is kept") from e
    if written != len(line):
        # The half line would swallow the next record.
        os.ftruncate(fd, os.fstat(fd).st_size - written)
        raise PartialError(f"{path} cannot be written: the disk took {written} of {len(line)} bytes; the rest is kept")


def drop(folder: Path) -> None:
    """Remove a shard's partial folder and its empty parents."""
    shutil.rmtree(folder)
    for parent in list(folder.parents)[:3]:
        if parent.name == "partial" or any(parent.iterdir()):
            break
        parent.rmdir()


def _time(value: Any) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} in an episode record")
