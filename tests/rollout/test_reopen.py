"""A shard that is sealed, and an iteration that misses its quorum: what is run again, and what is not."""

from __future__ import annotations

import zipfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from proxy_stub import StubUpstream
from shard_rig import PARTIAL, Make, row

from openforge import score, tables
from openforge.config_sandbox import Sandbox
from openforge.rollout import engine, reopen
from openforge.rollout.partial import Partial
from openforge.rollout.rows import Book, evidence
from openforge.rollout.shard import Done

NOW = datetime(2026, 1, 1, tzinfo=UTC)
MENDED = """
import os, sys
if not os.path.exists("/workspace/mended"):
    sys.exit(9)
print('{"score": 1, "passed": true}')
"""
PART = "purpose=train/cell=train/iteration=0001/shard=0001"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "BACK_OFF", 0.01)


def write(shard: engine.Shard, run_dir: Path, episodes: list[dict[str, Any]] | None = None) -> Path:
    """What scripts/rollout.py does with a shard that has ended; its file of episodes."""
    rows = shard.book.finished(shard.partial) if episodes is None else episodes
    done = Done(rows, *evidence(rows, shard.partial), shard.partial, run_dir / "artifacts" / f"{PART}.zip")
    done.keep_artifacts()
    for table, made in ((tables.BLOBS, done.blobs), (tables.CALLS, done.calls), (tables.EPISODES, done.episodes)):
        tables.write_table(run_dir / table.name / PART / f"{table.name}.parquet", table, made)
    done.close()
    return run_dir / "episodes" / PART / "episodes.parquet"


def ends(file: Path) -> list[tuple[str, int, str, bool]]:
    rows = tables.read_rows(file, tables.EPISODES)
    return [(e["rollout_id"], e["attempt"], e["status"], e["final"]) for e in rows]


async def test_a_missed_quorum_runs_the_failed_rollouts_again_and_no_other(
    make: Make, upstream: StubUpstream, tmp_path: Path
) -> None:
    shard = make(row("a"), row("b", verifier=MENDED), sandbox=Sandbox())
    await shard.run()
    file = write(shard, tmp_path)
    failed = [("b", 0, "verifier_failed", False), ("b", 1, "verifier_failed", True)]
    assert ends(file) == [("a", 0, "completed", True), *failed]
    episodes = tables.read_rows(file, tables.EPISODES)
    with pytest.raises(score.QuorumError):
        score.check_quorum(episodes, score.Scorer().score_all(episodes, [], []), 0.75)
    assert reopen.reopen(tmp_path, [file]) == 1
    assert not list(tmp_path.glob("*/purpose=*/**/*.parquet"))
    # The same command: the verifier's cause is mended, b gets further attempts, a is left alone.
    asked = len(upstream.bodies)
    mended = row("b", agent="touch mended", verifier=MENDED)
    shard = make(row("a"), mended, sandbox=Sandbox())
    await shard.run()
    file = write(shard, tmp_path)
    assert len(upstream.bodies) == asked
    failed = [(r, a, s, False) for r, a, s, _ in failed]
    assert ends(file) == [("a", 0, "completed", True), *failed, ("b", 2, "completed", True)]
    # Nothing is left to mend: the progress is gone, the artifacts of both turns are in the one archive.
    assert not (tmp_path / "partial" / "train-train-0001").exists()
    names = [e["artifacts"] for e in tables.read_rows(file, tables.EPISODES) if e["artifacts"]]
    with zipfile.ZipFile(tmp_path / "artifacts" / f"{PART}.zip") as z:
        assert sorted(z.namelist()) == sorted(f"{tables.episode_id(r, 0)}.log" for r in "ab")
    assert len(names) == 2 and all(n.startswith("artifacts/shard=0001.zip/") for n in names)


async def test_a_quorum_that_is_reached_keeps_failed_rollouts_as_they_are(make: Make, tmp_path: Path) -> None:
    base = tmp_path / PARTIAL
    shard = make(row("a"), row("b", verifier="print()"))
    await shard.run()
    file = write(shard, tmp_path)
    assert base.exists()
    reopen.settle(tmp_path, [file])
    assert not base.exists() and len(ends(file)) == 3
    assert reopen.reopen(tmp_path, [file]) == 0 and file.exists()


def test_sealing_writes_one_final_row_for_what_is_missing(tmp_path: Path) -> None:
    partial = Partial(tmp_path / "p", "d")
    rows = [row(name) for name in ("done", "failed", "died", "died_again", "never")]
    book = Book(rows, "1", "0@abc", 0, "x.zip")

    def end(name: str, attempt: int, status: str) -> None:
        partial.start(name, attempt, NOW)
        partial.end(book.row(row(name), attempt, NOW) | {"status": status, "message": "m"})

    end("done", 0, "completed")
    end("failed", 0, "verifier_failed")
    partial.start("died", 0, NOW)
    end("died_again", 0, "policy_failed")
    partial.start("died_again", 1, NOW)
    partial.close()
    got = [(e["rollout_id"], e["attempt"], e["status"], e["final"]) for e in book.sealed(Partial(tmp_path / "p", "d"))]
    assert got == [
        ("done", 0, "completed", True),
        ("failed", 0, "verifier_failed", True),
        ("died", 0, "shard_lost", True),
        ("died_again", 0, "policy_failed", False),
        ("died_again", 1, "shard_lost", True),
        ("never", 0, "shard_lost", True),
    ]
    tables.EPISODES.arrow(book.sealed(Partial(tmp_path / "p", "d")))
