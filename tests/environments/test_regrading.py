"""A grader that asks a judge, run on the evidence in an episode's row; the judge is a mock."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import made_run
import pytest
from test_graders import mock_judge

from openforge import config_judge
from openforge.environments import verdict
from openforge.environments.claw_eval import checkout
from openforge.judge import Judge
from openforge.score import Scorer
from openforge.score.published import regrade

CHECKOUT = Path(__file__).parent / "samples" / "claweval_checkout"


@pytest.mark.parametrize(
    ("answer", "status", "score"),
    [
        # 0.8 x 0.5 + 0.2, by hand.
        ((200, '{"score": 0.5, "reasoning": "so so"}'), "scored", 0.6),
        ((401, ""), "judge_failed", None),
    ],
)
def test_an_episode_s_row_is_evidence_enough(
    answer: tuple[int, str], status: str, score: float | None, tmp_path: Path
) -> None:
    task = checkout.read_task(CHECKOUT / "tasks" / "T050_report", "x")
    rollout = made_run.rollout(task, "eval", "test", None, 0)
    episode = made_run.episode(rollout, "completed", turns=2)
    calls = [made_run.call(episode, i) for i in (1, 0)]
    with mock_judge(answer) as (endpoint, asked):
        graded = regrade(episode, rollout, calls, endpoint, tmp_path, Path(sys.executable))
    assert graded.status == status and len(asked) == 1
    assert f"answer 1 {made_run.HOSTILE}" in asked[0]["messages"][1]["content"]
    if score is not None:
        told = json.loads(graded.output or "")
        assert (told["score"], told["judge_calls"][0]["reasoning"]) == (score, "so so")


LATER = json.dumps({"score": 0.0, "passed": False, "judge": {"grader": True}})


@pytest.mark.parametrize(
    ("answer", "claw", "expected"),
    [
        ((200, '{"score": 1, "reasoning": "good"}'), "pass", ("scored", 1.0, True)),
        # 0.8 x 0.5 + 0.2 = 0.6: not passed; above the floor by (0.6 - 0.2) / 0.8.
        ((200, '{"score": 0.5, "reasoning": "so so"}'), "pass", ("scored", 0.0, False)),
        ((200, '{"score": 0.5, "reasoning": "so so"}'), "minus_floor", ("scored", pytest.approx(0.5), False)),
        ((401, ""), "pass", ("judge_failed", None, None)),
    ],
)
def test_the_stage_score_runs_a_grader_that_asks_the_judge(
    answer: tuple[int, str], claw: verdict.Claw, expected: tuple[str, Any, bool | None], tmp_path: Path
) -> None:
    task = checkout.read_task(CHECKOUT / "tasks" / "T050_report", "x")
    rollout = made_run.rollout(task, "eval", "test", None, 0)
    episode = made_run.episode(rollout, "completed") | {"verifier_output": LATER}
    with mock_judge(answer) as (endpoint, _):
        judge = Judge(config_judge.Judge(url=endpoint.url, model="mock"), tmp_path, None)
        python = Path(sys.executable)
        by = Scorer(claw, judge, lambda e, r, c: regrade(e, r, c, endpoint, tmp_path, python))
        (row,) = by.score_all([episode], [rollout], [made_run.call(episode, 0)])
    assert (row["status"], row["reward"], row["passed"]) == expected
    assert row["scorer_version"].startswith(f"verifier-1+claw-{claw}+judge-mock")
    if row["status"] == "scored":
        assert json.loads(row["judge"])["calls"][0]["method"] == "evaluate"
        assert json.loads(row["components"])["robustness"] == 1.0


def test_without_a_judge_it_is_unsupported_and_never_0(tmp_path: Path) -> None:
    task = checkout.read_task(CHECKOUT / "tasks" / "T050_report", "x")
    rollout = made_run.rollout(task, "eval", "test", None, 0)
    episode = made_run.episode(rollout, "completed") | {"verifier_output": LATER}
    (row,) = Scorer().score_all([episode], [rollout], [])
    assert (row["status"], row["reward"], row["passed"]) == ("unsupported", None, None)
