"""The benchmark itself, a twentieth of it: its figures are there, nothing is left, no job is lost or run twice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_twentieth(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks/sandboxes.py"), "--scale", "0.05", "--json", str(tmp_path / "f")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((tmp_path / "f").read_text())
    assert (told["alive"], told["cycles"], told["killed_jobs"]) == (10, 50, {"jobs": 2, "whole": 2, "twice": 0})
    assert not any(told["left"].values())
    assert set(told["create_p50_ms"]) == {"local", "server"}
    for name in ("exec_p50_ms", "exec_cpu_ms", "upload_s", "download_s", "shell_cpu_ms"):
        assert told[name] > 0
