"""Runs on many GPUs are planned on a machine without any: no model, network or key is needed for it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("name", "source", "nodes"), [("claw", "tasks/claw", 4), ("computeruse", "tasks/desktop", 2)])
def test_a_run_on_gpus_is_planned_anywhere(tmp_path: Path, name: str, source: str, nodes: int) -> None:
    for part in ("Snakefile", "rules", "profiles", "envs", "scripts"):
        src = ROOT / part
        (shutil.copytree if src.is_dir() else shutil.copy)(src, tmp_path / part)
    (tmp_path / "config").mkdir()
    shutil.copy(ROOT / f"tests/train/scale/{name}.yaml", tmp_path / "config")
    env = {k: v for k, v in os.environ.items() if not k.startswith("OPENFORGE_")}

    def dry_run() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "snakemake", "--nocolor", "-n", f"train_{name}", "--config", "iterations=2"]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)

    # What is missing is said.
    done = dry_run()
    assert done.returncode == 1
    assert f"error: config/{name}.yaml: tasks.source {source!r} must be" in done.stdout + done.stderr
    (tmp_path / source / "one").mkdir(parents=True)
    done = dry_run()
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    jobs = re.findall(r"^rule train:\n.*?^    resources: (.*?)$", said, re.S | re.M)
    asked = f"nodes={nodes}, tasks={nodes}, tasks_per_gpu=0, mpi=torchrun, cpus_per_task=64, gres=gpu:8"
    assert len(jobs) == 2 and all(j.endswith(asked) for j in jobs)
    # The environments of GPUs are built where those are.
    assert re.search(r"^software_train_gpu +1$", said, re.M) and re.search(r"^software_serve_gpu +1$", said, re.M)
