"""Task folders in ClawEval's format: hand-written ones, round trips, and what is refused."""

from __future__ import annotations

import errno
import inspect
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from openforge import tables
from openforge.environments.claw_eval import verifying
from openforge.environments.claw_eval.folder import (
    PLACEHOLDERS,
    FolderError,
    Unsupported,
    make_verifier,
    read_folder,
    write_folder,
)

TASK = """\
task_id: T900_rename
task_name: Rename a file
version: "1.0"
difficulty: easy
tags: [rename, files]
prompt:
  text: Rename old.txt to new.txt.
  language: en
environment:
  timeout_seconds: 60
  max_turns: 4
  enable_todo: false
sandbox_files: [old.txt, fixtures/more.csv]
split: heldout
verifier:
  name: renamed
  command: [python3, -I, verify.py]
  files: [verify.py]
  timeout_seconds: 5
"""


VERIFIER = {"command": ["true"], "timeout_seconds": 5}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    base = tmp_path / "mine" / "T900"
    for name, text in {"old.txt": "x", "fixtures/more.csv": "a,b\n", "verifier/verify.py": "print()"}.items():
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_text(text)
        os.chmod(base / name, 0o644)
    os.chmod(base / "old.txt", 0o755)
    (base / "task.yaml").write_text(TASK)
    return base


def test_a_folder_becomes_a_row_of_the_tasks_table(folder: Path) -> None:
    row = read_folder(folder)
    assert row["task_id"] == "T900_rename" and row["environment"] == "claw_eval" and row["split"] == "heldout"
    assert row["instruction"] == "Rename old.txt to new.txt." and row["tags"] == ["rename", "files"]
    assert row["files"] == [
        {"path": "old.txt", "content": b"x", "mode": 0o755},
        {"path": "fixtures/more.csv", "content": b"a,b\n", "mode": 0o644},
    ]
    assert row["task_limits"] == {"turns": 4, "tokens": None, "seconds": 60.0}
    verifier = row["verifier"]
    assert (verifier["name"], verifier["seconds"]) == ("renamed", 5.0)
    assert verifier["command"] == ["python3", "-I", "verify.py"]
    assert verifier["files"] == [{"path": "verify.py", "content": b"print()", "mode": 0o644}]
    assert json.loads(row["payload"]) == {
        "task_name": "Rename a file",
        "version": "1.0",
        "difficulty": "easy",
        "prompt": {"language": "en"},
        "environment": {"enable_todo": False},
    }
    assert row["source"] == "mine"
    assert tables.TASKS.arrow([row]).num_rows == 1


def test_written_and_read_again_it_is_the_same_row(folder: Path, tmp_path: Path) -> None:
    row = read_folder(folder)
    write_folder(tmp_path / "copy" / "T900", row)
    assert read_folder(tmp_path / "copy" / "T900", source="mine") == row
    # No limit is not the format's default limit.
    free = row | {"task_limits": {"turns": None, "tokens": 100, "seconds": None}, "payload": "{}"}
    write_folder(tmp_path / "free", free)
    again = read_folder(tmp_path / "free", source="mine")
    assert again["task_limits"] == free["task_limits"] and again["payload"] == "{}"


def test_the_format_s_defaults_hold_where_it_is_silent(folder: Path) -> None:
    data = yaml.safe_load(TASK)
    del data["environment"], data["sandbox_files"], data["split"]
    data["environment"] = {"fixtures": ["old.txt"]}
    (folder / "task.yaml").write_text(yaml.safe_dump(data))
    row = read_folder(folder, split="train")
    assert row["task_limits"] == {"turns": 20, "tokens": None, "seconds": 300.0} and row["split"] == "train"
    assert [f["path"] for f in row["files"]] == ["old.txt"]


