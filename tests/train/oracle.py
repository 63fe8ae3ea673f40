"""An iteration of training in plain PyTorch: one row at a time, no veRL, nothing of openforge.train.

Advantages come from the rewards (unbiased standard deviation + 1e-6), never from the table. Old log-probs are recorded
or recomputed, then with truncated importance weights. The policy losses are written from their papers: PPO with dual
clip (arXiv 1912.09729), GSPO (2507.18071), SAPO (2511.20347), CISPO (2506.13585), DPPO (2602.04879), DRO (2405.19107),
GPG (2504.02546).
"""

from __future__ import annotations

import copy
import math
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


def token_losses(actor: Json, now: Any, old: Any, a: Any) -> Any:
    """Loss of each trained token of one row with advantage `a`, by actor.policy_loss.loss_mode; for `vanilla` it may be
    one a token."""
    mode, ratio = actor["policy_loss"]["loss_mode"], (now - old).exp()
    low = 1 - (actor["clip_ratio_low"] or actor["clip_ratio"])
    high = 1 + (actor["clip_ratio_high"] or actor["clip_ratio"])
    if mode == "vanilla":
        objective = torch.minimum(ratio * a, ratio.clamp(low, high) * a)
        a = torch.as_tensor(a)
        return -torch.where(a < 0, torch.maximum(objective, a * actor["clip_ratio_c"]), objective)
    if mode == "gspo":
        # One ratio a sequence: the geometric mean of its tokens'. Each token's gradient has that as its weight.
        sequence = (now - old).mean().exp().detach() * (now - now.detach()).exp()
        return -torch.minimum(sequence * a, sequence.clamp(low, high) * a)
    if mode == "sapo":
        tau = actor["tau_pos"] if a > 0 else actor["tau_neg"]
        return -a * 4 / tau / (1 + torch.exp(-tau * (ratio - 1)))
    if mode == "cispo":
        return -ratio.clamp(low, high).detach() * a * now
    if mode == "gpg":
        return -a * now
    if mode == "dro":
        return -a * now + actor["policy_loss"]["dro_beta"] / 2 * (now - old) ** 2
    # DPPO: a token drops out where its probability has moved too far in the direction that its advantage asks for.
    p, q = now.exp(), old.exp()
    moved, bounds = (p - q, (1 - low, high - 1)) if mode == "dppo_tv" else (_binary_kl(q, p), (1 - low, high - 1))
    if mode == "dppo_tv":
        kept = moved <= bounds[1] if a > 0 else moved >= -bounds[0]
    else:
        kept = (moved <= bounds[1]) | (p <= q) if a > 0 else (moved <= bounds[0]) | (p >= q)
    return -a * (ratio.clamp(max=actor["clip_ratio_c"]) * kept).detach() * now


def _binary_kl(q: Any, p: Any) -> Any:
    """KL between Bernoulli distributions: the token drawn, or any other."""
    return q * (q / p).log() + (1 - q) * ((1 - q + 1e-8) / (1 - p + 1e-8)).log()


def kl_losses(kind: str, now: Any, reference: Any) -> Any:
    """Estimates of KL(policy || reference) a token (http://joschu.net/blog/kl-approx.html); with + the value is the
    estimate and the gradient that of half the squared log-ratio."""
    ratio = now - reference
    estimate = {"kl": ratio, "abs": ratio.abs(), "mse": ratio**2 / 2, "low_var_kl": (-ratio).exp() + ratio - 1}
    value = estimate[kind.rstrip("+")]
    return value.detach() + (ratio**2 / 2 - (ratio**2 / 2).detach()) if kind.endswith("+") else value


def rate(optim: Json, step: int) -> float:
    """Learning rate of a run's optimizer step, from 0: a line up from 0, then constant or half a cosine, then level."""
    warm, end = optim["lr_warmup_steps"], optim["total_training_steps"]
    if step < warm:
        return float(optim["lr"] * step / warm)
    if optim["lr_scheduler_type"] == "constant":
        return float(optim["lr"])
    done = min((step - warm) / (end - warm), 1.0)
    least = optim["min_lr_ratio"]
    return float(optim["lr"] * (least + (1 - least) * (1 + math.cos(math.pi * done)) / 2))


class Adapted(torch.nn.Module):
    """A linear layer whose weight is W + alpha / rank B A (arXiv 2106.09685), of which B and A are trained."""

    def __init__(self, layer: Any, a: torch.Tensor, scale: float) -> None:
        super().__init__()
        self.layer, self.scale = layer, scale
        self.a = torch.nn.Parameter(a.clone())
        self.b = torch.nn.Parameter(torch.zeros(layer.out_features, len(a)))

    @property
    def weight(self) -> torch.Tensor:
        return self.layer.weight + self.scale * self.b @ self.a

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight, self.layer.bias)


def adapt(model: Any, starts: dict[str, torch.Tensor], scale: float) -> None:
    """Put adapters on the layers of `model` that `starts` names, with these first A; all else is frozen."""
    model.requires_grad_(False)
    for name, a in starts.items():
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, Adapted(model.get_submodule(name), a, scale))


