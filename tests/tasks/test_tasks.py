"""The generated tasks: what solves them passes, what does not fails, and the splits share nothing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from openforge import tables
from openforge.config import EvalConfig, Tasks
from openforge.tasks import TasksError, configured, demo, raw_tasks

ROOT = Path(__file__).resolve().parents[2]


def verdict(task: dict[str, Any], folder: Path, commands: list[str]) -> dict[str, Any]:
    """Set the task up, run commands in its work folder, judge it with the task's own verifier."""
    work, grader = folder / "work", folder / "grader"
    for base, files in ((work, task["files"]), (grader, task["verifier"])):
        base.mkdir(parents=True)
        for name, text in files.items():
            (base / name).write_text(text)
    for command in commands:
        subprocess.run(command, shell=True, cwd=work, check=True, capture_output=True)
    argv = [sys.executable, "-I", "verify.py", *(a.replace("{workspace}", str(work)) for a in task["arguments"])]
    done = subprocess.run(argv, cwd=grader, capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("kind", [*demo.TRAINED, *demo.UNSEEN])
def test_the_known_solution_passes_and_less_fails(kind: str, tmp_path: Path) -> None:
    split = "unseen" if kind in demo.UNSEEN else "heldout"
    for seed in (0, 1):
        task = demo.make(kind, seed, split)
        gold = json.loads(task["payload"])["gold"]
        assert task["turns"] == len(gold) == (2 if kind.startswith("note_") else 1)
        assert verdict(task, tmp_path / f"gold{seed}", gold)["passed"] is True
        assert verdict(task, tmp_path / f"idle{seed}", [])["passed"] is False
        assert verdict(task, tmp_path / f"stray{seed}", [*gold, "touch stray"])["passed"] is False
        assert verdict(task, tmp_path / f"link{seed}", [*gold, "ln -s /etc/passwd stray"])["passed"] is False
        # What only the note says cannot be done without it.
        assert verdict(task, tmp_path / f"first{seed}", gold[:1])["passed"] is (len(gold) == 1)


def test_a_note_is_no_shell_code(tmp_path: Path) -> None:
    task = demo.make("note_delete", 0, "train")
    (note,) = [n for n, text in task["files"].items() if text.startswith("Delete")]
    assert verdict(task, tmp_path, [f"sh {note} || true"])["passed"] is False


def test_the_splits_share_no_name_and_the_prompt_none_with_them() -> None:
    train, heldout = set(demo.WORDS["train"].split()), set(demo.WORDS["heldout"].split())
    prompt = set(
        re.findall(r"[a-z]+(?=\.(?:txt|md))|(?<=named )[a-z]+", (ROOT / "config/harness/demo.yaml").read_text())
    )
    assert min(len(train), len(heldout)) > 20 and prompt >= {"berry", "plum", "fig"}
    assert not train & heldout and not (train | heldout) & (prompt - {"answer"})
    tasks = demo.generate(96, 64, 32, 0)
    assert len({t["task_id"] for t in tasks}) == 192
    kinds = {split: {t["kind"] for t in tasks if t["split"] == split} for split in ("train", "heldout", "unseen")}
    assert len(kinds["train"]) == 12 and kinds["train"] == kinds["heldout"] and not kinds["unseen"] & kinds["train"]


def test_generated_tasks_stand_as_folders_and_fit_the_table(tmp_path: Path) -> None:
    config = Tasks(source="demo", train=12, heldout=2, unseen=2, seed=0)
    rows = raw_tasks(config, "claw_eval", tmp_path / "tasks", ROOT)
    assert len(rows) == 16 and len(list((tmp_path / "tasks").glob("*/task.yaml"))) == 16
    tables.TASKS.arrow(rows)
    assert rows == raw_tasks(config, "claw_eval", tmp_path / "again", ROOT)
    # The folders themselves are a source too: what a user's own would be.
    assert {r["environment"] for r in rows} == {"claw_eval"}
    own = raw_tasks(Tasks(source=str(tmp_path / "tasks")), "my.env", tmp_path / "unused", ROOT)
    assert {(r["task_id"], r["instruction"], r["split"]) for r in own} == {
        (r["task_id"], r["instruction"], r["split"]) for r in rows
    }
    assert {r["environment"] for r in own} == {"my.env"}


def test_a_missing_source_and_doubled_ids_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(TasksError, match=r"nosuch.*is no folder"):
        raw_tasks(Tasks(source="nosuch"), "claw_eval", tmp_path / "t", tmp_path)
    raw_tasks(Tasks(source="tiny", train=1, heldout=0), "claw_eval", tmp_path / "s" / "a", ROOT)
    one = next((tmp_path / "s" / "a").iterdir())
    one.rename(tmp_path / "s" / "x")
    (tmp_path / "s" / "a").rmdir()
    subprocess.run(["cp", "-r", str(tmp_path / "s" / "x"), str(tmp_path / "s" / "y")], check=True)
    with pytest.raises(TasksError, match="several folders"):
        raw_tasks(Tasks(source=str(tmp_path / "s")), "claw_eval", tmp_path / "t", ROOT)


def test_tasks_are_chosen_by_tag(tmp_path: Path) -> None:
    def ids(*tags: str) -> set[str]:
        config = Tasks(source="suites/openforge_claw", tags=tags)
        return {r["task_id"] for r in raw_tasks(config, "claw_eval", tmp_path, ROOT)}

    # The suite's README: eight families of six tasks each, nine of the kind data.
    assert len(ids("files-*")) == 48 and len(ids("files-copy", "data")) == 15
    assert {i.rsplit("-", 2)[0] for i in ids("files-copy", "files-find")} == {"files-copy", "files-find"}
    with pytest.raises(TasksError, match=r"tasks\.tags: no task of 'suites/openforge_claw' has the tag 'file'"):
        ids("data", "file")


def test_the_judges_endpoint_plays_users_too() -> None:
    given = {"model": "tiny-random", "tasks": {"source": "tiny"}}
    assert configured(EvalConfig.model_validate(given)) == frozenset()
    judged = EvalConfig.model_validate(given | {"judge": {"url": "http://127.0.0.1:1/v1", "model": "m"}})
    assert configured(judged) == {"judge", "user"}


@pytest.mark.parametrize("source", ["demo", "tiny"])
def test_tasks_made_twice_are_the_same_file(source: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        config = Tasks(source=source, train=5, heldout=3, unseen=2)
        rows = raw_tasks(config, "claw_eval", tmp_path / name / "tasks", tmp_path)
        tables.write_table(tmp_path / f"{name}.parquet", tables.TASKS, rows)
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()