def test_versions_follow_the_content(folder: Path) -> None:
    before = read_folder(folder)
    assert read_folder(folder) == before
    (folder / "verifier" / "verify.py").write_text("print(1)")
    changed = read_folder(folder)
    assert changed["verifier"]["version"] != before["verifier"]["version"]
    assert changed["source_revision"] != before["source_revision"]
    same = make_verifier("other name", before["verifier"]["command"], before["verifier"]["files"], 9)
    assert same["version"] == before["verifier"]["version"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task_id": None}, r"task.yaml: key 'task_id' is required"),
        ({"task_id": 7}, r"task.yaml: key 'task_id' is 7; it must be a text"),
        ({"prompt": {"language": "en"}}, r"task.yaml: key 'prompt.text' is required"),
        ({"split": None}, r"task.yaml: key 'split' is required"),
        ({"environment": {"max_turns": 0}}, r"'environment.max_turns' is 0; it must be a whole number above 0"),
        ({"environment": {"max_turns": 99999999999999}}, r"'environment.max_turns' is 99999999999999; .* 2147483647$"),
        ({"environment": {"max_turns": 2**31}}, r"it must be a whole number above 0 and at most 2147483647$"),
        (
            {"environment": {"max_tokens": 2**63}},
            r"task.yaml: key 'environment.max_tokens' .* at most 92233720368547758",
        ),
        (
            {"environment": {"timeout_seconds": "1m"}},
            r"'environment.timeout_seconds' is '1m'; it must be a finite number",
        ),
        ({"environment": {"timeout_seconds": math.nan}}, r"'environment.timeout_seconds' is nan; it must be a finite"),
        ({"environment": {"timeout_seconds": math.inf}}, r"'environment.timeout_seconds' is inf; it must be a finite"),
        ({"environment": {"timeout_seconds": 10**400}}, r"'environment.timeout_seconds' is 10+; it must be a finite"),
        ({"sandbox_files": ["no.txt"]}, r"task.yaml: sandbox_files: .*/no.txt does not exist"),
        ({"sandbox_files": ["../secret"]}, r"sandbox_files: '../secret' must be a plain path relative"),
        ({"sandbox_files": ["/etc/passwd"]}, r"sandbox_files: '/etc/passwd' must be a plain path relative"),
        ({"sandbox_files": ["link"]}, r"sandbox_files: .*/link is a link out of the task's folder"),
        ({"sandbox_files": ["old.txt", "old.txt"]}, r"task.yaml: sandbox_files: 'old.txt' is listed twice$"),
        (
            {"sandbox_files": ["verifier/verify.py"]},
            r"sandbox_files: 'verifier/verify.py' lies in verifier/; the agent",
        ),
        ({"sandbox_files": ["within"]}, r"sandbox_files: 'within' lies in verifier/; the agent would see what judges"),
        (
            {"sandbox_files": None, "environment": {"fixtures": ["verifier/verify.py"]}},
            r"task.yaml: environment.fixtures: 'verifier/verify.py' lies in verifier/",
        ),
        ({"sandbox_files": ["x" * 300]}, r"/x{300} cannot be read: File name too long$"),
        ({"verifier": VERIFIER | {"fils": []}}, r"unknown key 'verifier.fils'; did you mean 'verifier.files'\?"),
        ({"verifier": VERIFIER | {"x": 1}}, r"unknown key 'verifier.x'; known: name, command, files, timeout_seconds$"),
        ({"verifier": VERIFIER | {"files": ["verify.py"] * 2}}, r"verifier.files: 'verify.py' is listed twice$"),
        (
            {"verifier": VERIFIER | {"files": ["verify.py"]}, "sandbox_grader_files": ["verify.py"]},
            r"verifier.files and sandbox_grader_files: 'verify.py' is listed twice$",
        ),
        (
            {"verifier": VERIFIER | {"command": ["python3", "{workspce}"]}},
            r"verifier.command: unknown placeholder \{workspce\}; known: \{answer\}, \{workspace\}, ",
        ),
        ({"verifier": VERIFIER | {"timeout_seconds": math.inf}}, r"'verifier.timeout_seconds' is inf; it must be"),
        ({"verifier": {"files": [], "timeout_seconds": 5}}, r"key 'verifier.command' is required"),
        ({"verifier": {"command": ["true"], "files": []}}, r"key 'verifier.timeout_seconds' is required"),
        ({"verifier": {"command": [], "timeout_seconds": 5}}, r"key 'verifier.command' must not be empty"),
    ],
)
def test_what_does_not_fit_is_named_with_file_and_key(folder: Path, change: dict[str, Any], message: str) -> None:
    (folder / "link").symlink_to("/etc/hostname")
    (folder / "within").symlink_to("verifier/verify.py")
    (folder / "verify.py").touch()
    data = yaml.safe_load(TASK) | change
    (folder / "task.yaml").write_text(yaml.safe_dump({k: v for k, v in data.items() if v is not None}))
    with pytest.raises(FolderError, match=message):
        read_folder(folder)


def test_a_published_grader_without_its_checkout_is_unsupported(folder: Path) -> None:
    data = yaml.safe_load(TASK) | {"scoring_components": []}
    del data["verifier"]
    (folder / "task.yaml").write_text(yaml.safe_dump(data))
    with pytest.raises(Unsupported, match=r"task 'T900_rename' needs the ClawEval checkout around its") as e:
        read_folder(folder)
    assert (e.value.task_id, e.value.what) == ("T900_rename", "the ClawEval checkout around its grader.py")


def test_the_largest_limits_and_both_placeholders_fit_the_table(folder: Path) -> None:
    command = ["python3", "verify.py", "{answer}", "{workspace}", "{}", "{ print }"]
    limits = {"max_turns": 2**31 - 1, "max_tokens": 2**63 - 1, "timeout_seconds": 1e300}
    data = yaml.safe_load(TASK) | {"environment": limits, "verifier": VERIFIER | {"command": command}}
    (folder / "task.yaml").write_text(yaml.safe_dump(data))
    (row,) = tables.TASKS.arrow([read_folder(folder)]).to_pylist()
    assert row["task_limits"] == {"turns": 2**31 - 1, "tokens": 2**63 - 1, "seconds": 1e300}
    assert row["verifier"]["command"] == command


def test_the_environment_fills_in_the_placeholders_that_are_known() -> None:
    source = inspect.getsource(verifying.Verifier)
    assert set(re.findall(r'"(\{\w+\})":', source)) == set(PLACEHOLDERS)


def test_a_file_of_another_user_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(FolderError, match=f"^{folder}/old.txt cannot be read: Permission denied$"):
        read_folder(folder)


def test_no_folder_and_no_yaml_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match=f"{tmp_path} is no task folder: it holds no task.yaml"):
        read_folder(tmp_path)
    (tmp_path / "task.yaml").write_text("a: [")
    with pytest.raises(FolderError, match=r"task\.yaml is not readable YAML"):
        read_folder(tmp_path)


def test_a_file_that_would_hide_the_folder_s_own_is_refused(folder: Path, tmp_path: Path) -> None:
    row = read_folder(folder)
    row["files"] = [{"path": "verifier/x", "content": b"", "mode": 0o644}]
    with pytest.raises(FolderError, match="a task's file cannot be named 'verifier/x'"):
        write_folder(tmp_path / "out", row)
