"""Estimates from repeated samples of tasks: unbiased pass@k, pass^k in its three kinds, and a bootstrap interval
clustered by task.

pass@k asks whether any of k trials passes, pass^k whether all of them do. Public benchmarks mean three things
by pass^k; here each has its name.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import comb
from typing import NamedTuple

RESAMPLES = 5000
LEVEL = 0.95


class Estimate(NamedTuple):
    """A mean over clusters with its interval.

    Attributes:
        p: the mean, in the unit of the values.
        low, high: bounds of the interval at `LEVEL`.
        n: clusters (tasks or groups), the independent units.
    """

    p: float
    low: float
    high: float
    n: int


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that at least one of k samples passes, from c passes among n samples of a task.

    1 - C(n-c, k) / C(n, k): Chen et al., Evaluating Large Language Models Trained on Code, 2021, eq. 1.

    Raises:
        ValueError: k is not in 1..n, or c not in 0..n.
    """
    _check(n, c, k, "pass@")
    return 1.0 - comb(n - c, k) / comb(n, k)


def pass_all_k(trials: Sequence[bool], k: int) -> float:
    """1 if the first k trials of a task all passed, else 0: ClawEval's headline pass^3 with k = 3.

    Raises:
        ValueError: k is not in 1..len(trials).
    """
    _check(len(trials), sum(trials), k, "pass^")
    return float(all(trials[:k]))


def pass_rate_power_k(n: int, c: int, k: int) -> float:
    """(c / n)^k, as ClawEval's library has it: of k further trials all pass, if c / n were the true rate.

    Biased upwards: by Jensen's inequality its mean over draws is more than p^k.

    Raises:
        ValueError: k is not in 1..n, or c not in 0..n.
    """
    _check(n, c, k, "pass^")
    return float((c / n) ** k)


def pass_draw_k(n: int, c: int, k: int) -> float:
    """C(c, k) / C(n, k): k of the n trials, drawn without replacement, all pass; unbiased for p^k.

    tau-bench (Yao et al. 2024, section 4) and QwenClawBench have this one.

    Raises:
        ValueError: k is not in 1..n, or c not in 0..n.
    """
    _check(n, c, k, "pass^")
    return comb(c, k) / comb(n, k)


def _check(n: int, c: int, k: int, what: str) -> None:
    if not 1 <= k <= n or not 0 <= c <= n:
        raise ValueError(f"{what}{k} cannot be estimated from {c} passes among {n} samples")


def clustered(clusters: Sequence[tuple[float, float]], seed: int = 0) -> Estimate:
    """Weighted mean over clusters with its percentile bootstrap interval (whole clusters are resampled).

    Args:
        clusters: (sum of its values, its weight) a cluster; the mean is all sums / all weights.
        seed: of the resampling, so that a report repeats itself.

    Raises:
        ValueError: no cluster, or a cluster without weight.
    """
    if not clusters or any(w <= 0 for _, w in clusters):
        raise ValueError("a mean needs at least one cluster, and every cluster a positive weight")
    n = len(clusters)
    means = _resampled(clusters, random.Random(seed))
    tail = (1 - LEVEL) / 2
    return Estimate(_mean(clusters), _quantile(means, tail), _quantile(means, 1 - tail), n)


def _resampled(clusters: Sequence[tuple[float, float]], rng: random.Random) -> list[float]:
    """Means of `RESAMPLES` draws of all clusters with replacement, in order."""
    n = len(clusters)
    if len({w for _, w in clusters}) == 1:
        # One weight, as in pass@k: summing plain numbers is several times faster.
        sums, total = [s for s, _ in clusters], n * clusters[0][1]
        return sorted(sum(rng.choices(sums, k=n)) / total for _ in range(RESAMPLES))
    return sorted(_mean(rng.choices(clusters, k=n)) for _ in range(RESAMPLES))


def _mean(clusters: Sequence[tuple[float, float]]) -> float:
    return sum(s for s, _ in clusters) / sum(w for _, w in clusters)


def _quantile(ordered: Sequence[float], q: float) -> float:
    """Quantile by linear interpolation between order statistics."""
    at = q * (len(ordered) - 1)
    i = int(at)
    above = ordered[min(i + 1, len(ordered) - 1)]
    return ordered[i] + (at - i) * (above - ordered[i])
