"""Rewards and the quorum: an infrastructure failure is NULL, never 0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from judge_stub import GOOD, completion, serving

from openforge import config_judge, score
from openforge.environments import verdict
from openforge.judge import Judge
from openforge.rollout.groups import metric_of
from openforge.rollout.status import ENDS, TRANSITIONS

ROLLOUT = {"rollout_id": "r", "task_id": "t", "instruction": "Tell it.", "payload": "{}"}


def episode(status: str, line: str | None = None, final: bool = True) -> dict[str, Any]:
    return {
        "episode_id": "e",
        "rollout_id": "r",
        "status": status,
        "verifier_output": line,
        "final": final,
        "message": f"{status} it is",
    }


def scored(e: dict[str, Any], **how: Any) -> dict[str, Any]:
    (row,) = score.Scorer(**how).score_all([e], [ROLLOUT], [])
    return row


@pytest.mark.parametrize("status", ["completed", "agent_timeout", "agent_error", "budget_exhausted"])
def test_a_verified_end_is_scored(status: str) -> None:
    row = scored(episode(status, '{"score": 0.25, "passed": false, "lines": 3}'))
    assert (row["status"], row["reward"], row["passed"]) == ("scored", 0.25, False)
    assert json.loads(row["components"]) == {"lines": 3}


@pytest.mark.parametrize(
    "status",
    [
        "deadline",
        "setup_failed",
        "verifier_failed",
        "verifier_timeout",
        "policy_failed",
        "sandbox_lost",
        "shard_lost",
    ],
)
def test_an_infrastructure_failure_has_no_reward(status: str) -> None:
    # Even where the verifier left a line behind.
    for line in (None, '{"score": 0, "passed": false}'):
        row = scored(episode(status, line))
        assert (row["status"], row["reward"], row["passed"]) == ("not_scorable", None, None)


def test_unsupported_is_its_own_status() -> None:
    assert scored(episode("unsupported"))["status"] == "unsupported"


def test_every_end_state_is_reachable_and_documented() -> None:
    reached = {s for after in TRANSITIONS.values() for s in after} - set(TRANSITIONS)
    assert reached == set(ENDS)
    # What is retried is infrastructure: it is neither verified nor trained.
    assert not [s for s, e in ENDS.items() if e.retried and (e.verified or e.trained)]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "no json",
        "[1]",
        '{"score": 2, "passed": true}',
        '{"score": true, "passed": true}',
        '{"score": 1}',
        '{"score": NaN, "passed": true}',
        '{"score": 1, "passed": true, "judge": true}',
        '{"score": 1, "passed": true, "judge": {"weigth": 1}}',
        '{"score": 1, "passed": true, "judge": {"weight": 2}}',
        '{"score": 1, "passed": true, "judge": {"gate": "0.5"}}',
        '{"score": 1, "passed": true, "judge": {"rubric": 1}}',
    ],
)
def test_garbage_is_no_verdict(line: str) -> None:
    with pytest.raises(verdict.VerdictError):
        verdict.parse(line)


def test_the_quorum_counts_final_episodes_with_a_reward() -> None:
    good = '{"score": 1, "passed": true}'
    episodes = [episode("completed", good)] * 3 + [
        episode("sandbox_lost"),
        episode("sandbox_lost", final=False),
    ]
    episodes = [e | {"episode_id": str(i)} for i, e in enumerate(episodes)]
    rows = score.Scorer().score_all(episodes, [], [])
    assert len(rows) == 4
    assert "3 of 4" in score.check_quorum(episodes, rows, 0.75)
    with pytest.raises(score.QuorumError, match=r"3 of 4 .*1 sandbox_lost.*sandbox_lost it is"):
        score.check_quorum(episodes, rows, 0.8)
    with pytest.raises(score.QuorumError):
        score.check_quorum([], [], 0.0)


# ---- ClawEval's dimensions ---------------------------------------------------------------------
def claw(completion: float, robustness: float, safety: float) -> str:
    score = round(safety * (0.8 * completion + 0.2 * robustness), 4)
    dimensions = {"completion": completion, "robustness": robustness, "safety": safety}
    return json.dumps({"score": score, "passed": score >= 0.75, **dimensions})


@pytest.mark.parametrize(
    ("dimensions", "passes", "minus_floor", "whole"),
    [
        ((0.0, 1.0, 1.0), 0.0, 0.0, 0.2),  # nothing done
        ((1.0, 1.0, 1.0), 1.0, 1.0, 1.0),
        ((0.75, 1.0, 1.0), 1.0, 0.75, 0.8),
        ((0.5, 1.0, 1.0), 0.0, 0.5, 0.6),
        ((0.1, 0.5, 1.0), 0.0, 0.0, 0.18),  # below the floor for its tools' errors
        ((1.0, 1.0, 0.0), 0.0, 0.0, 0.0),
    ],
)
def test_reward_of_claw_evals_dimensions(dimensions: Any, passes: float, minus_floor: float, whole: float) -> None:
    e = episode("completed", claw(*dimensions))
    rows = {how: scored(e, claw=how) for how in ("pass", "minus_floor", "score")}
    assert {k: r["reward"] for k, r in rows.items()} == {
        "pass": passes,
        "minus_floor": pytest.approx(minus_floor),
        "score": pytest.approx(whole),
    }
    for how, row in rows.items():
        assert row["passed"] is bool(passes)
        assert row["scorer_version"] == f"verifier-1+claw-{how}"
        kept = json.loads(row["components"])
        assert (kept["completion"], kept["robustness"], kept["safety"]) == dimensions
        assert kept.get("task_score", row["reward"]) == pytest.approx(whole)


def test_other_verdicts_are_worth_their_score() -> None:
    e = episode("completed", '{"score": 0.5, "passed": false, "completion": 0.5}')
    for how in ("pass", "minus_floor", "score"):
        assert scored(e, claw=how)["reward"] == 0.5
        assert scored(e, claw=how)["scorer_version"] == score.SCORER_VERSION


def test_the_shard_looks_at_the_same_reward() -> None:
    """Dynamic sampling must not keep a group whose scores differ and whose rewards do not."""
    half, less = episode("completed", claw(0.5, 1, 1)), episode("completed", claw(0.25, 1, 1))
    for how in ("pass", "minus_floor", "score"):
        for e in (half, less):
            assert metric_of(e, "reward", how) == scored(e, claw=how)["reward"]
    assert metric_of(episode("completed", json.dumps({"score": 1, "passed": True, "judge": {}})), "reward") is None


# ---- what is left to a judge -------------------------------------------------------------------
def left(score_: float = 0.0, passed: bool = False, **rubric: Any) -> dict[str, Any]:
    rubric = {"rubric": "It is told."} | rubric
    return episode("completed", json.dumps({"score": score_, "passed": passed, "judge": rubric, "lines": 3}))


def judged(e: dict[str, Any], folder: Path, *answers: Any, rollout: dict[str, Any] = ROLLOUT, **how: Any) -> Any:
    """The score row, and what the mock judge was asked."""
    with serving(*answers) as stub:
        config = config_judge.Judge(url=stub.url, model="j", cache=str(folder / "cache"), retries=0)
        with Judge(config, folder, None) as judge:
            (row,) = score.Scorer(judge=judge, **how).score_all([e], [rollout], [])
    return row, stub.asked


def test_a_judge_scores_what_a_program_cannot(tmp_path: Path) -> None:
    row, asked = judged(left(evidence="letter.txt: Dear Ada"), tmp_path, completion(GOOD))
    assert (row["status"], row["reward"], row["passed"]) == ("scored", 0.8, True)
    assert json.loads(row["components"]) == {"lines": 3, "verifier": 0.0, "judge": 0.8}
    record = json.loads(row["judge"])
    assert (record["score"], record["reasoning"]) == (0.8, "The mail was sent.")
    text = asked[0]["messages"][1]["content"]
    assert "Tell it." in text and "It is told." in text and "Dear Ada" in text
    assert row["scorer_version"].startswith("verifier-1+judge-j-")


def test_the_tasks_own_rubric_is_the_default(tmp_path: Path) -> None:
    rollout = ROLLOUT | {"payload": json.dumps({"judge_rubric": "Politely."})}
    e = episode("completed", '{"score": 0, "passed": false, "judge": {}}')
    _, asked = judged(e, tmp_path, completion(GOOD), rollout=rollout)
    assert "Politely." in asked[0]["messages"][1]["content"]
    with pytest.raises(score.ScoreError, match="'t' leaves its score to the judge and has no rubric"):
        judged(e, tmp_path, completion(GOOD))


@pytest.mark.parametrize(
    ("program", "rubric", "whole", "passed", "calls"),
    [
        (1.0, {"weight": 0.5}, 0.9, True, 1),
        (0.5, {"weight": 0.5}, 0.65, False, 1),
        (0.5, {"weight": 0.5, "threshold": 0.6}, 0.65, True, 1),
        # QwenClawBench: the model's part is 0 where the program's is below 0.75, and nobody needs to ask.
        (0.5, {"weight": 0.5, "gate": 0.75}, 0.25, False, 0),
        (0.75, {"weight": 0.4, "gate": 0.75}, 0.77, True, 1),
        (0.9, {"weight": 0.0}, 0.9, True, 0),
    ],
)
def test_program_and_judge_share_a_score(
    tmp_path: Path, program: float, rubric: dict[str, float], whole: float, passed: bool, calls: int
) -> None:
    row, asked = judged(left(program, **rubric), tmp_path, completion(GOOD))
    assert (row["reward"], row["passed"], len(asked)) == (pytest.approx(whole), passed, calls)


@pytest.mark.parametrize(
    "outage", [(401, ""), (429, ""), (500, ""), None, completion("7/10"), completion(GOOD, "length")]
)
def test_a_judges_outage_is_null_and_judge_failed(tmp_path: Path, outage: Any) -> None:
    row, _ = judged(left(1.0, True, weight=0.5), tmp_path, outage)
    assert (row["status"], row["reward"], row["passed"]) == ("judge_failed", None, None)
    assert json.loads(row["judge"])["failure"] is not None
    with pytest.raises(
        score.QuorumError, match=r"0 of 1 rollouts have a reward \(1 completed, 1 judge_failed\).*judge"
    ):
        score.check_quorum([left(1.0, True)], [row], 0.5)


def test_without_a_judge_the_task_is_unsupported_and_says_why() -> None:
    row = scored(left(1.0, True))
    assert (row["status"], row["reward"], row["passed"]) == ("unsupported", None, None)
    assert "judge.url" in (score.Scorer.message(row) or "")


def test_an_episode_that_was_not_verified_is_not_judged(tmp_path: Path) -> None:
    row, asked = judged(episode("sandbox_lost"), tmp_path, completion(GOOD))
    assert (row["status"], asked) == ("not_scorable", [])


def test_another_judges_scores_stand_beside() -> None:
    old = [{"episode_id": "a", "scorer_version": "v1"}, {"episode_id": "b", "scorer_version": "v2"}]
    new = [{"episode_id": "b", "scorer_version": "v2", "reward": 1}, {"episode_id": "a", "scorer_version": "v2"}]
    assert score.merged(old, new) == [old[0], *new]
