"""What a user types wrong ends a command with one sentence and exit code 1, without a traceback, before any job."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from test_dag import snakemake

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workflow with one more configuration a mistake."""
    root = tmp_path_factory.mktemp("project")
    for part in ("Snakefile", "rules", "config", "profiles", "envs", "scripts"):
        src = ROOT / part
        (shutil.copytree if src.is_dir() else shutil.copy)(src, root / part)
    return root


def sentence(root: Path, *words: str) -> str:
    """The error of a command that must have none but this: exit code 1, no traceback, nothing written."""
    done = snakemake(root, *words)
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    assert "Traceback" not in said and "Exception" not in said and "  File" not in said, said
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, said
    assert not (root / "results").exists()
    return errors[0]


TINY = (ROOT / "config" / "tiny.yaml").read_text()


def test_a_wrong_file(project: Path) -> None:
    (project / "config" / "mine.yaml").mkdir()
    try:
        assert sentence(project, "train_mine") == "error: config/mine.yaml cannot be read: Is a directory"
    finally:
        (project / "config" / "mine.yaml").rmdir()
    (project / "config" / "Mine.yaml").write_text(TINY)
    try:
        assert sentence(project, "train_Mine") == "error: run name 'Mine' must match [a-z0-9_]+"
    finally:
        (project / "config" / "Mine.yaml").unlink()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["train_nosuch"],
            "config/nosuch.yaml does not exist; targets there are: train_claw, train_claw_small, train_demo, "
            "eval_claw, eval_claweval, eval_demo, eval_qwenclaw, train_tiny",
        ),
        (["tiny"], "error: 'tiny' is a run; its target is: snakemake train_tiny"),
        (["eval_demo", "--config", "policy="], "--config policy= is empty; give it a value, or write policy=null"),
    ],
)
def test_a_wrong_command(project: Path, words: list[str], expected: str) -> None:
    assert sentence(project, "-n", *words).endswith(expected)


def test_a_wrong_task_ends_its_job_with_a_sentence(project: Path, tmp_path: Path) -> None:
    root = tmp_path / "project"
    shutil.copytree(project, root, symlinks=True)
    (root / "my_tasks" / "one").mkdir(parents=True)
    (root / "my_tasks" / "one" / "task.yaml").write_text("task_id: a\nprompt: {text: hi}\n")
    text = TINY.replace("{source: tiny, train: 8, heldout: 4}", "{source: my_tasks}")
    (root / "config" / "mine.yaml").write_text(text)
    done = snakemake(root, "results/mine/tasks.parquet")
    said = done.stdout + done.stderr
    assert done.returncode == 1 and "Traceback" not in said
    told = f"error: tasks of mine: {root}/my_tasks/one/task.yaml: key 'verifier' is required (a mapping)"
    # By the job, in its log, and once more behind what Snakemake has to say about it.
    assert said.rindex(told) > said.rindex("Exiting because a job execution failed"), said
    assert not (root / "results" / "mine" / "tasks.parquet").exists()
