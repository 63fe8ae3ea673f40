"""pass@k and its interval against enumeration and the binomial distribution; evaluations worked out by hand."""

import itertools
import json
import random
import statistics
from math import comb

import made_run
import pytest

from openforge import store
from openforge import tables as t
from openforge.eval import EvalError, evaluate, evaluate_run, headline
from openforge.eval.estimate import clustered, pass_all_k, pass_at_k, pass_draw_k, pass_rate_power_k


@pytest.mark.parametrize("n", range(1, 7))
def test_pass_at_k_is_the_share_of_k_subsets_with_a_pass(n):
    for c in range(n + 1):
        samples = [i < c for i in range(n)]
        for k in range(1, n + 1):
            subsets = [any(s) for s in itertools.combinations(samples, k)]
            assert pass_at_k(n, c, k) == pytest.approx(sum(subsets) / len(subsets))


@pytest.mark.parametrize("n", range(1, 6))
def test_pass_hat_k_by_enumeration(n):
    """The draw kind is the share of k-subsets that all pass; the power kind that of k draws with replacement."""
    for trials in itertools.product([True, False], repeat=n):
        c = sum(trials)
        for k in range(1, n + 1):
            subsets = [all(s) for s in itertools.combinations(trials, k)]
            assert pass_draw_k(n, c, k) == pytest.approx(sum(subsets) / len(subsets))
            tuples = [all(s) for s in itertools.product(trials, repeat=k)]
            assert pass_rate_power_k(n, c, k) == pytest.approx(sum(tuples) / len(tuples))
            assert pass_all_k(trials, k) == subsets[0]


def test_pass_draw_k_is_unbiased_and_the_power_kind_is_not():
    """Over all outcomes of 5 trials that pass with probability 0.6: p^3 = 0.216."""
    chance = {c: comb(5, c) * 0.6**c * 0.4 ** (5 - c) for c in range(6)}
    assert sum(w * pass_draw_k(5, c, 3) for c, w in chance.items()) == pytest.approx(0.216)
    assert sum(w * pass_at_k(5, c, 3) for c, w in chance.items()) == pytest.approx(1 - 0.4**3)
    assert sum(w * pass_rate_power_k(5, c, 3) for c, w in chance.items()) > 0.25


def test_pass_hat_k_refuses_what_cannot_be_estimated():
    for estimate in (pass_rate_power_k, pass_draw_k):
        for n, c, k in ((3, 2, 4), (3, 4, 1), (3, 1, 0)):
            with pytest.raises(ValueError, match=r"pass\^\d cannot be estimated"):
                estimate(n, c, k)
    with pytest.raises(ValueError, match="from 1 passes among 2 samples"):
        pass_all_k([True, False], 3)


def test_pass_at_k_refuses_what_cannot_be_estimated():
    for n, c, k in ((8, 3, 9), (8, 9, 1), (0, 0, 1), (8, -1, 1), (8, 1, 0)):
        with pytest.raises(ValueError, match="cannot be estimated"):
            pass_at_k(n, c, k)


def binomial_quantile(n: int, p: float, q: float) -> float:
    """Smallest mean of n Bernoulli(p) whose cumulative probability reaches q: the exact bootstrap distribution."""
    total = 0.0
    for i in range(n + 1):
        total += comb(n, i) * p**i * (1 - p) ** (n - i)
        if total >= q:
            return i / n
    return 1.0


@pytest.mark.parametrize(("n", "c"), [(64, 16), (64, 60), (40, 20), (10, 3)])
def test_interval_of_zeros_and_ones_is_the_binomial_one(n, c):
    estimate = clustered([(1.0, 1.0)] * c + [(0.0, 1.0)] * (n - c))
    assert (estimate.p, estimate.n) == (c / n, n)
    # A quantile of 5000 draws may fall on the neighbouring step.
    assert estimate.low == pytest.approx(binomial_quantile(n, c / n, 0.025), abs=1.01 / n)
    assert estimate.high == pytest.approx(binomial_quantile(n, c / n, 0.975), abs=1.01 / n)


