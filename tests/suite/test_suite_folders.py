"""The suite as a whole: folders are what make.py writes, every task is complete, and kinds and splits are as said."""

from __future__ import annotations

import filecmp
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import make
import pytest
import yaml
from source import parts
from suite_rig import FOLDERS, SUITE, row

from openforge.environments.claw_eval import setup

DATA: dict[str, dict[str, Any]] = {f.name: yaml.safe_load((f / "task.yaml").read_text()) for f in FOLDERS}


def test_the_folders_are_what_make_writes(tmp_path: Path) -> None:
    parts.write_all(make.tasks(), tmp_path)
    assert [p.parent.name for p in sorted(tmp_path.glob("*/task.yaml"))] == [f.name for f in FOLDERS]
    for folder in FOLDERS:
        made = sorted(str(p.relative_to(tmp_path)) for p in (tmp_path / folder.name).rglob("*") if p.is_file())
        there = sorted(str(p.relative_to(SUITE)) for p in folder.rglob("*") if p.is_file())
        assert made == there
        assert filecmp.cmpfiles(tmp_path, SUITE, made, shallow=False)[0] == made


def test_a_folder_that_no_task_has_any_more_goes(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "task.yaml").touch()
    (tmp_path / "mine").mkdir()
    parts.write_all(make.tasks()[:1], tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["mine", make.tasks()[0].task_id])


def test_there_are_tasks_of_every_kind_level_and_split() -> None:
    levels = Counter(d["difficulty"] for d in DATA.values())
    assert set(levels) == {"easy", "medium", "hard"} and levels["medium"] >= 10 and levels["hard"] >= 8
    kinds = {d["tags"][0] for d in DATA.values()}
    assert {"data", "code", "mail", "calendar", "todo", "notes", "helpdesk", "multi", "trap", "impossible"} <= kinds
    assert sum(k.startswith("files-") for k in kinds) == 8
    assert {d["split"] for d in DATA.values()} == {"train", "heldout"}
    # Whoever trains on a family of easy jobs finds tasks of it in both splits, and no word that both have.
    for kind in (k for k in kinds if k.startswith("files-")):
        splits = Counter(d["split"] for d in DATA.values() if d["tags"][0] == kind)
        assert splits == {"train": 4, "heldout": 2}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f.name)
def test_a_task_is_complete(folder: Path) -> None:
    data = DATA[folder.name]
    assert data["task_id"] == folder.name and data["tags"][:2] == [data["category"], data["difficulty"]]
    agents = {n: (folder / "agents" / f"{n}.sh").read_text() for n in ("reference", "nothing", "cheat")}
    assert agents["nothing"].strip() == "true"
    # Whatever a tool prints must not be taken for the agent's last message.
    calls = [line for line in agents["reference"].splitlines() if line.startswith("tool ")]
    assert all(shlex.split(line)[-1] == ">/dev/null" for line in calls)
    found = row(folder)
    assert found["split"] == data["split"]
    # Nothing of what judges, of the services' state or of the agents is where the agent looks.
    assert not [f["path"] for f in found["files"] if f["path"].split("/")[0] in ("verifier", "fixtures", "agents")]
    made = setup.of(found)
    assert [s.name for s in made.services] == [s["name"] for s in data.get("services", ())]
    assert {t.name for t in made.tools} == {t["name"] for t in data.get("tools", ())}
    assert not [t.url for t in made.tools if t.url.endswith(("/audit", "/reset", "/health"))]
    assert ("{evidence}" in found["verifier"]["command"]) == bool(made.services)
