"""The policy's loss over a micro-batch, put together from veRL's own parts: policy loss, entropy, KL, aggregation.

veRL's `ppo_loss` does the same with one row a sequence. Here a sequence is an episode, which may have several rows:
`seq-mean-token-mean` weighs each row's mean by the row's share of its episode, in every term of the loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn, kl_penalty
from verl.utils.metric import AggregationType, Metric
from verl.workers.config import ActorConfig
from verl.workers.utils.padding import no_padding_2_padding

# Columns over the responses, each a nested tensor (rows, R): the first four always, the others where they are used.
COLUMNS = (
    "response_mask",
    "old_log_probs",
    "advantages",
    "rollout_log_probs",
    "rollout_is_weights",
    "row_weights",
    "ref_log_prob",
)


def policy_loss(
    config: ActorConfig, model_output: Mapping[str, Any], data: TensorDict, dp_group: Any = None
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """Loss of a micro-batch and its metrics; both add up over micro-batches and average over processes.

    veRL multiplies what is averaged over processes by their number (`dp_size`), and divides by the trained tokens or
    episodes of the whole mini-batch, so that neither micro-batches nor processes nor padded rows change the result.
    """
    whole = {k: data[k] for k in ("dp_size", "batch_num_tokens", "global_batch_size")}
    config.global_batch_info.update(whole, loss_scale_factor=config.loss_scale_factor)
    columns = data.select(*(c for c in COLUMNS if c in data)).to_padded_tensor()
    mask = columns["response_mask"].bool()
    now = no_padding_2_padding(model_output["log_probs"], data)
    share = columns.get("row_weights", None)

    def total(values: torch.Tensor) -> torch.Tensor:
        weighed = values if share is None else values * share
        return agg_loss(weighed, mask, config.loss_agg_mode, **config.global_batch_info)

    # Every policy loss of veRL multiplies its token losses by these, after clipping.
    factors = [f for f in (columns.get("rollout_is_weights", None), share) if f is not None]
    loss, figures = get_policy_loss_fn(config.policy_loss.loss_mode)(
        old_log_prob=columns["old_log_probs"],
        log_prob=now,
        advantages=columns["advantages"],
        response_mask=mask,
        loss_agg_mode=config.loss_agg_mode,
        config=config,
        rollout_is_weights=factors[0] * factors[-1] if len(factors) == 2 else next(iter(factors), None),
    )
    # veRL's figures are means over the micro-batch's trained tokens: here they count by them.
    here = float(mask.sum())
    metrics = {k: added_up(float(v) * here * whole["dp_size"] / whole["batch_num_tokens"]) for k, v in figures.items()}
    metrics["actor/pg_loss"] = added_up(loss)

    def mean(values: torch.Tensor) -> Metric:
        summed = (values.detach() * mask).double().sum()
        return added_up(summed * whole["dp_size"] / whole["batch_num_tokens"])

    entropy = model_output.get("entropy", None)
    if entropy is not None:
        entropy = no_padding_2_padding(entropy, data)
        metrics["actor/entropy"] = mean(entropy)
        if config.entropy_coeff:
            loss = loss - config.entropy_coeff * total(entropy)
    if config.use_kl_loss:
        apart = total(kl_penalty(now, columns["ref_log_prob"], config.kl_loss_type))
        loss = loss + config.kl_loss_coef * apart
        metrics["actor/kl_loss"] = added_up(apart)
    return loss, metrics | _distance(now.detach(), columns["rollout_log_probs"], mask, mean)


def _distance(now: torch.Tensor, recorded: torch.Tensor, mask: torch.Tensor, mean: Any) -> dict[str, Metric]:
    """How far the trainer's log-probs are from the sampler's: KL(sampler || trainer) by the estimators k1 and k3
    (http://joschu.net/blog/kl-approx.html), and absolute differences."""
    ratio = (now - recorded) * mask
    return {
        "rollout_corr/kl": mean(-ratio),
        "rollout_corr/k3_kl": mean(ratio.exp() - ratio - 1),
        "training/logprob_diff_mean": mean(ratio.abs()),
        "training/logprob_diff_max": Metric(AggregationType.MAX, float(ratio.abs().max())),
    }


def added_up(value: torch.Tensor | float) -> Metric:
    """A metric whose parts add up over micro-batches and average over processes."""
    return Metric(AggregationType.SUM, value)
