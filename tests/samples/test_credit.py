"""Advantages of every estimator against its published formula (credit_oracle.py), and against veRL's own code."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path

import pytest
from credit_oracle import FORMULAS
from hypothesis import given, settings
from hypothesis import strategies as st
from samples_rig import Json, advantage_of, call, config, episode, group_of, one, score

from openforge import tables
from openforge.samples.build import build
from openforge.samples.credit import ESTIMATORS
from openforge.software import python_of
from openforge.train import launch

HERE = Path(__file__).parent
# One with a critic is the training job's own (tests/train), and veRL has none that looks at no other episode.
PLAIN = {name: e for name, e in ESTIMATORS.items() if not e.critic and e.within != "episode"}
CASES = [(name, by_std) for name, e in PLAIN.items() for by_std in ([True, False] if e.by_std else [True])]
# Three groups of unequal sizes; the rewards of the last lie close together.
REWARDS = ([1.0, 0.0, 0.0, 0.25], [0.0, 1.0], [0.7, 0.701, 0.7, 0.7])


def made(rewards: list[list[float]], name: str, by_std: bool) -> tuple[list[Json], dict[str, tuple[str, float]]]:
    """Samples of groups with these rewards, and what the oracle needs."""
    parts = [group_of(r, f"g{i}") for i, r in enumerate(rewards)]
    episodes, scores, calls = ([row for p in parts for row in p[i]] for i in range(3))
    result = build(episodes, scores, calls, config(std=by_std, algorithm={"adv_estimator": name}))
    groups = {e["episode_id"]: e["group_id"] for e in episodes}
    kept = {s["episode_id"] for s in result.samples}
    return result.samples, {
        s["episode_id"]: (groups[s["episode_id"]], s["reward"]) for s in scores if s["episode_id"] in kept
    }


def test_every_estimator_has_an_oracle() -> None:
    assert FORMULAS.keys() == PLAIN.keys()


def test_a_critics_advantages_are_left_to_the_training_job() -> None:
    # A group without variance teaches nothing beside its own kind; a critic has all of the iteration.
    samples, scored = made([[1.0, 1.0], [0.0, 0.5]], "gae", True)
    assert len(scored) == 4
    assert [s["advantages"] for s in samples] == [None] * len(samples)
    assert {s["rewards"][-1] for s in samples} == {1.0, 0.0, 0.5}


@pytest.mark.parametrize(("name", "by_std"), [c for c in CASES if ESTIMATORS[c[0]].formula])
@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.sampled_from([0.0, 0.1, 0.5, 0.7, 1.0]), min_size=2, max_size=6), min_size=1, max_size=4))
def test_advantages_are_the_published_formulas(name: str, by_std: bool, rewards: list[list[float]]) -> None:
    samples, scored = made(rewards, name, by_std)
    for e in scored:
        assert advantage_of(samples, e) == pytest.approx(FORMULAS[name](scored, e, by_std), abs=1e-9)


def test_by_hand() -> None:
    groups = [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]]
    # The others' mean: 0 for the first, 1/2 for those that failed beside one success.
    rloo, _ = made(groups, "rloo", True)
    assert [advantage_of(rloo, f"g0-e{i}") for i in range(3)] == [1.0, -0.5, -0.5]
    # Mean 1/2 over six, variance 6/20.
    plus, _ = made(groups, "reinforce_plus_plus", True)
    assert advantage_of(plus, "g0-e0") == pytest.approx(0.5 / math.sqrt(0.3 + 1e-8), abs=1e-12)
    # Off the group's mean: 2/3, -1/3, -1/3, 1/3, 1/3, -2/3: squares add up to 12/9, over 5.
    base, _ = made(groups, "reinforce_plus_plus_baseline", True)
    assert advantage_of(base, "g1-e0") == pytest.approx((1 / 3) / math.sqrt(12 / 45 + 1e-8), abs=1e-12)


def test_a_baseline_over_the_iteration_needs_no_group() -> None:
    # All of g0 failed: that is worse than the iteration's mean. g1 is one episode.
    samples, _ = made([[0.0, 0.0], [1.0]], "reinforce_plus_plus", True)
    scale = math.sqrt(1 / 3 + 1e-8)
    assert advantage_of(samples, "g0-e0") == pytest.approx((-1 / 3) / scale)
    assert advantage_of(samples, "g1-e0") == pytest.approx((2 / 3) / scale)


@pytest.mark.parametrize("rewards", [[[0.7, 0.1 + 0.6], [0.7 + 1e-9]], [[0.0, 0.0], [0.0, 0.0]], [[1.0]]])
def test_an_iteration_without_variance_is_dropped_and_counted(rewards: list[list[float]]) -> None:
    parts = [group_of(r, f"g{i}") for i, r in enumerate(rewards)]
    result = build(
        *([row for p in parts for row in p[i]] for i in range(3)),
        config(algorithm={"adv_estimator": "reinforce_plus_plus"}),
    )
    reason = "zero_variance" if len(rewards) > 1 else "singleton_group"
    assert result.samples == []
    assert result.report["groups"]["dropped"] == {reason: len(rewards)}
    assert result.report["episodes"]["dropped"] == {reason: sum(map(len, rewards))}


def test_shaping_in_an_all_fail_iteration_creates_no_advantage() -> None:
    # Fault 14, where the baseline is the whole iteration's.
    episodes, _, calls = group_of([0.0, 0.0, 0.0])
    scores = [score(f"g0-e{i}", s, shaping=s) for i, s in enumerate([0.0, -0.1, -0.2])]
    assert build(episodes, scores, calls, config(algorithm={"adv_estimator": "reinforce_plus_plus"})).samples == []


def test_gamma_counts_calls_in_time_order_over_all_rows() -> None:
    # Two rows, interleaved: calls 0 and 2 are one conversation, 1 and 4 another; call 3 is not trained and no step.
    first = [
        call(0, [1], [2, 3], episode="a"),
        call(1, [9], [8], episode="a"),
        call(2, [1, 2, 3, 4], [5], parent=0, episode="a"),
        call(3, [7], [7], episode="a", reason="side_call"),
        call(4, [9, 8], [6, 6], parent=1, episode="a"),
    ]
    c = config(std=False, algorithm={"gamma": 0.5})
    samples = build([episode("a"), episode("b")], [score("a", 1.0), score("b", 0.0)], [*first, one("b")], c).samples
    # A is 1/2; of T = 4 calls the last has all of it, the one before half.
    assert [s["advantages"] for s in samples if s["episode_id"] == "a"] == [
        [0, 1 / 16, 1 / 16, 0, 1 / 4],
        [0, 1 / 8, 1 / 2, 1 / 2],
    ]
    assert advantage_of(samples, "b") == -0.5


def test_successes_alone_are_trained_on_and_all_alike() -> None:
    parts = [group_of([1.0, 0.0, 0.9]), group_of([1.0], "g1"), group_of([0.0, 0.0], "g2")]
    episodes, scores, calls = ([row for p in parts for row in p[i]] for i in range(3))
    passed = {"g0-e0": True, "g0-e1": False, "g0-e2": True, "g1-e0": True, "g2-e0": False, "g2-e1": None}
    scores = [s | {"passed": passed[s["episode_id"]]} for s in scores]
    result = build(episodes, scores, calls, config(bypass=True, algorithm={"adv_estimator": "sft"}))
    assert [s["episode_id"] for s in result.samples] == ["g0-e0", "g0-e2", "g1-e0"]
    assert [s["advantages"] for s in result.samples] == [[0.0, 0.0, 0.0, 1.0, 1.0]] * 3
    assert result.report["episodes"] == {"total": 6, "trained": 3, "dropped": {"not_passed": 3}}
    assert result.report["calls"]["dropped"] == {"episode: not_passed": 3}
    assert result.report["groups"]["dropped"] == {"no_row": 1}


@pytest.mark.slow
def test_verl_computes_the_same_and_another_advantage_stops_the_job(tmp_path: Path) -> None:
    cases, expected = [], []
    for i, (name, by_std) in enumerate(CASES):
        samples, scored = made(list(REWARDS), name, by_std)
        assert all((s["advantages"] is None) == (ESTIMATORS[name].formula is None) for s in samples)
        tables.write_table(tmp_path / f"{i}.parquet", tables.SAMPLES, samples)
        cases.append([str(tmp_path / f"{i}.parquet"), name, by_std])
        expected.append({s["sample_id"]: FORMULAS[name](scored, s["episode_id"], by_std) for s in samples})
    samples[0]["advantages"] = [0.0, 0.0, 0.0, 9.0, 9.0]
    for s in samples[1:]:
        s["advantages"] = [0.0] * 5
    tables.write_table(tmp_path / "wrong.parquet", tables.SAMPLES, samples)
    (tmp_path / "cases.json").write_text(json.dumps([*cases, [str(tmp_path / "wrong.parquet"), "rloo", True]]))
    done = subprocess.run(
        [str(python_of("train-cpu")), str(HERE / "verl_credit.py"), str(tmp_path / "cases.json")],
        env=launch.environment(1),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    *found, wrong = json.loads(done.stdout.splitlines()[-1])
    for by_sample, right in zip(found, expected, strict=True):
        assert by_sample.keys() == right.keys()
        for sample, advantage in right.items():
            assert by_sample[sample] == pytest.approx([advantage] * 2, abs=1e-6, rel=1e-6)
    assert wrong.startswith("episode g0-e0 of group g0: its advantage in the samples table is 9.0")
    assert "veRL's estimator rloo gives 0.9166" in wrong


def test_the_page_of_estimators_has_all_of_them() -> None:
    page = (HERE.parents[1] / "docs/credit.md").read_text()
    assert [name for name in ESTIMATORS if f"| `{name}`" not in page] == []
