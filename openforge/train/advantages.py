"""Advantages of a samples table beside those of veRL's own estimator, one row an episode."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import get_adv_estimator_fn

from openforge.config_training import Algorithm
from openforge.samples.credit import ESTIMATORS
from openforge.train.job import TrainError
from openforge.train.rows import Row, episodes


def credited(rows: list[Row], algorithm: Algorithm) -> list[Row]:
    """Rows with the advantages of veRL's own estimator, over one row an episode, where the table leaves them to it.

    Raises:
        TrainError: the table has an advantage that is another than veRL's.
    """
    firsts = episodes(rows)
    rewards = torch.tensor([[r.reward] for r in firsts], dtype=torch.float64)
    groups = np.array([r.group_id for r in firsts], dtype=object)
    by_std = algorithm.norm_adv_by_std_in_grpo
    estimate = get_adv_estimator_fn(algorithm.adv_estimator)
    found, _ = estimate(
        token_level_rewards=rewards,
        response_mask=torch.ones_like(rewards),
        index=groups,
        norm_adv_by_std_in_grpo=by_std,
        config=AlgoConfig(norm_adv_by_std_in_grpo=by_std),
    )
    advantage = {r.episode_id: float(value) for r, value in zip(firsts, found[:, 0], strict=True)}
    if firsts[0].advantages is None:
        return [replace(r, advantages=np.full(len(r.mask), advantage[r.episode_id], np.float32) * r.mask) for r in rows]
    # The last call of an episode has all of its advantage, the others a discounted one.
    stored: dict[str, float] = {}
    for r in rows:
        stored[r.episode_id] = max(stored.get(r.episode_id, 0.0), *r.advantages.tolist(), key=abs)
    within = ESTIMATORS[algorithm.adv_estimator].within
    for row in firsts:
        mates = torch.from_numpy((groups == row.group_id) | (within == "iteration"))
        raw, its = rewards[mates], found[mates]
        # Rewards stand in the table as float32: dividing by a small spread magnifies their rounding.
        noise = 4e-7 * float(raw.abs().max() * (its.max() - its.min()) / (raw.max() - raw.min()))
        if not abs(stored[row.episode_id] - advantage[row.episode_id]) <= 1e-6 + noise:
            raise TrainError(
                f"episode {row.episode_id} of group {row.group_id}: its advantage in the samples table is "
                f"{stored[row.episode_id]:.6f}, but veRL's estimator {algorithm.adv_estimator} gives "
                f"{advantage[row.episode_id]:.6f}; write the samples again"
            )
    return rows
