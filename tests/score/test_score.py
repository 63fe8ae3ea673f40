"""Rewards and the quorum: an infrastructure failure is NULL, never 0."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from openforge import score
from openforge.environments import verdict
from openforge.rollout.status import ENDS, TRANSITIONS

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def episode(status: str, line: str | None = None, final: bool = True) -> dict[str, Any]:
    return {
        "episode_id": "e",
        "status": status,
        "verifier_output": line,
        "final": final,
        "message": f"{status} it is",
    }


@pytest.mark.parametrize("status", ["completed", "agent_timeout", "agent_error", "budget_exhausted"])
def test_a_verified_end_is_scored(status: str) -> None:
    row = score.score(episode(status, '{"score": 0.25, "passed": false, "lines": 3}'), NOW)
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
        row = score.score(episode(status, line), NOW)
        assert (row["status"], row["reward"], row["passed"]) == ("not_scorable", None, None)


def test_unsupported_is_its_own_status() -> None:
    assert score.score(episode("unsupported"), NOW)["status"] == "unsupported"


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
    rows = score.score_all(episodes)
    assert len(rows) == 4
    assert "3 of 4" in score.check_quorum(episodes, rows, 0.75)
    with pytest.raises(score.QuorumError, match=r"3 of 4 .*1 sandbox_lost.*sandbox_lost it is"):
        score.check_quorum(episodes, rows, 0.8)
    with pytest.raises(score.QuorumError):
        score.check_quorum([], [], 0.0)
