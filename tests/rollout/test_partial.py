"""Progress of an interrupted shard: nothing finished is lost or doubled, nothing open is forgotten."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from openforge.rollout.partial import Partial, ShardBusy, claim, digest

NOW = datetime(2026, 1, 1, 12, 0, 0, 5, tzinfo=UTC)


def end(rollout: str, attempt: int) -> dict[str, Any]:
    return {"rollout_id": rollout, "attempt": attempt, "status": "completed", "started": NOW}


def test_a_rerun_skips_the_finished_and_counts_the_open(tmp_path: Path) -> None:
    first = Partial(tmp_path, "d")
    first.start("a", 0, NOW)
    first.end(end("a", 0))
    first.start("b", 0, NOW)
    # The process dies here: nothing is closed.
    second = Partial(tmp_path, "d")
    assert second.ended == {"a": [end("a", 0)]}
    assert [r["attempt"] for r in second.open["b"]] == [0] and not second.open["a"]
    assert (second.next_attempt("a"), second.next_attempt("b"), second.next_attempt("c")) == (1, 1, 0)


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_torn_last_record_never_happened(tmp_path: Path, cut: int) -> None:
    first = Partial(tmp_path, "d")
    first.start("a", 0, NOW)
    first.end(end("a", 0))
    log = first.folder / "episodes.jsonl"
    log.write_bytes(log.read_bytes()[:-cut])
    second = Partial(tmp_path, "d")
    assert second.ended == {} and len(second.open["a"]) == 1
    second.start("a", 1, NOW)
    second.end(end("a", 1))
    third = Partial(tmp_path, "d")
    assert third.ended == {"a": [end("a", 1)]} and [r["attempt"] for r in third.open["a"]] == [0]


def test_changed_inputs_never_reuse(tmp_path: Path) -> None:
    rows = [{"rollout_id": "a", "files": [{"content": b"x"}]}]
    one = digest(rows, ["policy@1"])
    assert one == digest(rows, ["policy@1"])
    assert (
        len(
            {
                one,
                digest(rows, ["policy@2"]),
                digest([{"rollout_id": "a", "files": [{"content": b"y"}]}], ["policy@1"]),
            }
        )
        == 3
    )
    Partial(tmp_path, one).start("a", 0, NOW)
    assert Partial(tmp_path, "other").open == {}
    assert not (tmp_path / one).exists()


def test_removing_leaves_no_empty_folders(tmp_path: Path) -> None:
    base = tmp_path / "partial" / "train-0001" / "0001"
    Partial(base, "d").remove()
    assert list(tmp_path.rglob("*")) == [tmp_path / "partial"]


def test_a_shard_is_one_process_at_a_time(tmp_path: Path) -> None:
    lock = tmp_path / "locks" / "a"
    fd = claim(lock)
    with pytest.raises(ShardBusy, match=f"process {os.getpid()} still works on this shard"):
        claim(lock)
    os.close(fd)
    os.close(claim(lock))
