"""Rows of a shard: an episode's row before it runs, and all rows of a finished or sealed shard."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from openforge import tables
from openforge.proxy import journal, lineage
from openforge.proxy.journal import JournalError
from openforge.rollout.groups import running
from openforge.rollout.partial import Partial

Row = dict[str, Any]

_SAME = ("rollout_id", "group_id", "task_id", "purpose", "cell", "iteration", "benchmark", "split", "sample")


@dataclass(frozen=True)
class Book:
    """What every episode row of a shard says.

    Attributes:
        rows: the shard's rollout rows, in table order.
        staleness: (k-1) - b(k) of a training shard, None in evaluation.
        archive: path of the shard's archive of artifacts below results/<run>/.
    """

    rows: Sequence[Mapping[str, Any]]
    harness_version: str
    policy_version: str
    staleness: int | None
    archive: str

    def row(self, row: Mapping[str, Any], attempt: int, started: datetime) -> Row:
        """The episode row as far as it is known before anything ran."""
        return {k: row[k] for k in _SAME} | {
            "episode_id": tables.episode_id(row["rollout_id"], attempt),
            "kind": row["tags"][0] if row["tags"] else None,
            "attempt": attempt,
            "final": False,
            "staleness": self.staleness,
            "harness": row["harness"],
            "harness_version": self.harness_version,
            "image_digest": "host",
            "verifier_version": row["verifier"]["version"],
            "isolation": "none reached",
            "network": row["network"],
            "policy_version": self.policy_version,
            "status": "setup_failed",
            "message": None,
            "harness_exit": None,
            "verifier_output": None,
            "answer": None,
            "dispatches": None,
            "audit": None,
            "snapshot": None,
            "user_rounds": 0,
            "turns": 0,
            "prompt_tokens": 0,
            "response_tokens": 0,
            "seconds": dict.fromkeys(("queue", "setup", "agent", "verify", "total")),
            "started": started,
            "artifacts": None,
        }

    def member(self, name: str) -> str:
        """What the column `artifacts` says: the archive, and the member within."""
        return f"{self.archive}/{name}"

    def attempts(self, row: Mapping[str, Any], partial: Partial) -> list[Row]:
        """Rows of a rollout's attempts: those that ended, and those that a process did not live to end."""
        rows = [dict(r) for r in partial.ended.get(row["rollout_id"], [])]
        for record in partial.open.get(row["rollout_id"], []):
            lost = self.row(row, record["attempt"], datetime.fromisoformat(record["started"]))
            rows.append(lost | {"status": "sandbox_lost", "message": record["why"]})
        return sorted(rows, key=lambda r: int(r["attempt"]))

    def finished(self, partial: Partial) -> list[Row]:
        """Episode rows of a shard whose rollouts have all ended: the last attempt of each is final."""
        rows = []
        for row in running(self.rows, partial.begun):
            attempts = self.attempts(row, partial)
            attempts[-1]["final"] = True
            rows += attempts
        return rows

    def sealed(self, partial: Partial) -> list[Row]:
        """Episode rows of a shard that is given up: what did not end is shard_lost, one final row each."""
        rows = []
        for row in running(self.rows, partial.begun):
            attempts = self.attempts(row, partial)
            attempts = attempts or [self.row(row, 0, datetime.now(UTC))]
            last = attempts[-1]
            if not any(r["attempt"] == last["attempt"] for r in partial.ended.get(row["rollout_id"], [])):
                last |= {"status": "shard_lost", "message": "its shard's last attempt sealed without it"}
            attempts[-1]["final"] = True
            rows += attempts
        return rows


def evidence(episodes: Sequence[Row], partial: Partial) -> tuple[list[Row], list[Row]]:
    """Call and blob rows of these episodes, from the journal.

    Raises:
        JournalError: the journal is damaged, or holds less than the episodes' rows or one of them twice.
    """
    records = journal.stored(partial.journal)
    calls: list[Row] = []
    blobs: dict[str, Row] = {}
    for row in episodes:
        mine = records.get(row["episode_id"], [])
        opened = sum(r["record"] == "open" for r in mine)
        answered = sum(r["record"] == "call" for r in mine)
        if opened > 1 or answered < row["turns"]:
            raise JournalError(
                f"{partial.journal} holds {opened} sessions and {answered} answered calls of episode "
                f"{row['episode_id']}, which had {row['turns']}: its files or {partial.records.name} were altered; "
                f"remove {partial.folder} to run the shard anew"
            )
        more, content = lineage.call_rows(journal.whole(mine))
        calls += more
        blobs |= {b["sha256"]: b for b in content}
    return calls, list(blobs.values())


def archive(files: Sequence[Path], target: Path) -> None:
    """Write files into one zip archive, beside its target and renamed; nothing without files."""
    if not files:
        return
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as z:
        for file in files:
            z.write(file, file.name)
    tables.write_beside(target, data.getvalue())
