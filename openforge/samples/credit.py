"""Credit: one advantage an episode, from the rewards of its group."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

# veRL's epsilon in compute_grpo_outcome_advantage.
EPSILON = 1e-6
# Rewards closer than this differ by float noise: their group teaches nothing.
SPREAD = 1e-6


def degenerate(outcomes: Sequence[float]) -> bool:
    """Whether a group's outcomes are all the same up to float noise."""
    return max(outcomes) - min(outcomes) < SPREAD


def grpo(rewards: Mapping[str, float], norm_by_std: bool) -> dict[str, float]:
    """Advantages of one group: (r - mean) / (std + 1e-6), the standard deviation unbiased (n - 1).

    Args:
        rewards: reward by episode, two or more.
        norm_by_std: False leaves r - mean (Dr. GRPO, arXiv 2503.20783).

    Source: GRPO (arXiv 2402.03300) as in veRL's `compute_grpo_outcome_advantage`, one row an episode.
    """
    n = len(rewards)
    mean = math.fsum(rewards.values()) / n
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards.values()) / (n - 1))
    scale = std + EPSILON if norm_by_std else 1.0
    return {e: (r - mean) / scale for e, r in rewards.items()}


# By the name that algorithm.adv_estimator has in the configuration, which is veRL's.
ESTIMATORS = {"grpo": grpo}
