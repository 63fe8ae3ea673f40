"""A task folder's own scripts in the agent's place, through the importer, the plan and a real sandbox."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from stub_harness import End

from openforge import plan
from openforge.config import Cell, EvalConfig
from openforge.environments import create_env, llm_args
from openforge.environments.claw_eval.folder import read_folder, write_folder
from openforge.harnesses import get
from openforge.sandboxes import LocalBackend

TASK = """
task_id: t1
split: heldout
prompt: {text: "Write 42 to answer.txt and say what you wrote."}
tags: [files]
verifier: {name: check, command: [python3, -I, verify.py, "{workspace}", "{answer}"], files: [verify.py],
  timeout_seconds: 20}
"""
VERIFY = """
import json, pathlib, sys
work, answer = map(pathlib.Path, sys.argv[1:])
made = work / "answer.txt"
good = made.exists() and made.read_text().strip() == "42" and "42" in answer.read_text()
print(json.dumps({"score": float(good), "passed": good}))
"""
AGENTS = {"reference": "echo 42 > answer.txt\necho I wrote 42", "cheat": "echo '{\"score\": 1}' > answer.txt\nexit 3"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "suite" / "t1"
    for name, text in {
        "task.yaml": TASK,
        "verifier/verify.py": VERIFY,
        **{f"agents/{k}.sh": v for k, v in AGENTS.items()},
    }.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return path


@pytest.mark.parametrize(
    ("agent", "score", "answer"),
    [("reference", 1.0, "I wrote 42"), ("nothing", 0.0, None), ("cheat", 0.0, None)],
)
async def test_agents_of_a_folder(folder: Path, backend: LocalBackend, agent: Any, score: float, answer: Any) -> None:
    cell = Cell.model_validate({"name": "c", "harness": {"name": "scripted", "agent": agent}})
    config = EvalConfig.model_validate({"model": "m", "tasks": {"source": "suite"}})
    (row,) = plan.eval_table("r", config, [read_folder(folder)], cell, 0, "m")
    async with get(row["harness"]).warm() as harness:
        sandbox = await backend.create("e1", binds=harness.binds())

        async def close(harness_exited: bool) -> End:
            return End()

        result = await create_env("claw_eval", sandbox).run(
            task=row,
            llm_args=llm_args("http://127.0.0.1:8080/s/e1", "key", "policy", 2048),
            harness=harness,
            harness_options=json.loads(row["harness_options"]),
            limits=row["limits"],
            session=close,
        )
    assert (result.status, result.message) == ("completed", None)
    assert result.verifier_output is not None and f'"score": {score}' in result.verifier_output
    assert result.answer == answer


def test_agents_go_with_the_folder(folder: Path, tmp_path: Path) -> None:
    row = read_folder(folder)
    write_folder(tmp_path / "again" / "suite" / "t1", row)
    again = read_folder(tmp_path / "again" / "suite" / "t1")
    assert again == row
    assert (tmp_path / "again/suite/t1/agents/reference.sh").read_text() == AGENTS["reference"]
