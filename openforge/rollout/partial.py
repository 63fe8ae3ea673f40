"""Progress of an unfinished shard: partial/<part>/<shard>/<digest>/ (docs/design.md, section 3).

The proxy's journal and one record per started and per ended attempt are appended; nothing here is a declared output.
A rerun with the same digest skips finished rollouts and runs open ones once more as attempt + 1.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any


def digest(rows: Sequence[Mapping[str, Any]], versions: Iterable[str]) -> str:
    """Digest over the rollout rows and the versions (policy, environment, harness) that an episode depends on."""
    body = json.dumps([rows, sorted(versions)], default=_plain, sort_keys=True)
    return hashlib.sha256(body.encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    return value.hex() if isinstance(value, bytes) else str(value)


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
        self._load()
        self._fd = os.open(self._records, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

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
    def _records(self) -> Path:
        return self.folder / "episodes.jsonl"

    def _load(self) -> None:
        if not self._records.exists():
            return
        data = self._records.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if whole != data:
            # A kill can tear the last line; it never told anyone that it ended.
            os.truncate(self._records, len(whole))
        for line in whole.splitlines():
            record = json.loads(line)
            key = record["rollout_id"]
            if record["event"] == "start":
                self.open.setdefault(key, []).append(record)
            else:
                row = record["row"]
                row["started"] = datetime.fromisoformat(row["started"])
                self.ended.setdefault(key, []).append(row)
                self.open[key] = [r for r in self.open[key] if r["attempt"] != row["attempt"]]

    def next_attempt(self, rollout_id: str) -> int:
        """The first attempt number that was never started."""
        used = [r["attempt"] for r in self.ended.get(rollout_id, []) + self.open.get(rollout_id, [])]
        return max(used, default=-1) + 1

    def start(self, rollout_id: str, attempt: int, started: datetime) -> None:
        self._append({"event": "start", "rollout_id": rollout_id, "attempt": attempt, "started": started.isoformat()})

    def end(self, row: Mapping[str, Any]) -> None:
        """Record an ended attempt; on disk when this returns."""
        self._append({"event": "end", "rollout_id": row["rollout_id"], "row": row})
        self.ended.setdefault(row["rollout_id"], []).append(dict(row))

    def _append(self, record: Mapping[str, Any]) -> None:
        line = (json.dumps(record, default=_time) + "\n").encode()
        # One write(2) a record: appends of several records never interleave, a kill tears the last one at most.
        written = os.write(self._fd, line)
        if written != len(line):
            raise OSError(f"{self._records}: only {written} of {len(line)} bytes were written; is the disk full?")

    def close(self) -> None:
        os.close(self._fd)

    def remove(self) -> None:
        """After the parquet files stand: drop the progress, and its empty parents."""
        self.close()
        shutil.rmtree(self.folder)
        for parent in list(self.folder.parents)[:3]:
            if parent.name == "partial" or any(parent.iterdir()):
                break
            parent.rmdir()


def _time(value: Any) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} in an episode record")
