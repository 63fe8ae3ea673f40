"""A project with the hand-made run."""

from __future__ import annotations

import os
from pathlib import Path

import made_run
import pytest

from openforge import config
from openforge.verbs.jobs import Jobs

# The configuration that the hand-made run would have been made with.
MADE = """\
model: tiny-random
iterations: 2
tasks: {source: tiny, train: 2, heldout: 3}
data: {train_batch_size: 2}
rollout: {n: 4}
cells:
  - {name: heldout, n: 2}
  - {name: greedy}
  - {name: pi, tasks: 2, at: last}
"""


@pytest.fixture
def project(run_dir, tmp_path, monkeypatch):
    """A project with the hand-made run and one configuration, as the working directory."""
    (tmp_path / "Snakefile").touch()
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "mine.yaml").write_text("model: tiny-random\niterations: 2\ntasks: {source: tiny}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def made(project: Path) -> Path:
    """The same with the hand-made run's own configuration."""
    (project / "config" / "made.yaml").write_text(MADE)
    return project


@pytest.fixture
def finished(made: Path) -> Path:
    """The same with every file that the run's jobs write, dated in the order of the jobs."""
    jobs = Jobs(made_run.RUN, config.load(made_run.RUN, made).config, made)
    for i, job in enumerate(jobs.all):
        files = [job.output]
        if job.rule == "rollout":
            files += [Path(str(job.output).replace("episodes", t)) for t in ("calls", "blobs")]
        elif job.rule == "train":
            files.append(made / f"results/made/state/{job.iteration:04d}/state.json")
            files.append(
                made / f"results/made/metrics/purpose=train/cell=train/iteration={job.iteration:04d}/metrics.parquet"
            )
        elif job.rule == "write_report":
            files.append(made / "results/made/summary.json")
        for file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
            os.utime(file, (1_767_323_000 + i, 1_767_323_000 + i))
    return made