def test_interval_has_the_width_of_the_clusters_not_of_the_samples():
    """Eight equal samples of a task are one observation: the interval is that of 32 tasks, not of 256 episodes."""
    clusters = [(8.0, 8.0)] * 16 + [(0.0, 8.0)] * 16
    estimate = clustered(clusters)
    assert estimate.high - estimate.low == pytest.approx(2 * 1.96 * (0.25 / 32) ** 0.5, rel=0.1)


def test_mean_is_weighted_and_the_interval_covers_at_its_level():
    assert clustered([(3.0, 4.0), (0.0, 1.0)]).p == 3 / 5
    covered = []
    for seed in range(100):
        # Task pass rates spread evenly over 0..1, each seen by 8 samples; the true mean is 1/2.
        rng = random.Random(seed)
        tasks = [rng.random() for _ in range(48)]
        clusters = [(sum(rng.random() < p for _ in range(8)) / 8, 1.0) for p in tasks]
        estimate = clustered(clusters, seed)
        covered.append(estimate.low <= 0.5 <= estimate.high)
    assert statistics.mean(covered) >= 0.86


def test_equal_and_unequal_weights_agree():
    """Weights that differ by nothing that counts take the other path to the same interval."""
    values = [0.0, 0.25, 0.5, 1.0] * 8
    same = clustered([(v, 1.0) for v in values])
    other = clustered([(v, 1.0) for v in values[1:]] + [(values[0], 1.0 + 1e-12)])
    assert other[:3] == pytest.approx(same[:3], abs=0.01)


def test_the_same_rows_give_the_same_interval_and_degenerate_ones_a_point():
    clusters = [(1.0, 1.0), (0.0, 1.0), (0.5, 1.0)]
    assert clustered(clusters) == clustered(clusters)
    assert clustered([(1.0, 1.0)] * 5)[:3] == (1.0, 1.0, 1.0)
    for wrong in ([], [(1.0, 0.0)]):
        with pytest.raises(ValueError, match="at least one cluster"):
            clustered(wrong)


def test_heldout_before_by_hand(run_dir):
    got = evaluate_run(run_dir, "heldout", 0)
    assert got["p"] == pytest.approx(1 / 6)
    assert (got["n"], got["episodes"], got["missing"]) == (3, 6, 1)
    assert got["missing_by_status"] == {"policy_failed": 1}
    assert got["statuses"] == {"completed": 5, "policy_failed": 1}
    assert set(got["pass_at"]) == {"1", "2"}
    assert got["pass_at"]["2"]["p"] == pytest.approx(1 / 3)
    assert got["reward"] == pytest.approx(1 / 5)
    copy, count = got["by_kind"]["copy"], got["by_kind"]["count"]
    assert (copy["p"], copy["n"], copy["episodes"], copy["missing"]) == (0.25, 2, 4, 0)
    assert (count["p"], count["n"], count["episodes"], count["missing"]) == (0.0, 1, 2, 1)
    assert (got["cell"], got["iteration"], got["harness"], got["policy"]) == (
        "heldout",
        0,
        "mini_swe_agent",
        "made@0",
    )


@pytest.mark.parametrize(
    ("cell", "iteration", "p", "n"),
    [("heldout", 2, 5 / 6, 3), ("greedy", 0, 1 / 3, 3), ("greedy", 2, 1, 3), ("pi", 2, 0.5, 2)],
)
def test_other_cells_by_hand(run_dir, cell, iteration, p, n):
    got = evaluate_run(run_dir, cell, iteration)
    assert (got["p"], got["n"], got["missing"]) == (pytest.approx(p), n, 0)
    assert 0 <= got["low"] <= got["p"] <= got["high"] <= 1


def test_the_file_is_what_was_returned(run_dir):
    got = evaluate_run(run_dir, "greedy", 2)
    path = run_dir / "eval" / "cell=greedy" / "iteration=0002" / "eval.json"
    assert json.loads(path.read_text()) == got
    assert [p.name for p in path.parent.iterdir()] == ["eval.json"]


