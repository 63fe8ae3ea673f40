"""Which jobs a command plans. The rules are the real ones; the jobs are stubs that touch their outputs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from openforge import config_paths
from openforge.config import load
from openforge.verbs.jobs import Jobs

ROOT = Path(__file__).resolve().parents[2]
STUB = """\
from pathlib import Path
for output in snakemake.output:
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    Path(output).touch()
"""


def snakemake(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("OPENFORGE_")}
    command = [sys.executable, "-m", "snakemake", "--nocolor", *words]
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=120)


def planned(root: Path, *words: str) -> dict[str, int]:
    """Jobs by rule that a dry run lists."""
    done = snakemake(root, "-n", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    if "Nothing to be done" in done.stdout + done.stderr:
        return {}
    table = re.search(r"^job +count\n-+ +-+\n(.*?)\n\n", done.stdout + done.stderr, re.S | re.M)
    assert table is not None, done.stdout + done.stderr
    rows = [line.split() for line in table[1].splitlines()]
    return {name: int(count) for name, count in rows if name != "total"}


def outlook(root: Path, run: str, **overrides: object) -> dict[str, int]:
    """Jobs by rule that `openforge plan` counts as left."""
    return dict(Counter(job.rule for job in Jobs(run, load(run, root, overrides).config, root).left()))


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of the workflow without any result, its jobs replaced by stubs."""
    root = tmp_path_factory.mktemp("clone")
    for part in ("Snakefile", "rules", "config", "profiles", "envs"):
        src = ROOT / part
        (shutil.copytree if src.is_dir() else shutil.copy)(src, root / part)
    (root / "scripts").mkdir()
    for script in (ROOT / "scripts").glob("*.py"):
        (root / "scripts" / script.name).write_text(STUB)
    return root


@pytest.fixture(scope="module")
def finished(fresh: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same after `snakemake train_tiny`."""
    root = tmp_path_factory.mktemp("finished") / "clone"
    shutil.copytree(fresh, root, symlinks=True)
    done = snakemake(root, "train_tiny")
    assert done.returncode == 0, done.stdout + done.stderr
    return root


def test_a_fresh_run_plans_every_stage(fresh: Path) -> None:
    jobs = planned(fresh, "train_tiny")
    # config/tiny.yaml: 2 iterations of 2 shards, one cell before and after, one after.
    assert {k: jobs[k] for k in ("tasks", "prepare", "plan", "rollout", "score", "samples", "train", "eval")} == {
        "tasks": 1,
        "prepare": 1,
        "plan": 2 + 3,
        "rollout": 2 * 2 + 3,
        "score": 2 + 3,
        "samples": 2,
        "train": 2,
        "eval": 3,
    }
    # Snakemake counts the software environments one by one, and the target itself.
    others = {name: count for name, count in jobs.items() if not name.startswith("software") and name != "train_tiny"}
    assert others == outlook(fresh, "tiny")


def test_no_evaluation_plans_training(fresh: Path) -> None:
    suites = sorted(p.stem for p in (fresh / "config").glob("eval_*.yaml"))
    assert suites
    for suite in suites:
        jobs = planned(fresh, suite)
        assert "train" not in jobs and "samples" not in jobs and jobs["eval"] >= 1
        assert {n: c for n, c in jobs.items() if not n.startswith("software") and n != suite} == outlook(fresh, suite)


def test_a_finished_run_has_nothing_to_do(finished: Path) -> None:
    assert planned(finished, "train_tiny") == {}
    assert outlook(finished, "tiny") == {}


def test_one_more_iteration_plans_only_itself(finished: Path) -> None:
    jobs = planned(finished, "train_tiny", "--config", "iterations=3")
    expected = {"plan": 3, "rollout": 4, "score": 3, "samples": 1, "train": 1, "eval": 2, "write_report": 1}
    assert jobs == expected | {"train_tiny": 1}
    assert outlook(finished, "tiny", iterations=3) == expected


def test_changed_pins_never_replan_an_iteration(finished: Path, tmp_path: Path) -> None:
    root = tmp_path / "clone"
    shutil.copytree(finished, root, symlinks=True)
    for pins in (root / "envs").glob("*.txt"):
        pins.write_text(pins.read_text() + "# changed\n")
    assert planned(root, "train_tiny") == {}
    # And they hide nothing that is still to be done.
    assert planned(root, "train_tiny", "--config", "iterations=3")["train"] == 1
    shutil.rmtree(root / ".software")
    assert planned(root, "train_tiny") == {}


def test_an_evaluation_of_a_run_reads_its_checkpoint(finished: Path) -> None:
    jobs = planned(finished, "eval_demo", "--config", "policy=tiny@2")
    assert "train" not in jobs and "prepare" not in jobs


def test_a_missing_checkpoint_is_one_sentence(finished: Path) -> None:
    done = snakemake(finished, "-n", "eval_demo", "--config", "policy=tiny@7")
    assert done.returncode == 1
    assert "snakemake train_tiny" in done.stdout + done.stderr and "tiny@7" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["train_tiny", "--config", "iteratons=3"], "did you mean 'iterations'?"),
        (["train_tiny", "--config", "iterations=many"], "'iterations' is \"many\""),
        (["train_tiny", "--config", "actor={optim: {lrr: 1.0}}"], "did you mean 'actor.optim.lr'?"),
        (["eval_demo", "--config", "policy=tiny@last"], "RUN@k needs a checkpoint's number"),
    ],
)
def test_a_wrong_value_stops_before_any_job(fresh: Path, words: list[str], sentence: str) -> None:
    done = snakemake(fresh, "-n", *words)
    assert done.returncode == 1 and sentence in done.stdout + done.stderr, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_a_run_goes_on_only_as_it_was_made(finished: Path, tmp_path: Path) -> None:
    root = tmp_path / "clone"
    shutil.copytree(finished, root, symlinks=True)
    # What the first job of a run writes; here the jobs are stubs.
    config_paths.freeze(load("tiny", root).config, root / "results" / "tiny")
    assert planned(root, "train_tiny") == {}
    done = snakemake(root, "-n", "train_tiny", "--config", "seed=3")
    assert done.returncode == 1 and "was made with seed = 0, now it is 3" in done.stdout + done.stderr


def test_an_environment_of_ones_own_is_found_below_the_root(fresh: Path, tmp_path: Path) -> None:
    root = tmp_path / "clone"
    shutil.copytree(fresh, root, symlinks=True)
    text = (root / "config" / "tiny.yaml").read_text()
    (root / "config" / "mine.yaml").write_text(text + "environment: my_package.my_env\n")
    done = snakemake(root, "-n", "train_mine")
    assert done.returncode == 1 and "there is no module my_package.my_env" in done.stdout + done.stderr
    (root / "my_package").mkdir()
    (root / "my_package" / "my_env.py").write_text("def create_env(sandbox): ...\n")
    assert planned(root, "train_mine")["train"] == 2


def test_a_broken_configuration_stops_only_its_own_run(fresh: Path, tmp_path: Path) -> None:
    root = tmp_path / "clone"
    shutil.copytree(fresh, root, symlinks=True)
    (root / "config" / "mine.yaml").write_text("model: [\n")
    assert planned(root, "train_tiny")["train"] == 2
    done = snakemake(root, "-n", "train_mine")
    assert done.returncode == 1 and "config/mine.yaml" in done.stdout + done.stderr
