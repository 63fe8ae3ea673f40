"""Hand-made rows of episodes, scores and calls for the samples stage."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from openforge.config import RunConfig

Json = dict[str, Any]
T0 = datetime(2026, 1, 1, tzinfo=UTC)


def config(
    bypass: bool = False, std: bool = True, algorithm: Json | None = None, reward: Json | None = None, **actor: Any
) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": "tiny-random",
            "iterations": 1,
            "tasks": {"source": "tiny"},
            "actor": actor,
            "reward": {"reward_kwargs": reward or {}},
            "algorithm": {"norm_adv_by_std_in_grpo": std, "rollout_correction": {"bypass_mode": bypass}}
            | (algorithm or {}),
        }
    )


def call(
    n: int,
    prompt: list[int],
    response: list[int],
    parent: int | None = None,
    *,
    reason: str | None = None,
    version: str = "0@a",
    prefix: tuple[int, int] | None = None,
    episode: str = "e0",
) -> Json:
    """A row of the calls table; logprob of token t sampled in call n is -(n + t / 1000)."""
    return {
        "episode_id": episode,
        "call": n,
        "parent": parent,
        "prefix_of": prefix[0] if prefix else None,
        "prefix_len": prefix[1] if prefix else 0,
        "prompt_suffix_ids": prompt[prefix[1] :] if prefix else prompt,
        "prompt_tokens": len(prompt),
        "response_token_ids": response,
        "logprobs": [-(n + t / 1000) for t in response],
        "policy_version": version,
        "images": [],
        "trainable": reason is None,
        "reason": reason,
    }


def episode(name: str, group: str = "g0", status: str = "completed", final: bool = True) -> Json:
    same = {"group_id": group, "status": status, "final": final, "iteration": 1}
    return {"episode_id": name, "rollout_id": f"r-{name}", **same}


def score(name: str, reward: float | None, status: str = "scored", at: int = 0, **components: Any) -> Json:
    return {
        "episode_id": name,
        "status": status,
        "reward": reward,
        "components": json.dumps(components),
        "scored_at": T0.replace(second=at),
    }


def one(name: str, version: str = "0@a") -> Json:
    """An episode's only call: three prompt tokens, two sampled."""
    return call(0, [1, 2, 3], [10, 11], episode=name, version=version)


def group_of(rewards: list[float], group: str = "g0", **components: Any) -> tuple[list[Json], list[Json], list[Json]]:
    names = [f"{group}-e{i}" for i in range(len(rewards))]
    return (
        [episode(n, group) for n in names],
        [score(n, r, **components) for n, r in zip(names, rewards, strict=True)],
        [one(n) for n in names],
    )


def advantage_of(samples: list[Json], name: str) -> float:
    """The one advantage that all trained tokens of an episode share."""
    rows = [s for s in samples if s["episode_id"] == name]
    (value,) = {a for s in rows for a, m in zip(s["advantages"], s["loss_mask"], strict=True) if m}
    assert all(a == 0 for s in rows for a, m in zip(s["advantages"], s["loss_mask"], strict=True) if not m)
    return float(value)