def rows(cell="heldout", n=8, passes=3, tasks=2, iteration=None):
    raws = [made_run.task(f"x{i}", "copy", "heldout") for i in range(tasks)]
    planned = [made_run.rollout(raw, "eval", cell, iteration, i) for raw in raws for i in range(n)]
    episodes = [made_run.episode(r, "completed") for r in planned]
    scores = [made_run.score(e, float(r["sample"] < passes)) for e, r in zip(episodes, planned, strict=True)]
    return episodes, scores, planned


def test_eight_samples_give_pass_at_8_and_a_foreign_policy_has_no_iteration():
    got = evaluate(*rows())
    assert got["iteration"] is None
    assert {k: v["p"] for k, v in got["pass_at"].items()} == {
        "1": pytest.approx(3 / 8),
        "2": pytest.approx(1 - comb(5, 2) / comb(8, 2)),
        "3": pytest.approx(1 - comb(5, 3) / comb(8, 3)),
        "4": pytest.approx(1 - comb(5, 4) / comb(8, 4)),
        "8": 1.0,
    }


def test_k_goes_to_the_task_with_the_fewest_samples():
    episodes, scores, planned = rows(n=5)
    got = evaluate(episodes[:-1], scores[:-1], planned[:-1])
    assert set(got["pass_at"]) == {"1", "2", "3", "4"}


def test_a_rollout_without_an_episode_or_score_is_missing_and_failed():
    episodes, scores, planned = rows(n=4, passes=4, tasks=1)
    assert evaluate(episodes, scores, planned)["p"] == 1.0
    got = evaluate(episodes[1:], scores, planned)
    assert (got["p"], got["missing"], got["missing_by_status"]) == (0.75, 1, {"no_episode": 1})
    got = evaluate(episodes, scores[:2], planned)
    assert (got["p"], got["missing"], got["missing_by_status"]) == (0.5, 2, {"completed": 2})
    got = evaluate([], [], planned)
    assert (got["p"], got["missing"], got["reward"]) == (0.0, 4, None)


def trials(outcomes):
    """An evaluation whose tasks have these trials: 1 passed, 0 failed, None without an episode."""
    raws = [made_run.task(f"x{i}", "copy", "heldout") for i in range(len(outcomes))]
    pairs = [
        (made_run.rollout(raw, "eval", "c", None, i), o)
        for raw, own in zip(raws, outcomes, strict=True)
        for i, o in enumerate(own)
    ]
    held = [(made_run.episode(r, "completed"), o) for r, o in pairs if o is not None]
    return [e for e, _ in held], [made_run.score(e, float(o)) for e, o in held], [r for r, _ in pairs]


# Five tasks of three trials: of them one passes all, three any; the last task's lost trial is a failed one.
FIVE = [[1, 1, 1], [1, 0, 1], [0, 0, 0], [0, 0, 1], [0, 0, None]]


def test_claw_evals_headline_has_a_divisor_of_three_trials():
    got = evaluate(*trials(FIVE))["claw"]
    assert (got["pass^3"]["p"], got["pass@3"]["p"]) == (1 / 5, 3 / 5)
    assert (got["tasks"], got["trials"], got["missing"]) == (5, 15, 1)
    for key in ("pass^3", "pass@3"):
        assert 0 <= got[key]["low"] < got[key]["p"] < got[key]["high"] <= 1
        assert got[key]["n"] == 5


def test_the_line_names_what_it_counts():
    line = headline(evaluate(*trials(FIVE)))
    assert line.startswith("pass@1 0.400 [")
    assert "pass^3 0.200 [" in line
    assert line.endswith("over 5 tasks, 15 episodes, 1 missing (counted as failed)")
    assert "^3" not in headline(evaluate(*trials([[1], [0]])))


