"""Credit: one advantage an episode, from its group's or the whole iteration's rewards; calls further back get less.

The registry below is what `algorithm.adv_estimator` offers. This module imports nothing of its own package: the
configuration reads the names from here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

# Reward by episode, by group; every group of a grouped estimator has two episodes or more.
Groups = Mapping[str, Mapping[str, float]]

# veRL's epsilon of a standard deviation, and of a variance where it whitens.
EPSILON = 1e-6
EPSILON_VARIANCE = 1e-8
# Rewards closer than this differ by float noise: their group teaches nothing.
SPREAD = 1e-6


def outcome(reward: float, components: Mapping[str, Any]) -> float:
    """The reward without its component `shaping`: shaping ranks outcomes, it must not make a group of equal ones one
    that teaches."""
    shaping = components.get("shaping")
    return reward - shaping if isinstance(shaping, (int, float)) else reward


def degenerate(outcomes: Sequence[float]) -> bool:
    """Whether outcomes are all the same up to float noise."""
    return max(outcomes) - min(outcomes) < SPREAD


def grpo(groups: Groups, norm_by_std: bool) -> dict[str, float]:
    """(r - mean) / (std + 1e-6) within a group, the standard deviation unbiased (n - 1).

    `norm_by_std` False leaves r - mean (Dr. GRPO, arXiv 2503.20783).

    Source: GRPO (arXiv 2402.03300) as in veRL's `compute_grpo_outcome_advantage`.
    """
    advantages: dict[str, float] = {}
    for rewards in groups.values():
        mean, variance = _moments(rewards.values())
        scale = math.sqrt(variance) + EPSILON if norm_by_std else 1.0
        advantages |= {e: (r - mean) / scale for e, r in rewards.items()}
    return advantages


def rloo(groups: Groups, _: bool) -> dict[str, float]:
    """r minus the mean of the group's other rewards.

    Source: RLOO (arXiv 2402.14740) as in veRL's `compute_rloo_outcome_advantage`.
    """
    advantages: dict[str, float] = {}
    for rewards in groups.values():
        total, others = math.fsum(rewards.values()), len(rewards) - 1
        advantages |= {e: r - (total - r) / others for e, r in rewards.items()}
    return advantages


def reinforce_plus_plus(groups: Groups, _: bool) -> dict[str, float]:
    """r, whitened over the iteration's episodes: (r - mean) / sqrt(variance + 1e-8), the variance unbiased.

    Source: REINFORCE++ (arXiv 2501.03262) as in veRL's `compute_reinforce_plus_plus_outcome_advantage`, over one row
    of one token an episode, so that a long episode weighs no more in the mean.
    """
    return _whiten({e: r for rewards in groups.values() for e, r in rewards.items()})


def reinforce_plus_plus_baseline(groups: Groups, _: bool) -> dict[str, float]:
    """r minus its group's mean, whitened over the iteration's episodes.

    Source: arXiv 2501.03262 as in veRL's `compute_reinforce_plus_plus_baseline_outcome_advantage`.
    """
    return _whiten(grpo(groups, False))


def sft(groups: Groups, _: bool) -> dict[str, float]:
    """1 for every episode: of those that passed, which alone are kept, the likelihood is raised.

    Source: the policy gradient of rewards 1 and 0 without a baseline is that of the log-likelihood of successes.
    """
    return {e: 1.0 for rewards in groups.values() for e in rewards}


def _whiten(values: Mapping[str, float]) -> dict[str, float]:
    mean, variance = _moments(values.values())
    return {e: (v - mean) / math.sqrt(variance + EPSILON_VARIANCE) for e, v in values.items()}


def _moments(values: Iterable[float]) -> tuple[float, float]:
    """Mean and unbiased variance of two values or more."""
    values = list(values)
    mean = math.fsum(values) / len(values)
    return mean, math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)


class Estimator(NamedTuple):
    """How an iteration's episodes get their advantages.

    Attributes:
        within: whose rewards an advantage is relative to, its group's or the whole iteration's: where these are one
            alone or all the same, nothing can be learnt. `episode`: nobody's; an episode that did not pass is left out.
        formula: advantage by episode, from the rewards and norm_adv_by_std_in_grpo; None leaves the column NULL, and
            the training job asks veRL's estimator of the same name, one row an episode.
        by_std: whether it reads norm_adv_by_std_in_grpo.
        critic: whether the training job estimates advantages a token with a critic of its own.
    """

    within: Literal["group", "iteration", "episode"]
    formula: Callable[[Groups, bool], dict[str, float]] | None = None
    by_std: bool = False
    critic: bool = False


# By veRL's names. A further one that veRL has is one line here, and its formula in tests/samples/credit_oracle.py.
ESTIMATORS: dict[str, Estimator] = {
    "grpo": Estimator("group", grpo, by_std=True),
    "rloo": Estimator("group", rloo),
    "reinforce_plus_plus": Estimator("iteration", reinforce_plus_plus),
    "reinforce_plus_plus_baseline": Estimator("group", reinforce_plus_plus_baseline),
    "grpo_passk": Estimator("group", by_std=True),
    "gpg": Estimator("group"),
    "gae": Estimator("iteration", critic=True),
    "sft": Estimator("episode", sft),
}


def discounts(calls: Sequence[int], gamma: float) -> dict[int, float]:
    """gamma^(T - t) for the t-th of an episode's T trained calls in time order: the last call's is 1."""
    return {c: gamma ** (len(calls) - 1 - t) for t, c in enumerate(sorted(calls))}
