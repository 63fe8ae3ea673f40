"""The soft overlong punishment: its values by hand, over trained tokens only."""

from __future__ import annotations

import pytest
from samples_rig import Json, advantage_of, call, config, episode, group_of, one, score

from openforge.config_training import RewardKwargs
from openforge.samples.build import build
from openforge.samples.shaping import overlong

# From 8 tokens on, in full at 12.
BUFFER = {"max_resp_len": 12, "overlong_buffer_cfg": {"enable": True, "len": 4, "penalty_factor": 0.5}}


@pytest.mark.parametrize(
    ("tokens", "punishment"), [(0, 0.0), (8, 0.0), (9, -0.125), (10, -0.25), (12, -0.5), (13, -0.5), (99, -0.5)]
)
def test_by_hand(tokens: int, punishment: float) -> None:
    assert overlong(tokens, RewardKwargs.model_validate(BUFFER)) == punishment
    assert overlong(tokens, RewardKwargs()) == 0.0


def test_it_lowers_the_reward_of_the_long_episode_alone() -> None:
    episodes, scores, calls = group_of([1.0, 1.0, 0.0])
    # Ten trained tokens in two rows.
    calls[0] = call(0, [1], [7] * 4, episode="g0-e0")
    calls.append(call(1, [9], [7] * 6, episode="g0-e0"))
    result = build(episodes, scores, calls, config(std=False, reward=BUFFER))
    assert [s["rewards"][-1] for s in result.samples] == [0.75, 0.75, 1.0, 0.0]
    mean = (0.75 + 1.0 + 0.0) / 3
    assert advantage_of(result.samples, "g0-e0") == pytest.approx(0.75 - mean)
    assert advantage_of(result.samples, "g0-e1") == pytest.approx(1.0 - mean)
    assert result.report["overlong"] == 1
    assert build(episodes, scores, calls, config()).report["overlong"] == 0


def test_tool_tokens_and_side_calls_are_not_counted() -> None:
    # Fault 13: eight trained tokens around a hundred of a tool's, and a title of twenty beside them.
    a = [
        call(0, [1, 2], [3] * 4, episode="a"),
        call(1, [1, 2, *[3] * 4, *[5] * 100], [6] * 4, parent=0, episode="a"),
        call(2, [8], [9] * 20, episode="a", reason="side_call"),
    ]
    episodes, scores = [episode("a"), episode("b")], [score("a", 1.0), score("b", 0.0)]
    result = build(episodes, scores, [*a, one("b")], config(reward=BUFFER))
    assert [s["rewards"][-1] for s in result.samples] == [1.0, 0.0]
    assert result.report["overlong"] == 0


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus_baseline"])
def test_in_a_group_of_equals_it_creates_no_advantage(estimator: str) -> None:
    # Fault 14: all failed, two of them at length.
    episodes, scores, calls = group_of([0.0, 0.0, 0.0])
    calls[1]["response_token_ids"], calls[1]["logprobs"] = [7] * 10, [-1.0] * 10
    calls[2]["response_token_ids"], calls[2]["logprobs"] = [7] * 99, [-1.0] * 99
    algorithm: Json = {"adv_estimator": estimator}
    result = build(episodes, scores, calls, config(reward=BUFFER, algorithm=algorithm))
    assert (result.samples, result.report["groups"]["dropped"]) == ([], {"zero_variance": 1})


def test_a_row_that_is_too_long_counts_for_it() -> None:
    # What is dropped for its length is no reason to spare the episode.
    episodes, scores, calls = group_of([1.0, 0.0])
    calls.append(call(1, [1] * 40, [7] * 12, episode="g0-e0"))
    result = build(episodes, scores, calls, config(reward=BUFFER, ppo_max_token_len_per_gpu=50))
    assert [s["rewards"][-1] for s in result.samples] == [0.5, 0.0]
