"""Configuration keys of the samples stage: what is wrong together is one sentence before any job."""

from __future__ import annotations

from pathlib import Path

import pytest

from openforge import config as c

TRAIN = "model: tiny-random\niterations: 2\ntasks: {source: tiny}\n"


def load(tmp_path: Path, text: str) -> c.RunConfig:
    (tmp_path / "config").mkdir(exist_ok=True)
    (tmp_path / "config/mine.yaml").write_text(TRAIN + text)
    loaded = c.load("mine", tmp_path).config
    assert isinstance(loaded, c.RunConfig)
    return loaded


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "algorithm: {adv_estimator: rloo, norm_adv_by_std_in_grpo: true}",
            "key 'algorithm.norm_adv_by_std_in_grpo' has no effect while algorithm.adv_estimator is \"rloo\"; "
            'remove it or set adv_estimator to "grpo" or "grpo_passk"',
        ),
        ("algorithm: {adv_estimator: gpg, gamma: 0.9}", "key 'algorithm.gamma' has no effect while"),
        ("algorithm: {gamma: 1.5}", "key 'algorithm.gamma' is 1.5, but input should be less than or equal to 1"),
        (
            "algorithm: {adv_estimator: remax}",
            "key 'algorithm.adv_estimator' is \"remax\", but input should be 'grpo', ",
        ),
        (
            "algorithm: {adv_estimator: rloo}\nrollout: {n: 1}",
            "rollout.n must be at least 2: rloo compares the rewards of one group's episodes",
        ),
        (
            "algorithm: {adv_estimator: reinforce_plus_plus}\nrollout: {n: 1}\ndata: {train_batch_size: 1}",
            "rollout.n must be at least 2: reinforce_plus_plus compares the rewards of one iteration's episodes",
        ),
        ("reward: {reward_kwargs: {max_resp_len: 9}}", "reward.reward_kwargs.max_resp_len has no effect without "),
        (
            "reward: {reward_kwargs: {overlong_buffer_cfg: {len: 3}}}",
            "key 'reward.reward_kwargs.overlong_buffer_cfg.len' has no effect while "
            "reward.reward_kwargs.overlong_buffer_cfg.enable is false",
        ),
        (
            "reward: {reward_kwargs: {max_resp_len: 9, overlong_buffer_cfg: {enable: true}}}",
            "max_resp_len and overlong_buffer_cfg.len must be set where enable is true",
        ),
        (
            "reward: {reward_kwargs: {max_resp_len: 9, overlong_buffer_cfg: {enable: true, len: 10}}}",
            "reward.reward_kwargs.overlong_buffer_cfg.len is 10, more than max_resp_len (9)",
        ),
        ("data: {filter: ''}", "key 'data.filter' is \"\""),
        (
            "data: {filter: rewrd > 0}",
            "data.filter is 'rewrd > 0': Binder Error: Referenced column \"rewrd\" not found",
        ),
        ("data: {filter: turns +}", "data.filter is 'turns +': Parser Error: syntax error at or near"),
        ("data: {filter: turns}", "data.filter is 'turns': its type is INTEGER; a condition is true or false"),
        ("data: {filter: count(*) > 1}", "data.filter is 'count(*) > 1': Binder Error: WHERE clause cannot contain"),
        ("data: {filter: 'true); DROP TABLE calls; SELECT (1'}", "one SQL statement is expected, this is 3"),
        (
            "algorithm: {filter_groups: {metric: acc}}",
            "key 'algorithm.filter_groups.metric' has no effect while algorithm.filter_groups.enable is false",
        ),
        ("algorithm: {filter_groups: {enable: true, max_num_gen_batches: 1}}", "greater than or equal to 2"),
        (
            "algorithm: {adv_estimator: reinforce_plus_plus, filter_groups: {enable: true}}",
            "algorithm.filter_groups.enable has no use with reinforce_plus_plus, which learns from groups without",
        ),
    ],
)
def test_what_cannot_be_meant_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(c.ConfigError) as e:
        load(tmp_path, text)
    assert str(e.value).startswith("config/mine.yaml: ") and sentence in str(e.value) and "\n" not in str(e.value)


def test_a_baseline_over_the_iteration_takes_one_rollout_a_group(tmp_path: Path) -> None:
    loaded = load(tmp_path, "algorithm: {adv_estimator: reinforce_plus_plus, gamma: 0.9}\nrollout: {n: 1}")
    assert (loaded.rollout.n, loaded.algorithm.gamma) == (1, 0.9)
