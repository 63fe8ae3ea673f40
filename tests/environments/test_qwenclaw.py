"""QwenClawBench checkouts: a stand-in's tasks as rows, and what is wrong with one."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from openforge import tables
from openforge.config import Tasks
from openforge.environments.claw_eval import qwenclaw, setup
from openforge.environments.claw_eval.keys import FolderError, Unsupported
from openforge.tasks import raw_tasks

CHECKOUT = Path(__file__).parent / "samples" / "qwenclaw_checkout"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return Path(shutil.copytree(CHECKOUT, tmp_path / "qwen"))


def test_a_checkout_is_a_source(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = raw_tasks(Tasks(source=str(base)), "claw_eval", tmp_path / "unused", tmp_path)
    tables.TASKS.arrow([row])
    assert (row["task_id"], row["split"], row["source"]) == ("task_00001_total", "test", "qwen")
    assert row["instruction"] == "Add up the column `sum` of `sales.csv` and write the total to `total.txt`."
    assert [(f["path"], f["content"]) for f in row["files"]] == [
        ("sales.csv", b"day,sum\n1,10\n2,32\n"),
        ("notes/hint.txt", b"--- a line of dashes in a value does not end the front matter\nThe column is `sum`.\n"),
    ]
    assert row["task_limits"] == {"turns": None, "tokens": None, "seconds": 90.0}
    assert row["tags"] == ["data_analysis"]
    sections = json.loads(row["payload"])["sections"]
    # A heading in the code is none.
    assert set(sections) == {"Expected Behavior", "Grading Criteria", "Automated Checks"}
    assert capsys.readouterr().err.splitlines() == [
        f"warning: {base}: 1 tasks are left out: they need a judge, and none is configured",
        f"warning: {base}: 1 tasks are left out: they need a library of its checks (matplotlib)",
    ]
    assert len(raw_tasks(Tasks(source=str(base)), "claw_eval", tmp_path / "unused", tmp_path, {"judge"})) == 2


def test_a_hybrid_s_weights_and_rubric_are_its_verifier_s(base: Path) -> None:
    row = qwenclaw.read_task(base / "tasks" / "task_00002_letter.md", "x")
    assert setup.of(row).needs == ("judge",) and setup.of(row).grading == "workspace"
    assert row["verifier"]["command"][-3:] == ["hybrid", "0.25", "0.75"]
    files = {f["path"]: f["content"] for f in row["verifier"]["files"]}
    assert files["rubric.md"] == b"Is it polite?\n\nWhat is expected of the agent:\nA letter."
    with pytest.raises(Unsupported, match=r"a library of its checks \(matplotlib\)"):
        qwenclaw.read_task(base / "tasks" / "task_00003_chart.md", "x")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("---\nid", "id", " must begin with front matter between two lines of ---"),
        ("id: task_00002_letter", "name: 1", ": key 'id' is required"),
        ("id: task_00002_letter", "id: [", ": the front matter is not readable YAML"),
        (
            "grading_type: hybrid",
            "grading_type: mixed",
            ": key 'grading_type' is 'mixed'; it must be one of automated,",
        ),
        ("automated: 0.25", "automated: 2", ": key 'grading_weights.automated' is 2; it must be a number from 0 to 1"),
        (
            "automated: 0.25",
            "auto: 0.25",
            r": unknown key 'grading_weights.auto'; did you mean 'grading_weights.automated'\?",
        ),
        (
            "timeout_seconds: 120",
            "timeout_seconds: soon",
            ": key 'timeout_seconds' is 'soon'; it must be a finite number",
        ),
        (
            "workspace_files: []",
            "workspace_files: [a]",
            r": key 'workspace_files' is \['a'\]; it must be a list of map",
        ),
        (
            "workspace_files: []",
            "workspace_files: [{source: no.txt, dest: a.txt}]",
            r": workspace_files\[0\].source: .*/assets/no.txt does not exist",
        ),
        (
            "workspace_files: []",
            "workspace_files: [{source: data/sales.csv, dest: ../a.txt}]",
            r": workspace_files\[0\].dest: '../a.txt' must be a plain path relative to the folder",
        ),
        (
            "workspace_files: []",
            "workspace_files: [{dest: a.txt}]",
            r": key 'workspace_files\[0\]' must have either 'source' and 'dest' or 'path' and 'content'",
        ),
        ("## Prompt", "## Task", ": section '## Prompt' is missing or empty"),
        ("## LLM Judge Rubric", "## Rubric", ": section '## LLM Judge Rubric' is missing or empty, but grading_type"),
        ("def grade(", "def score(", r": section '## Automated Checks' defines no grade\(transcript, workspace_path\)"),
        ("```python", "```", ": section '## Automated Checks' must hold a block of Python"),
        ("return {", "return {{", ": section '## Automated Checks', line 4: this is no Python"),
        ("## Grading Criteria", "## Prompt", ": section '## Prompt' stands there twice"),
    ],
)
def test_what_does_not_fit_is_one_sentence_with_the_file(base: Path, old: str, new: str, message: str) -> None:
    file = base / "tasks" / "task_00002_letter.md"
    text = file.read_text()
    assert text.count(old) >= 1
    file.write_text(text.replace(old, new, 1))
    with pytest.raises(FolderError, match=f"^{re.escape(str(file))}{message}"):
        qwenclaw.read_task(file, "x")
