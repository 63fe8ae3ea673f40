"""An iteration of GRPO in plain PyTorch: one row at a time, no veRL, nothing of openforge.train.

Advantages come from the rewards (unbiased standard deviation + 1e-6), never from the table. The loss is PPO's
with dual clip (arXiv 1912.09729), old log-probs recorded or recomputed, then with truncated importance
weights (bound 2).
"""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import torch

Json = dict[str, Any]


def advantages(samples: list[Json], norm_by_std: bool) -> dict[str, float]:
    """Advantage by episode, each episode counted once in its group."""
    reward = {s["episode_id"]: max(s["rewards"], key=abs) for s in samples}
    group = {s["episode_id"]: s["group_id"] for s in samples}
    out = {}
    for e, r in reward.items():
        others = [reward[x] for x in reward if group[x] == group[e]]
        scale = statistics.stdev(others) + 1e-6 if norm_by_std else 1.0
        out[e] = (r - statistics.fmean(others)) / scale
    return out


def log_probs(model: Any, sample: Json, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of the trained tokens of one row."""
    ids = torch.tensor([sample["token_ids"]])
    at = torch.tensor([i for i, m in enumerate(sample["loss_mask"]) if m])
    logp = torch.log_softmax(model(ids).logits[0].float() / temperature, -1)[at - 1]
    return logp.gather(1, ids[0, at, None])[:, 0], -(logp.exp() * logp).sum(-1)


class Oracle:
    """Holds model and AdamW over iterations."""

    def __init__(self, model: Any, config: Json) -> None:
        self.model, self.config, self.actor = model, config, config["actor"]
        o = self.actor["optim"]
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=o["lr"], betas=tuple(o["betas"]), weight_decay=o["weight_decay"]
        )

    def iteration(self, k: int, samples: list[Json]) -> list[tuple[float, float]]:
        """All steps of iteration k: loss and gradient norm (before clipping) of each."""
        actor, t = self.actor, self.config["sampling"]["temperature"]
        algorithm = self.config["algorithm"]
        advantage = advantages(samples, algorithm["norm_adv_by_std_in_grpo"])
        recorded = [torch.tensor([p for p, m in zip(s["logprobs"], s["loss_mask"], strict=True) if m]) for s in samples]
        old, importance = recorded, [torch.ones_like(r) for r in recorded]
        if not algorithm["rollout_correction"]["bypass_mode"]:
            with torch.no_grad():
                old = [log_probs(self.model, s, t)[0] for s in samples]
            importance = [(o - r).exp().clamp(max=2.0) for o, r in zip(old, recorded, strict=True)]
        generator = np.random.default_rng((actor["data_loader_seed"], k))
        out = []
        for _ in range(actor["ppo_epochs"]):
            order = generator.permutation(len(samples))
            for start in range(0, len(samples), actor["ppo_mini_batch_size"]):
                chosen = order[start : start + actor["ppo_mini_batch_size"]]
                out.append(self._step(samples, chosen, advantage, old, importance, t))
        return out

    def _step(
        self, samples: list[Json], chosen: Any, advantage: Any, old: Any, importance: Any, t: float
    ) -> tuple[float, float]:
        actor = self.actor
        sizes = {i: sum(samples[i]["loss_mask"]) for i in chosen}
        share = {i: sizes[i] / _tokens_of_episode(samples, samples[i]["episode_id"]) for i in chosen}
        loss = torch.zeros(())
        for i in chosen:
            now, entropy = log_probs(self.model, samples[i], t)
            a = advantage[samples[i]["episode_id"]]
            ratio = (now - old[i]).exp()
            clipped = ratio.clamp(1 - actor["clip_ratio_low"], 1 + actor["clip_ratio_high"])
            objective = torch.minimum(ratio * a, clipped * a)
            if a < 0:
                objective = objective.clamp(min=a * actor["clip_ratio_c"])
            token = -objective * importance[i]
            bonus = -actor["entropy_coeff"] * entropy
            mode = actor["loss_agg_mode"]
            if mode == "token-mean":
                loss = loss + (token + bonus).sum() / sum(sizes.values())
            elif mode == "seq-mean-token-sum":
                loss = loss + (token + bonus).sum() / sum(share.values())
            else:
                loss = loss + (share[i] * token.mean() + bonus.mean()) / sum(share.values())
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), actor["optim"]["clip_grad"])
        self.optimizer.step()
        return float(loss), float(norm)


def _tokens_of_episode(samples: list[Json], episode: str) -> int:
    return sum(sum(s["loss_mask"]) for s in samples if s["episode_id"] == episode)
