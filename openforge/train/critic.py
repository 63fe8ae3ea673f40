"""PPO's critic: a value for every trained token, GAE over each row, and the critic's own update.

The critic is veRL's value model: the policy's architecture with a head of one output for token classification. It
begins as checkpoint 0 with a fresh head, and lives in the state, below `CRITIC`, weights and optimizer together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import compute_value_loss, get_adv_estimator_fn
from verl.utils.metric import Metric
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.padding import no_padding_2_padding

from openforge.config import RunConfig
from openforge.config_training import Algorithm
from openforge.train.checkpoint import CRITIC
from openforge.train.losses import added_up
from openforge.train.rows import Row
from openforge.train.worker import make, weights


def build(model: Path, config: RunConfig) -> TrainingWorker:
    """A worker with the critic of a folder, or with a policy's weights and a fresh head, its optimizer fresh."""
    worker = make("value_model", {"path": str(model)}, config, config.critic.optim)
    worker.set_loss_fn(partial(value_loss, config.critic.cliprange_value))
    return worker


def value_loss(
    clip: float, model_output: Mapping[str, Any], data: TensorDict, dp_group: Any = None
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """Loss of a micro-batch and its metrics: half the squared error of the return a trained token, where the value may
    not move further than `clip` from the old one to lower it (PPO, arXiv 1707.06347, as in veRL's
    `compute_value_loss`)."""
    now = no_padding_2_padding(model_output["values"], data)
    columns = data.select("values", "returns", "response_mask").to_padded_tensor()
    mask = columns["response_mask"].bool()
    loss, cut = compute_value_loss(
        vpreds=now,
        returns=columns["returns"],
        values=columns["values"],
        response_mask=mask,
        cliprange_value=clip,
        loss_agg_mode="token-mean",
        dp_size=data["dp_size"],
        batch_num_tokens=data["batch_num_tokens"],
    )
    share = float(mask.sum()) * data["dp_size"] / data["batch_num_tokens"]
    mean = float((now.detach() * mask).sum()) * data["dp_size"] / data["batch_num_tokens"]
    return loss, {
        "critic/vf_loss": added_up(loss),
        "critic/vf_clipfrac": added_up(float(cut) * share),
        "critic/vpred_mean": added_up(mean),
    }


def estimate(
    rows: Sequence[Row], values: Sequence[torch.Tensor], algorithm: Algorithm
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Advantages and returns, a tensor (R) a row, 0 where nothing is trained; `values` (R) a row are the critic's.

    GAE (arXiv 1506.02438) over each row's trained tokens, the episode's reward at the last one; advantages are whitened
    over all trained tokens of the iteration, as in veRL's `compute_gae_advantage_return`.
    """

    def padded(tensors: Sequence[Any]) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(list(tensors), batch_first=True)

    mask = padded([torch.from_numpy(r.mask).float() for r in rows])
    rewards = torch.zeros_like(mask)
    for i, row in enumerate(rows):
        # A row ends with a trained token.
        rewards[i, len(row.mask) - 1] = row.reward
    advantages, returns = get_adv_estimator_fn("gae")(
        token_level_rewards=rewards,
        values=padded(values),
        response_mask=mask,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
    )
    sizes = [len(r.mask) for r in rows]
    return tuple(  # type: ignore[return-value]
        [(t[i, :n] * mask[i, :n]).float() for i, n in enumerate(sizes)] for t in (advantages, returns)
    )


def save(worker: TrainingWorker, state: Path | None, where: str | None, iteration: int) -> None:
    """Write the critic below a state's folder (a collective call): `where` on every process, `state` on the first."""
    from safetensors.torch import save_file

    worker.save_checkpoint(None if where is None else f"{where}/{CRITIC}", global_step=iteration)
    full = weights(worker, keep=state is not None)
    if state is not None:
        save_file(full, state / CRITIC / "model.safetensors", metadata={"format": "pt"})
        worker.engine.module.config.save_pretrained(state / CRITIC)
