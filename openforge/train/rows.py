"""Training rows between the samples table and veRL's TensorDict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Row:
    """One row: `token_ids` (L) is the prompt up to the first trained token, then the response (R).

    Attributes:
        mask: 1 where a response token is trained, int64 (R).
        recorded: log-probs recorded by the sampler, float32 (R), 0 where nothing is trained.
        advantages: advantages of the response tokens, 0 where nothing is trained, float32 (R); None where the table
            leaves them to the training job.
        reward: the episode's reward.
        weight: share of the row in its episode.
        policy_version: what sampled it, ITERATION@SHA256.
        images: hashes of its images, in the order of their tokens.
    """

    sample_id: str
    episode_id: str
    group_id: str
    token_ids: Any
    mask: Any
    recorded: Any
    advantages: Any
    reward: float
    weight: float
    policy_version: str
    images: tuple[str, ...] = ()

    @property
    def prompt_length(self) -> int:
        return len(self.token_ids) - len(self.mask)

    def staleness(self, iteration: int) -> int:
        """Iterations between what sampled the row and checkpoint `iteration` - 1, from which it is trained."""
        return iteration - 1 - int(self.policy_version.partition("@")[0])


def row_of(sample: Mapping[str, Any]) -> Row:
    """A row of the samples table as a `Row`, checked already (openforge/train/checks.py)."""
    ids, mask = np.asarray(sample["token_ids"], np.int64), np.asarray(sample["loss_mask"], np.int64)
    trained = np.flatnonzero(mask)
    start = int(trained[0])
    return Row(
        sample["sample_id"],
        sample["episode_id"],
        sample["group_id"],
        ids,
        mask[start:],
        np.asarray(sample["logprobs"], np.float32)[start:],
        None if sample["advantages"] is None else np.asarray(sample["advantages"], np.float32)[start:],
        float(sample["rewards"][int(trained[-1])]),
        float(sample["weight"]),
        sample["policy_version"],
        tuple(sample["images"] or ()),
    )


def permutations(count: int, size: int, epochs: int, seed: tuple[int, int]) -> list[list[int]]:
    """Mini-batches of row indices: one seeded permutation an epoch, cut into pieces of `size` (the last is
    shorter)."""
    generator = np.random.default_rng(seed)
    batches = []
    for _ in range(epochs):
        order = generator.permutation(count).tolist()
        batches += [order[i : i + size] for i in range(0, count, size)]
    return batches


def deal(indices: Sequence[int], lengths: Sequence[int], world: int) -> list[list[int]]:
    """Deal rows over ranks, longest first in snake order: equal counts to one, tokens nearly equal."""
    hands: list[list[int]] = [[] for _ in range(world)]
    for k, i in enumerate(sorted(indices, key=lambda i: (-lengths[i], i))):
        turn, seat = divmod(k, world)
        hands[seat if turn % 2 == 0 else world - 1 - seat].append(i)
    return hands


def episodes(rows: Iterable[Row]) -> list[Row]:
    """The first row of each episode, in order."""
    return list({r.episode_id: r for r in reversed(list(rows))}.values())[::-1]
