"""A grader that asks a judge, run on the evidence in an episode's row; the judge is a mock."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import made_run
import pytest
from test_graders import mock_judge

from openforge.environments.claw_eval import checkout
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