def test_three_kinds_of_pass_hat_k_by_hand():
    got = evaluate(*trials(FIVE))["pass_hat"]
    # Passes of three: 3, 2, 0, 1, 0.
    assert got["2"]["draw"]["p"] == pytest.approx((1 + 1 / 3) / 5)
    assert got["2"]["power"]["p"] == pytest.approx((1 + 4 / 9 + 1 / 9) / 5)
    assert got["2"]["all_k"]["p"] == pytest.approx(1 / 5)
    assert got["3"]["draw"]["p"] == got["3"]["all_k"]["p"] == pytest.approx(1 / 5)
    assert got["3"]["power"]["p"] == pytest.approx((1 + 8 / 27 + 1 / 27) / 5)


def test_the_headline_takes_the_first_three_trials_and_none_of_fewer():
    more = [[1, 1, 1, 0], [0, 0, 0, 1]]
    got = evaluate(*trials(more))["claw"]
    assert (got["pass^3"]["p"], got["pass@3"]["p"], got["trials"]) == (0.5, 0.5, 6)
    episodes, scores, planned = trials(more)
    # Whatever the order of the rows, a trial is its sample.
    assert evaluate(episodes, scores, planned[::-1])["claw"]["pass^3"]["p"] == 0.5
    assert evaluate(*trials([[1, 1, 1], [1, 1]]))["claw"] is None


def test_the_stores_macro_says_the_same(tmp_path):
    run_dir = tmp_path / "results" / "eval_five"
    raws = [made_run.task(f"x{i}", "copy", "heldout") for i in range(5)]
    planned = [
        (made_run.rollout(raw, "eval", "c", None, i), o)
        for raw, own in zip(raws, FIVE, strict=True)
        for i, o in enumerate(own)
    ]
    made_run.write_cell(run_dir, "eval", "c", None, planned)
    got = evaluate_run(run_dir, "c", None)
    for k in (1, 2, 3):
        (row,) = store.rows(run_dir, f"from pass_k({k})")
        assert (row["tasks"], row["too_few"], row["trials"], row["missing"]) == (5, 0, 15, 1)
        assert row["pass_at"] == pytest.approx(got["pass_at"][str(k)]["p"])
        for kind in ("all_k", "power", "draw"):
            assert row[f"pass_hat_{kind}"] == pytest.approx(got["pass_hat"][str(k)][kind]["p"])
    (row,) = store.rows(run_dir, "from pass_k(4)")
    assert (row["tasks"], row["too_few"], row["pass_at"], row["pass_hat_draw"]) == (0, 5, None, None)


def test_only_the_final_attempt_and_the_latest_score_count():
    episodes, scores, planned = rows(n=1, passes=0, tasks=1)
    first = {**episodes[0], "final": False, "status": "sandbox_lost"}
    second = made_run.episode(planned[0], "completed", attempt=1)
    late, early = made_run.score(second, 1.0, "v2", later=9), made_run.score(second, 0.0, "v3", later=1)
    got = evaluate([first, second], [late, *scores, early], planned)
    assert (got["p"], got["reward"], got["statuses"]) == (1.0, 1.0, {"completed": 1})


def test_reserve_rollouts_are_no_denominator():
    episodes, scores, planned = rows(n=2, passes=2, tasks=1)
    assert evaluate(episodes, scores, [planned[0], {**planned[1], "reserve": True}])["episodes"] == 1


def test_what_is_no_single_evaluation_is_refused():
    with pytest.raises(EvalError, match="at least one planned rollout"):
        evaluate([], [], [])
    one, two = rows(cell="a"), rows(cell="b")
    with pytest.raises(EvalError, match=r"one evaluation has one cell, these rollouts have \['a', 'b'\]"):
        evaluate([], [], [*one[2], *two[2]])


def test_a_missing_table_is_a_sentence(run_dir):
    with pytest.raises(t.TableError, match=r"rollouts\.parquet cannot be read as table rollouts"):
        evaluate_run(run_dir, "heldout", 7)
