"""The harness matrix on evaluations made by hand."""

from __future__ import annotations

import json
from pathlib import Path

import made_run
import pytest

from openforge import cli
from openforge.eval import evaluate_run, matrix


def cell(run_dir: Path, name: str, harness: str, outcomes: list[list[int]], policy: str, suite: str, **options: str):  # type: ignore[no-untyped-def]
    raws = [made_run.task(f"x{i}", "copy", "heldout") for i in range(len(outcomes))]
    more = {"harness": harness, "policy": policy, "benchmark": suite, "harness_options": json.dumps(options)}
    planned = [
        (made_run.rollout(raw, "eval", name, None, i) | more, float(o))
        for raw, own in zip(raws, outcomes, strict=True)
        for i, o in enumerate(own)
    ]
    made_run.write_cell(run_dir, "eval", name, None, planned)
    evaluate_run(run_dir, name, None)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "Snakefile").touch()
    (tmp_path / "config").mkdir()
    run_dir = tmp_path / "results" / "eval_claw"
    cell(run_dir, "reference", "scripted", [[1, 1, 1], [1, 1, 1]], "small", "ours", agent="reference")
    cell(run_dir, "cheat", "scripted", [[0, 0, 0], [0, 0, 0]], "small", "ours", agent="cheat")
    cell(run_dir, "codex", "codex", [[1, 1, 1], [1, 0, 0]], "small", "ours")
    cell(run_dir, "pi", "pi", [[1], [0]], "claw@3", "ours")
    cell(run_dir, "theirs", "pi", [[1, 1, 0]], "claw@3", "claweval")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_one_row_an_evaluation(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["matrix", "eval_claw"]) == 0
    head, *lines, _ = capsys.readouterr().out.splitlines()
    assert head.split() == list(matrix.HEAD)
    rows = [line.split("  ") for line in lines]
    told = [[c.strip() for c in row if c.strip()] for row in rows]
    # suite, policy, harness, cell, pass@1, pass^3, pass@3 by hand; then tasks, trials, missing.
    short = [[c.split(" [")[0] for c in row] for row in told]
    assert short == [
        ["claweval", "claw@3", "pi", "theirs", "0.667", "0.000", "1.000", "1", "3", "0"],
        ["ours", "none", "scripted cheat", "cheat", "0.000", "0.000", "0.000", "2", "6", "0"],
        ["ours", "none", "scripted reference", "reference", "1.000", "1.000", "1.000", "2", "6", "0"],
        ["ours", "claw@3", "pi", "pi", "0.500", "-", "-", "2", "2", "0"],
        ["ours", "small", "codex", "codex", "0.667", "0.500", "1.000", "2", "6", "0"],
    ]


def test_all_runs_and_json(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["matrix", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found[0]["run"], found[0]["benchmark"], found[0]["cell"]) == ("eval_claw", "claweval", "theirs")
    assert len(found) == 5


def test_bad_input_is_one_sentence(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["matrix", "eval_other"]) == cli.USAGE
    assert "there is no run 'eval_other' in results/" in capsys.readouterr().err
    file = project / "results/eval_claw/eval/cell=pi/iteration=none/eval.json"
    file.write_text("{")
    assert cli.main(["matrix"]) == cli.USAGE
    assert f"error: {file} cannot be read" in capsys.readouterr().err


def test_nothing_stands(tmp_path: Path) -> None:
    assert matrix.text(matrix.read(tmp_path, ["eval_x"])) == "no evaluation stands\n"
