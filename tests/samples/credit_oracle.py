"""Advantages by the papers' formulas, one episode at a time, with the standard library's statistics; nothing of
openforge."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

Rewards = Mapping[str, tuple[str, float]]  # (group, reward) by episode


def _mates(rewards: Rewards, episode: str) -> list[float]:
    return [r for group, r in rewards.values() if group == rewards[episode][0]]


def grpo(rewards: Rewards, episode: str, by_std: bool) -> float:
    """arXiv 2402.03300; without the standard deviation Dr. GRPO, arXiv 2503.20783."""
    mates = _mates(rewards, episode)
    centred = rewards[episode][1] - statistics.fmean(mates)
    return centred / (statistics.stdev(mates) + 1e-6) if by_std else centred


def rloo(rewards: Rewards, episode: str, _: bool) -> float:
    """arXiv 2402.14740: the baseline of a sample is the mean of the others."""
    others = [r for e, (group, r) in rewards.items() if group == rewards[episode][0] and e != episode]
    return rewards[episode][1] - sum(others) / len(others)


def reinforce_plus_plus(rewards: Rewards, episode: str, _: bool) -> float:
    """arXiv 2501.03262: normalised over the whole batch."""
    return _whitened({e: r for e, (_, r) in rewards.items()}, episode)


def reinforce_plus_plus_baseline(rewards: Rewards, episode: str, _: bool) -> float:
    """arXiv 2501.03262: the group's mean off, then normalised over the whole batch."""
    return _whitened({e: grpo(rewards, e, False) for e in rewards}, episode)


def _whitened(values: Mapping[str, float], episode: str) -> float:
    every = list(values.values())
    return (values[episode] - statistics.fmean(every)) / math.sqrt(statistics.variance(every) + 1e-8)


def grpo_passk(rewards: Rewards, episode: str, by_std: bool) -> float:
    """arXiv 2503.19595: the best of a group gets its lead over the second best, the others nothing."""
    mates = sorted(_mates(rewards, episode))
    if rewards[episode][1] < mates[-1]:
        return 0.0
    lead = mates[-1] - mates[-2]
    return lead / (statistics.stdev(mates) + 1e-6) if by_std else lead


def gpg(rewards: Rewards, episode: str, _: bool) -> float:
    """arXiv 2504.02546 as in veRL: r - mean, times episodes over episodes with a reward other than 0."""
    rewarded = sum(r != 0 for _, r in rewards.values())
    return len(rewards) / rewarded * grpo(rewards, episode, False)


FORMULAS = {f.__name__: f for f in (grpo, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline, grpo_passk, gpg)}
