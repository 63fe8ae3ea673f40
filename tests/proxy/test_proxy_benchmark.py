"""benchmarks/proxy.py in small: it runs, counts what must be exact, and has every figure; times are no matter here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_benchmark_has_every_figure(tmp_path: Path) -> None:
    out = tmp_path / "proxy.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "proxy.py"), "--quick", "--json", str(out)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert found["cpu_ms"].keys() == {"plain", "stream"}
    assert all(row.keys() == {"1", "32", "256"} for row in found["cpu_ms"].values())
    assert found["stream_events"] >= 64
    assert {"added_p50_ms", "bytes_per_call", "bytes_first_call", "rss_growth_mb"} <= found.keys()
    # One client's conversation grows from 6 to 10 KB of JSON: whole, its calls would be larger than that.
    assert 0 < found["bytes_per_call"] < 6 * 1024 < found["bytes_first_call"] <= 10 * 1024
    assert (found["open_sessions"], found["open_sessions_errors"]) == (50, 0)
    assert found["lineage"]["rows"] == 4
    assert found["kills"]["rounds"] == 2 and found["kills"]["answers"] >= 128
    assert (found["kills"]["lost"], found["kills"]["doubled"]) == (0, 0)
    # The printed table has the same.
    assert f"| bytes_per_call | {found['bytes_per_call']} |" in done.stdout
