"""Samples from hand-made episodes: what is merged, what is credited, what is dropped and counted.

Numbers stand written out; the advantages of [1, 0, 0] by hand: mean 1/3, unbiased std sqrt(1/3).
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples_rig import Json, advantage_of, call, config, episode, group_of, one, score

from openforge import tables
from openforge.samples.build import build
from openforge.samples.merge import SamplesError, merge
from openforge.samples.reasons import CALLS, REASONS, meaning


# ---- merging ------------------------------------------------------------------------------------
def test_a_prompt_that_extends_prompt_and_response_continues_the_row() -> None:
    rows, dropped = merge([call(0, [1, 2], [3, 4]), call(1, [1, 2, 3, 4, 5], [6], parent=0, prefix=(0, 4))])
    assert [r.calls for r in rows] == [[0, 1]]
    assert rows[0].token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert rows[0].loss_mask == [0, 0, 1, 1, 0, 1]
    assert rows[0].logprobs == pytest.approx([0, 0, -0.003, -0.004, 0, -1.006])
    assert not dropped


def test_a_rewritten_history_is_a_row_of_its_own() -> None:
    # Fault 1: the template drops a token of the first turn (3) from the second prompt on.
    rows, _ = merge([call(0, [1, 2], [3, 4]), call(1, [1, 2, 4, 5], [6]), call(2, [1, 2, 4, 5, 6, 7], [8], parent=1)])
    assert [r.calls for r in rows] == [[0], [1, 2]]
    assert [r.loss_mask for r in rows] == [[0, 0, 1, 1], [0, 0, 0, 0, 1, 0, 1]]


def test_a_parent_that_the_prompt_does_not_extend_is_refused() -> None:
    # Fault 2: a slice of another conversation must not be taken for a continuation.
    with pytest.raises(SamplesError, match="episode e0, call 1: its prompt does not extend call 0"):
        merge([call(0, [1, 2], [3, 4]), call(1, [1, 2, 9, 4, 5], [6], parent=0)])


def test_counts_that_disagree_are_refused() -> None:
    short = call(0, [1, 2], [3, 4]) | {"logprobs": [-1.0]}
    with pytest.raises(SamplesError, match="2 response tokens and 1 logprobs"):
        merge([short])
    with pytest.raises(SamplesError, match="its prompt has 3 tokens, but 2 are stored"):
        merge([call(0, [1, 2], [3]) | {"prompt_tokens": 3}])


def test_ids_are_taken_as_recorded_at_the_boundary() -> None:
    # Fault 3: tokenised again, 4 5 would be the one token 45; the recorded ids stand.
    rows, _ = merge([call(0, [1], [4]), call(1, [1, 4, 5], [6], parent=0, prefix=(0, 2))])
    assert rows[0].token_ids.tolist() == [1, 4, 5, 6]


def test_siblings_are_rows_with_the_shared_prefix_as_context() -> None:
    rows, _ = merge(
        [
            call(0, [1], [2]),
            call(1, [1, 2, 3], [4], parent=0),
            call(2, [1, 2, 5], [6], parent=0),
            call(3, [1, 2, 5, 6, 7], [8], parent=2),
        ]
    )
    assert [r.calls for r in rows] == [[0, 1], [2, 3]]
    assert rows[1].token_ids.tolist() == [1, 2, 5, 6, 7, 8]
    assert rows[1].loss_mask == [0, 0, 0, 1, 0, 1]


def test_an_untrainable_call_between_is_context() -> None:
    rows, dropped = merge(
        [
            call(0, [1], [2]),
            call(1, [1, 2, 3], [4], parent=0, reason="unconfirmed"),
            call(2, [1, 2, 3, 4, 5], [6], parent=1),
        ]
    )
    assert [r.calls for r in rows] == [[0, 2]]
    assert rows[0].loss_mask == [0, 1, 0, 0, 0, 1]
    assert dropped == Counter(unconfirmed=1)


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(12)))
def test_interleaved_agents_give_a_row_each_in_any_order(order: list[int]) -> None:
    # Fault 7: 4 sub-agents of 3 calls each; compared with the last call only, nearly every call would be a
    # row.
    name = {slot: n for n, slot in enumerate(order)}
    rows = []
    for slot in range(12):
        agent, turn = divmod(slot, 3)
        prompt = [100 + agent]
        for t in range(turn):
            prompt += [200 + t, 300 + t]
        rows.append(call(name[slot], prompt, [200 + turn], parent=name[slot - 1] if turn else None))
    merged, _ = merge(sorted(rows, key=lambda r: r["call"]))
    assert len(merged) == 4
    assert sorted(m.token_ids.tolist() for m in merged) == [[100 + a, 200, 300, 201, 301, 202] for a in range(4)]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_every_trainable_token_is_trained_exactly_once(data: st.DataObject) -> None:
    # Random trees of calls, random rewrites of the history, random trainability.
    calls: list[Json] = []
    whole: list[list[int]] = []
    token = st.integers(0, 2)
    for n in range(data.draw(st.integers(1, 8))):
        parent = data.draw(st.none() | st.integers(0, n - 1)) if n else None
        prompt = data.draw(st.lists(token, min_size=1, max_size=4))
        if parent is not None:
            prompt = whole[parent] + prompt
            if data.draw(st.booleans()):  # rewritten: no longer an extension
                at = data.draw(st.integers(0, len(whole[parent]) - 1))
                prompt[at] = 7
                parent = None
        response = data.draw(st.lists(token, min_size=1, max_size=3))
        reason = data.draw(st.sampled_from([None, None, "side_call"]))
        calls.append(call(n, prompt, response, parent, reason=reason))
        whole.append(prompt + response)
    merged, dropped = merge(calls)
    trainable = [c for c in calls if c["trainable"]]
    assert sorted(n for m in merged for n in m.calls) == [c["call"] for c in trainable]
    assert sum(m.trained_tokens for m in merged) == sum(len(c["response_token_ids"]) for c in trainable)
    assert dropped.total() == len(calls) - len(trainable)
    trained = Counter((t, p) for m in merged for t, p, x in zip(m.token_ids, m.logprobs, m.loss_mask, strict=True) if x)
    assert trained == Counter(
        (t, p) for c in trainable for t, p in zip(c["response_token_ids"], c["logprobs"], strict=True)
    )
    for m in merged:
        assert m.token_ids.tolist() == whole[m.calls[-1]]
        assert all(m.token_ids[: len(whole[n])].tolist() == whole[n] for n in m.calls)


# ---- credit -------------------------------------------------------------------------------------
def test_advantages_by_hand_with_and_without_std() -> None:
    tables_of = group_of([1.0, 0.0, 0.0])
    std = math.sqrt(1 / 3)
    with_std = build(*tables_of, config()).samples
    assert advantage_of(with_std, "g0-e0") == pytest.approx((2 / 3) / (std + 1e-6), abs=1e-9)
    assert advantage_of(with_std, "g0-e1") == pytest.approx((-1 / 3) / (std + 1e-6), abs=1e-9)
    without = build(*tables_of, config(std=False)).samples
    assert advantage_of(without, "g0-e0") == pytest.approx(2 / 3)


def test_a_row_is_not_an_episode() -> None:
    # Faults 11 and 12: reward 1 in 3 rows of different lengths, reward 0 in 1 row: the baseline is 0.5.
    first = [
        call(0, [1], [2, 3], episode="a"),
        call(1, [4], [5], episode="a"),
        call(2, [6, 7, 8], [9, 10, 11], episode="a"),
    ]
    result = build(
        [episode("a"), episode("b")], [score("a", 1.0), score("b", 0.0)], [*first, one("b")], config(std=False)
    )
    rows = [s for s in result.samples if s["episode_id"] == "a"]
    assert [s["advantages"] for s in rows] == [[0, 0.5, 0.5], [0, 0.5], [0, 0, 0, 0.5, 0.5, 0.5]]
    assert [s["rewards"] for s in rows] == [[0, 0, 1.0], [0, 1.0], [0, 0, 0, 0, 0, 1.0]]
    assert advantage_of(result.samples, "b") == -0.5
    assert [s["weight"] for s in rows] == pytest.approx([2 / 6, 1 / 6, 3 / 6])
    assert result.report["rows_per_episode"] == 2.0


@pytest.mark.parametrize(
    ("rewards", "components"),
    [
        ([0.7, 0.1 + 0.6, 0.7 + 1e-9], {}),  # float noise
        ([0.0, 0.0], {}),
        ([1.0, 1.0, 1.0], {}),
    ],
)
def test_a_group_without_variance_is_dropped_and_counted(rewards: list[float], components: Json) -> None:
    result = build(*group_of(rewards, **components), config())
    assert result.samples == []
    assert result.report["groups"] == {"total": 1, "trained": 0, "dropped": {"zero_variance": 1}}
    assert result.report["episodes"]["dropped"] == {"zero_variance": len(rewards)}
    assert result.report["calls"]["dropped"] == {"group: zero_variance": len(rewards)}


def test_one_failure_among_equals_is_variance() -> None:
    samples = build(*group_of([0.0] + [0.95] * 7), config()).samples
    assert len(samples) == 8
    assert advantage_of(samples, "g0-e0") < 0 < advantage_of(samples, "g0-e1")


def test_shaping_in_an_all_fail_group_creates_no_advantage() -> None:
    # Fault 14: all three failed; only the shaping term tells them apart.
    episodes, _, calls = group_of([0.0, 0.0, 0.0])
    scores = [score(f"g0-e{i}", s, shaping=s) for i, s in enumerate([0.0, -0.1, -0.2])]
    assert build(episodes, scores, calls, config()).samples == []
    scores[0] = score("g0-e0", 0.9, shaping=-0.1)
    assert len(build(episodes, scores, calls, config()).samples) == 3


def test_a_group_that_its_shard_replaced_is_not_trained() -> None:
    # By whether they passed, all are alike; a reserve group has run in its place.
    episodes, scores, calls = group_of([0.25, 0.5])
    scores = [s | {"passed": False} for s in scores]
    assert len(build(episodes, scores, calls, config()).samples) == 2
    groups = {"filter_groups": {"enable": True, "metric": "acc"}}
    result = build(episodes, scores, calls, config(algorithm=groups))
    assert result.report["groups"] == {"total": 1, "trained": 0, "dropped": {"zero_variance": 1}}


# ---- what is dropped ----------------------------------------------------------------------------
def test_an_episode_without_calls_gives_no_row_and_is_counted() -> None:
    # Fault 15; it also takes no part in the baseline: mean of [1, 0].
    episodes, scores, calls = group_of([1.0, 0.0, 0.0])
    result = build(episodes, scores, calls[:2], config(std=False))
    assert [s["episode_id"] for s in result.samples] == ["g0-e0", "g0-e1"]
    assert advantage_of(result.samples, "g0-e0") == 0.5
    assert result.report["episodes"] == {"total": 3, "trained": 2, "dropped": {"no_call": 1}}


def test_a_group_with_an_infrastructure_failure_trains_on_the_rest() -> None:
    # Fault 16: 8 planned, one lost its sandbox: 7 rows, no copy, no reward 0 for the lost one.
    episodes, scores, calls = group_of([1.0] * 4 + [0.0] * 4)
    episodes[7]["status"] = "sandbox_lost"
    scores[7] = score("g0-e7", None, "not_scorable")
    result = build(episodes, scores, calls, config(std=False))
    assert Counter(s["episode_id"] for s in result.samples) == Counter(f"g0-e{i}" for i in range(7))
    assert advantage_of(result.samples, "g0-e0") == pytest.approx(1 - 4 / 7)
    assert result.report["episodes"]["dropped"] == {"status: sandbox_lost": 1}
    assert result.report["calls"]["dropped"] == {"episode: status: sandbox_lost": 1}


def test_one_scored_member_is_no_group() -> None:
    episodes, scores, calls = group_of([1.0, 0.0])
    scores[1] = score("g0-e1", None, "judge_failed")
    result = build(episodes, scores, calls, config())
    assert result.samples == []
    assert result.report["episodes"]["dropped"] == {"score: judge_failed": 1, "singleton_group": 1}


def test_the_latest_score_counts_and_a_missing_one_is_no_zero() -> None:
    episodes, scores, calls = group_of([0.0, 0.0, 0.0])
    scores = [scores[0], score("g0-e0", 1.0, at=5), scores[1]]
    result = build(episodes, scores, calls, config(std=False))
    assert advantage_of(result.samples, "g0-e0") == 0.5
    assert result.report["episodes"]["dropped"] == {"score: missing": 1}


def test_attempts_that_do_not_count_are_left_out() -> None:
    episodes, scores, calls = group_of([1.0, 0.0])
    episodes.append(episode("old", final=False) | {"rollout_id": "r-g0-e0"})
    result = build(episodes, [*scores, score("old", 0.0)], [*calls, one("old")], config())
    assert {s["episode_id"] for s in result.samples} == {"g0-e0", "g0-e1"}
    assert result.report["episodes"]["dropped"] == {"not_final": 1}
    assert result.report["calls"]["dropped"] == {"episode: not_final": 1}
    episodes[-1]["final"] = True
    with pytest.raises(SamplesError, match="rollout r-g0-e0 has two final episodes"):
        build(episodes, scores, calls, config())


def test_a_row_that_is_too_long_is_dropped_and_never_cut() -> None:
    episodes, scores, calls = group_of([1.0, 0.0, 0.0])
    calls.append(call(1, list(range(50)), [1], episode="g0-e0"))
    result = build(episodes, scores, calls, config(ppo_max_token_len_per_gpu=50))
    assert result.report["calls"] == {"total": 4, "trained": 3, "dropped": {"row_too_long": 1}}
    assert [len(s["token_ids"]) for s in result.samples] == [5, 5, 5]
    assert result.samples[0]["weight"] == 1.0
    longest = build(episodes, scores, calls, config(ppo_max_token_len_per_gpu=51))
    assert [len(s["token_ids"]) for s in longest.samples] == [5, 51, 5, 5]


@pytest.mark.parametrize("bypass", [True, False])
def test_two_policies_in_one_group_are_refused(bypass: bool) -> None:
    # Fault 17.
    episodes, scores, calls = group_of([1.0, 0.0])
    calls[1]["policy_version"] = "1@b"
    with pytest.raises(SamplesError, match=r"group g0 was sampled by 2 policies \(0@a, 1@b\)"):
        build(episodes, scores, calls, config(bypass=bypass))


@pytest.mark.parametrize(
    ("lag", "k", "right"), [(0, 1, 0), (0, 4, 3), (1, 1, 0), (1, 2, 0), (1, 4, 2), (2, 3, 0), (2, 4, 1)]
)
def test_an_iteration_is_of_the_checkpoint_that_the_lag_says(lag: int, k: int, right: int) -> None:
    episodes, scores, calls = group_of([1.0, 0.0])
    c = config().model_copy(update={"lag": lag})
    for sampled in range(4):
        for e, call_ in zip(episodes, calls, strict=True):
            e["iteration"], call_["policy_version"] = k, f"{sampled}@a"
        if sampled == right:
            assert len(build(episodes, scores, calls, c).samples) == 2
        else:
            with pytest.raises(SamplesError, match=f"iteration {k} samples with checkpoint {right}:"):
                build(episodes, scores, calls, c)


def test_calls_of_an_unknown_episode_are_refused() -> None:
    episodes, scores, calls = group_of([1.0, 0.0])
    with pytest.raises(SamplesError, match="names episode stray"):
        build(episodes, scores, [*calls, one("stray")], config())


def test_rows_fit_the_table_and_everything_is_accounted_for() -> None:
    parts = [group_of([1.0, 0.0], "g0"), group_of([1.0, 1.0], "g1"), group_of([0.0, 1.0, 0.5], "g2")]
    episodes, scores, calls = ([row for p in parts for row in p[i]] for i in range(3))
    calls.append(call(1, [8], [9], episode="g2-e1", reason="side_call"))
    episodes[-1]["status"] = "verifier_failed"
    result = build(episodes, scores, calls, config())
    stored = tables.SAMPLES.arrow(result.samples)
    assert stored.num_rows == 4 and len(set(stored["sample_id"].to_pylist())) == 4
    for what, total in (("episodes", 7), ("calls", 8), ("groups", 3)):
        counted = result.report[what]
        assert counted["total"] == total
        assert counted["trained"] + sum(counted["dropped"].values()) == total
    assert result.report["calls"]["dropped"]["side_call"] == 1


def test_every_reason_is_explained_in_the_report_and_on_the_page() -> None:
    """One episode or group of each kind, and an iteration that adds up."""
    parts = [group_of([1.0, 0.0, 0.5], f"g{i}") for i in range(4)]
    episodes, scores, calls = ([row for p in parts for row in p[i]] for i in range(3))
    episodes += [episode("lone", "lone"), episode("flat0", "flat"), episode("flat1", "flat"), episode("mute", "mute")]
    scores += [score("lone", 1.0), score("flat0", 1.0), score("flat1", 1.0), score("mute", 1.0)]
    calls += [one("lone"), one("flat0"), one("flat1")]
    episodes.append(episode("old", "g0", final=False))
    episodes[0]["status"] = "verifier_timeout"  # g0-e0
    scores[3] = score("g1-e0", None, "judge_failed")
    scores[6] = score("g2-e0", None)
    del scores[9]  # g3-e0
    calls[1] = call(0, [1, 2, 3], [10], episode="g0-e1", reason="side_call")
    calls[4] = call(0, [1] * 60, [10], episode="g1-e1")
    episodes += [episode(f"more{i}", "g1") for i in range(2)]
    scores += [score(f"more{i}", float(i)) for i in range(2)]
    calls += [one(f"more{i}") for i in range(2)]
    report = build(episodes, scores, calls, config(ppo_max_token_len_per_gpu=50), {"g2-e1"}).report
    for what in ("episodes", "groups", "calls"):
        assert report[what]["total"] == report[what]["trained"] + sum(report[what]["dropped"].values())
    found = report["episodes"]["dropped"].keys() | report["groups"]["dropped"].keys()
    assert {r for r in found if ":" not in r} == REASONS.keys() - {
        "not_passed"
    }  # with adv_estimator sft: test_credit.py
    assert {r for r in found if ":" in r} == {
        "status: verifier_timeout",
        "score: judge_failed",
        "score: NULL",
        "score: missing",
    }
    assert all(meaning(r) for r in found)
    page = Path(__file__, "../../../docs/credit.md").resolve().read_text()
    assert [r for r in [*REASONS, *CALLS] if f"| `{r}` |" not in page] == []


def test_samples_built_twice_are_the_same_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        episodes, scores, calls = group_of([1.0, 0.0, 0.5])
        tables.write_table(tmp_path / name, tables.SAMPLES, build(episodes, scores, calls, config()).samples)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
