"""pass@k and its interval against enumeration and the binomial distribution; evaluations worked out by hand."""

import itertools
import json
import random
import statistics
from math import comb

import made_run
import pytest

from openforge import tables as t
from openforge.eval import EvalError, evaluate, evaluate_run
from openforge.eval.estimate import clustered, pass_at_k


@pytest.mark.parametrize("n", range(1, 7))
def test_pass_at_k_is_the_share_of_k_subsets_with_a_pass(n):
    for c in range(n + 1):
        samples = [i < c for i in range(n)]
        for k in range(1, n + 1):
            subsets = [any(s) for s in itertools.combinations(samples, k)]
            assert pass_at_k(n, c, k) == pytest.approx(sum(subsets) / len(subsets))


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
        "4": pytest.approx(1 - comb(5, 4) / comb(8, 4)),
        "8": 1.0,
    }


def test_k_goes_to_the_task_with_the_fewest_samples():
    episodes, scores, planned = rows(n=5)
    got = evaluate(episodes[:-1], scores[:-1], planned[:-1])
    assert set(got["pass_at"]) == {"1", "2", "4"}


def test_a_rollout_without_an_episode_or_score_is_missing_and_failed():
    episodes, scores, planned = rows(n=4, passes=4, tasks=1)
    assert evaluate(episodes, scores, planned)["p"] == 1.0
    got = evaluate(episodes[1:], scores, planned)
    assert (got["p"], got["missing"], got["missing_by_status"]) == (0.75, 1, {"no_episode": 1})
    got = evaluate(episodes, scores[:2], planned)
    assert (got["p"], got["missing"], got["missing_by_status"]) == (0.5, 2, {"completed": 2})
    got = evaluate([], [], planned)
    assert (got["p"], got["missing"], got["reward"]) == (0.0, 4, None)


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