class Critic:
    """A value model (token classification with one output) with AdamW of its own: PPO's critic (arXiv 1707.06347)."""

    def __init__(self, model: Any, config: Json) -> None:
        self.model, self.clip = model, config["critic"]["cliprange_value"]
        self.gamma, self.lam = config["algorithm"]["gamma"], config["algorithm"]["lam"]
        o = config["critic"]["optim"]
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=o["lr"], betas=tuple(o["betas"]), weight_decay=o["weight_decay"]
        )
        self.most = o["clip_grad"]
        self.losses: list[float] = []
        self.old: list[torch.Tensor] = []
        self.returns: list[torch.Tensor] = []

    def values(self, sample: Json) -> torch.Tensor:
        """Value of the state before each trained token."""
        at = torch.tensor([i for i, m in enumerate(sample["loss_mask"]) if m])
        out: torch.Tensor = self.model(torch.tensor([sample["token_ids"]])).logits[0, at - 1, 0]
        return out

    def advantages(self, samples: list[Json]) -> list[torch.Tensor]:
        """GAE (arXiv 1506.02438) over each row's trained tokens, whitened over those of all rows."""
        with torch.no_grad():
            self.old = [self.values(s) for s in samples]
        raw = []
        for s, values in zip(samples, self.old, strict=True):
            advantage, found = 0.0, []
            for t in reversed(range(len(values))):
                last = t == len(values) - 1
                reward, after = (s["rewards"][-1], 0.0) if last else (0.0, float(values[t + 1]))
                advantage = reward + self.gamma * after - float(values[t]) + self.gamma * self.lam * advantage
                found.append(advantage)
            raw.append(torch.tensor(found[::-1]))
        self.returns = [a + v for a, v in zip(raw, self.old, strict=True)]
        everyone = torch.cat(raw)
        return [(a - everyone.mean()) / (everyone.var() + 1e-8).sqrt() for a in raw]

    def step(self, samples: list[Json], chosen: Any) -> None:
        now = torch.cat([self.values(samples[i]) for i in chosen])
        old, target = (torch.cat([x[i] for i in chosen]) for x in (self.old, self.returns))
        held = old + (now - old).clamp(-self.clip, self.clip)
        loss = torch.maximum((now - target) ** 2, (held - target) ** 2).mean() / 2
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.most)
        self.optimizer.step()
        self.losses.append(float(loss))


class Oracle:
    """Holds model, reference and AdamW over iterations."""

    def __init__(self, model: Any, config: Json, critic: Critic | None = None) -> None:
        self.model, self.config, self.actor, self.critic = model, config, config["actor"], critic
        self.reference = copy.deepcopy(model)
        self.steps = 0
        o = self.actor["optim"]
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=o["lr"], betas=tuple(o["betas"]), weight_decay=o["weight_decay"]
        )

    def iteration(self, k: int, samples: list[Json]) -> list[tuple[float, float]]:
        """All steps of iteration k: loss and gradient norm (before clipping) of each."""
        actor, t = self.actor, self.config["sampling"]["temperature"]
        algorithm = self.config["algorithm"]
        advantage: list[Any]
        if algorithm["adv_estimator"] == "sft":
            # The log-likelihood of what was sampled.
            advantage = [1.0 for _ in samples]
        elif self.critic is None:
            by_episode = advantages(samples, algorithm["norm_adv_by_std_in_grpo"])
            advantage = [by_episode[s["episode_id"]] for s in samples]
        else:
            advantage = self.critic.advantages(samples)
        recorded = [torch.tensor([p for p, m in zip(s["logprobs"], s["loss_mask"], strict=True) if m]) for s in samples]
        old, importance = recorded, [torch.ones_like(r) for r in recorded]
        correction = algorithm["rollout_correction"]
        if not correction["bypass_mode"]:
            with torch.no_grad():
                old = [log_probs(self.model, s, t)[0] for s in samples]
            most = correction["rollout_is_threshold"]
            importance = [(o - r).exp().clamp(max=most) for o, r in zip(old, recorded, strict=True)]
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
        tokens = sum(sum(samples[i]["loss_mask"]) for i in chosen)
        share = {
            i: sum(samples[i]["loss_mask"]) / _tokens_of_episode(samples, samples[i]["episode_id"]) for i in chosen
        }
        episodes = sum(share.values())
        loss = torch.zeros(())
        for i in chosen:
            now, entropy = log_probs(self.model, samples[i], t)
            token = token_losses(actor, now, old[i], advantage[i]) * importance[i]
            token = token - actor["entropy_coeff"] * entropy
            if actor["use_kl_loss"]:
                with torch.no_grad():
                    reference = log_probs(self.reference, samples[i], t)[0]
                token = token + actor["kl_loss_coef"] * kl_losses(actor["kl_loss_type"], now, reference)
            loss = (
                loss
                + {
                    "token-mean": token.sum() / tokens,
                    "token-sum": token.sum(),
                    "seq-mean-token-sum": token.sum() / episodes,
                    "seq-mean-token-mean": share[i] * token.mean() / episodes,
                    "seq-mean-token-sum-norm": token.sum() / episodes / (actor["loss_scale_factor"] or 1),
                }[actor["loss_agg_mode"]]
            )
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), actor["optim"]["clip_grad"])
        for group in self.optimizer.param_groups:
            group["lr"] = rate(actor["optim"], self.steps)
        self.optimizer.step()
        if self.critic is not None:
            self.critic.step(samples, chosen)
        self.steps += 1
        return float(loss), float(norm)


def _tokens_of_episode(samples: list[Json], episode: str) -> int:
    return sum(sum(s["loss_mask"]) for s in samples if s["episode_id"] == episode)
