"""Progress of an interrupted shard: nothing finished is lost or doubled, nothing open is forgotten."""

from __future__ import annotations

import os
import resource
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from openforge.rollout.partial import DIED, Partial, PartialError, ShardBusy, append, claim, digest

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


@pytest.mark.parametrize(
    "garbage",
    [b"\x00" * 30, b'{"event": "end"', b'{"event": "end", "rollout_id": "a", "row": {}}', b'{"event": "lost"}', b"[]"],
)
def test_a_record_that_was_damaged_is_one_sentence(tmp_path: Path, garbage: bytes) -> None:
    first = Partial(tmp_path, "d")
    first.start("a", 0, NOW)
    first.end(end("a", 0))
    start, ended = first.records.read_bytes().splitlines()
    first.records.write_bytes(b"\n".join([start, garbage, ended, b""]))
    with pytest.raises(PartialError, match=r"episodes\.jsonl, line 2: no record of an attempt; .* remove "):
        Partial(tmp_path, "d")


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    fd = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(PartialError, match=r"cannot be written: No space left on device; what it holds is kept"):
        append(fd, tmp_path / "episodes.jsonl", {})
    os.close(fd)


def test_half_a_record_is_taken_back(tmp_path: Path) -> None:
    partial = Partial(tmp_path, "d")
    partial.start("a", 0, NOW)
    whole = partial.records.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 20, limits[1]))
    try:
        with pytest.raises(PartialError, match="the disk took 20 of"):
            partial.start("b", 0, NOW)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert partial.records.read_bytes() == whole


def test_why_a_shard_stopped_is_said_of_what_was_open(tmp_path: Path) -> None:
    first = Partial(tmp_path, "d")
    first.start("a", 0, NOW)
    second = Partial(tmp_path, "d")
    second.start("b", 0, NOW)
    second.stop("the disk is full")
    third = Partial(tmp_path, "d")
    third.start("b", 1, NOW)
    why = {(name, r["attempt"]): r["why"] for name, rs in Partial(tmp_path, "d").open.items() for r in rs}
    # The first process died without a word, before the second began: its attempt is told apart from the second's.
    assert why == {("a", 0): DIED, ("b", 0): "the disk is full", ("b", 1): DIED}


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
