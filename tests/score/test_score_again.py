"""`openforge score`: a judge over finished episodes, beside what was scored before. The judge is a mock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import made_run
import pytest
from judge_stub import GOOD, completion, serving

from openforge import cli, run_lock, store
from openforge import tables as t

CONFIG = """
model: tiny-random
tasks: {source: tiny, heldout: 2}
cells: [{name: c, n: 1}]
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a finished evaluation of two tasks: a program scored one, the other is left to a judge."""
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "eval_x.yaml").write_text(CONFIG)
    (tmp_path / "Snakefile").touch()
    run_dir = tmp_path / "results" / "eval_x"
    raws = [made_run.task(name, "copy", "heldout") for name in ("a", "b")]
    planned = [(made_run.rollout(raw, "eval", "c", 0, 0), 1.0) for raw in raws]
    episodes = made_run.write_cell(run_dir, "eval", "c", 0, planned)
    lines = [{"score": 1, "passed": True}, {"score": 0, "passed": False, "judge": {"rubric": "Politely."}}]
    rows = [e | {"verifier_output": json.dumps(line)} for e, line in zip(episodes, lines, strict=True)]
    t.write_table(run_dir / t.partition_path("episodes", "eval", "c", 0, 1), t.EPISODES, rows)
    first, second = (made_run.score(e, 1.0, "verifier-1") for e in episodes)
    second |= {"status": "unsupported", "reward": None, "passed": None}
    t.write_table(run_dir / t.partition_path("scores", "eval", "c", 0), t.SCORES, [first, second])
    monkeypatch.chdir(tmp_path)
    # A run's lock is held until its process ends, and this one runs several commands.
    monkeypatch.setattr(run_lock, "take", lambda run_dir, command: None)
    return tmp_path


def again(*more: str, **judge: Any) -> int:
    settings = ", ".join(f"{k}: {json.dumps(v)}" for k, v in judge.items())
    return cli.main(["score", "eval_x", *more, *(["--config", f"judge={{{settings}}}"] if judge else [])])


def scores(project: Path) -> list[dict[str, Any]]:
    sql = "select task_id, s.* from scores s join episodes using (episode_id) order by task_id, s.scorer_version"
    return store.rows(project / "results" / "eval_x", sql)


def test_a_judge_over_finished_episodes(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(completion(GOOD)) as stub:
        assert again(url=stub.url, model="one") == 0
        told = capsys.readouterr().out
        assert "eval c 0000: 2 scored; 1 rewards changed" in told
        assert "pass@1 1.000" in told
        # Asked once more it costs nothing, and changes nothing.
        assert again(url=stub.url, model="one") == 0
        assert len(stub.asked) == 1
        assert "0 rewards changed" in capsys.readouterr().out
        # Another judge's scores stand beside the first one's.
        stub.answers = [completion('{"score": 0.25, "reasoning": "Rude."}')]
        assert again(url=stub.url, model="two") == 0
    assert "pass@1 0.500" in capsys.readouterr().out
    rows = [r for r in scores(project) if r["task_id"] == "b"]
    versions = {r["scorer_version"].rpartition("-")[0]: r["reward"] for r in rows}
    assert versions == {"verifier": None, "verifier-1+judge-one": 0.8, "verifier-1+judge-two": 0.25}
    (latest,) = store.rows(project / "results/eval_x", "select reward, passed from episodes where task_id = 'b'")
    assert latest == {"reward": 0.25, "passed": False}
    result = json.loads((project / "results/eval_x/eval/cell=c/iteration=0000/eval.json").read_text())
    assert (result["p"], result["missing"]) == (0.5, 0)


def test_an_outage_loses_nothing_and_says_so(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving((401, "no such key")) as stub:
        assert again(url=stub.url, model="one") == 1
    assert "1 judge_failed, 1 scored" in capsys.readouterr().out
    failed = [r for r in scores(project) if r["status"] == "judge_failed"]
    assert [(r["task_id"], r["reward"]) for r in failed] == [("b", None)]
    with serving(completion(GOOD)) as stub:
        # The same judge at another place is another judge.
        assert again(url=stub.url, model="one") == 0
    assert [r["reward"] for r in scores(project) if r["task_id"] == "b" and r["status"] == "scored"] == [0.8]


@pytest.mark.parametrize(
    ("words", "judge", "sentence"),
    [
        (["--cell", "d"], {}, "run 'eval_x' has no such scores; what has been scored: eval c 0000"),
        (["--iteration", "3"], {}, "no such scores"),
        ([], {"url": "http://127.0.0.1:1/v1"}, "key 'judge.model' is required"),
        ([], {"url": "http://127.0.0.1:1/v1", "model": "m", "retrys": 1}, "did you mean 'judge.retries'?"),
        ([], {"url": "https://u:p@h/v1", "model": "m"}, "without user, password"),
        ([], {"url": "http://h/v1", "model": "m", "api_key_env": "sk-1 2"}, "judge.api_key_env must be the NAME"),
        ([], {"url": "http://h/v1", "model": "m", "api_key_env": "NO_SUCH"}, "judge.api_key_env names the environment"),
        (["--config", "judge"], {}, "must be KEY=VALUE"),
    ],
)
def test_bad_input_is_one_sentence(
    project: Path, capsys: pytest.CaptureFixture[str], words: list[str], judge: dict[str, Any], sentence: str
) -> None:
    before = scores(project)
    assert again(*words, **judge) == cli.USAGE
    told = capsys.readouterr().err
    assert sentence in told
    assert len(told.splitlines()) == 1
    assert scores(project) == before
