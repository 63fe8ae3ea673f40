"""The executor's attempts, and a quorum that is missed and then reached, through Snakemake itself.

Rollouts are stubs; score is the real rule and script."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_dag import stubbed

ROOT = Path(__file__).resolve().parents[2]
# Fails until its executor will not start it again; then writes one episode, policy_failed unless `mended` stands there.
ROLLOUT = """\
import made_run
from pathlib import Path
from openforge import tables
from openforge.job import job
from openforge.rollout import reopen
from openforge.rollout.partial import Partial

with job("rollout", snakemake) as j:
    with open("attempts", "a") as f:
        print(j.part["shard"], j.attempt, j.retries, file=f)
    if not j.last_attempt:
        raise RuntimeError("not yet")
    partial = Partial(reopen.folder(j.run_dir, *(j.part[k] for k in ("purpose", "cell", "k", "shard"))), "d")
    mended = Path("mended").exists()
    rollout = made_run.rollout(made_run.task("a" + j.part["shard"], "copy", "train"), "train", "train", 1, 0)
    row = made_run.episode(rollout, "completed" if mended or j.part["shard"] == "0002" else "policy_failed")
    if row["verifier_output"]:
        row["verifier_output"] = '{"score": 1, "passed": true}'
    partial.start(row["rollout_id"], 0, row["started"])
    partial.end(row)
    for name, rows in {"blobs": [], "calls": [], "episodes": [row]}.items():
        tables.write_table(snakemake.output[name], tables.TABLES[name], rows)
"""
TARGET = "results/tiny/scores/purpose=train/cell=train/iteration=0001/scores.parquet"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    stubbed(tmp_path)
    (tmp_path / "scripts" / "rollout.py").write_text(ROLLOUT)
    shutil.copy(ROOT / "scripts" / "score.py", tmp_path / "scripts" / "score.py")
    return tmp_path


def snakemake(root: Path, *words: str) -> tuple[int, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("OPENFORGE_")}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    command = [sys.executable, "-m", "snakemake", "--nocolor", *words]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_the_last_attempt_is_known_and_a_missed_quorum_is_run_again_by_the_same_command(root: Path) -> None:
    code, told = snakemake(root, TARGET, "--retries", "1")
    assert code == 1, told
    attempts = (root / "attempts").read_text().splitlines()
    assert sorted(attempts) == ["0001 1 1", "0001 2 1", "0002 1 1", "0002 2 1"]
    # Said by both attempts of score; only the last one may take its own inputs away.
    assert told.count("1 of 2 rollouts have a reward (1 policy_failed, 1 completed); the quorum is 75%") >= 2
    assert "The same command runs the 1 failed rollouts once more" in told and "MissingInput" not in told
    assert [p.parent.name for p in root.glob("results/tiny/*/**/episodes.parquet")] == ["shard=0002"]
    (root / "attempts").unlink()
    (root / "mended").touch()
    code, told = snakemake(root, TARGET)
    assert code == 0, told
    assert (root / "attempts").read_text() == "0001 1 0\n"
    assert (root / TARGET).exists() and not list((root / "results/tiny/partial").glob("*"))
