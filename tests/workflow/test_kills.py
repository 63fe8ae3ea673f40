"""A run killed in its episodes and in its training, then finished by the same command: benchmarks/kills.py in small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_killed_run_loses_and_doubles_no_episode(tmp_path: Path) -> None:
    out = tmp_path / "kills.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "kills.py"), "--json", str(out), "--kills", "3"]
    command += ["--in-training", "1", "--in-rollouts", "2", "--signals", "KILL", "TERM", "INT", "--iterations", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert {d["signal"] for d in found["deaths"]} == {"SIGKILL", "SIGTERM", "SIGINT"}
    assert all(d["store_opens"] for d in found["deaths"])
    # config/tiny.yaml with one iteration: 16 episodes, 4 tasks x 2 before and after, 2 by command; one more iteration
    # where the run ended before it could be killed.
    assert found["rollouts"] == sum(found["final_statuses"].values()) >= 16 + 2 * 8 + 2
    assert found["not_exactly_one_final"] == found["unplanned"] == found["shard_lost"] == 0
    assert found["left_behind"] == [] and found["nothing_to_do"]
