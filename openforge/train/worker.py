"""veRL's TrainingWorker for one process of the job, its batches, and what it returns, in plain types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import (
    FSDPActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding, response_from_nested

from openforge.config import RunConfig
from openforge.train.rows import Row

Columns = Mapping[str, Sequence[torch.Tensor]]


def build(model: Path, config: RunConfig) -> TrainingWorker:
    """A worker with the model of a Hugging Face folder loaded, its optimizer fresh, and PPO's loss set."""
    actor, cpu = config.actor, config.trainer.device == "cpu"
    compute = "fp32" if cpu else "bf16"
    engine = FSDPEngineConfig(
        strategy="fsdp2",
        model_dtype="fp32",
        mixed_precision={"param_dtype": compute, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        use_torch_compile=not cpu,
        use_dynamic_bsz=True,
        max_token_len_per_gpu=actor.ppo_max_token_len_per_gpu,
        infer_max_token_len_per_gpu=actor.ppo_max_token_len_per_gpu,
        # On CPU nothing is gained by giving memory back between forward and backward.
        reshard_after_forward=not cpu,
    )
    optimizer = FSDPOptimizerConfig(
        lr=actor.optim.lr,
        weight_decay=actor.optim.weight_decay,
        betas=actor.optim.betas,
        clip_grad=actor.optim.clip_grad,
        lr_scheduler_type="constant",
        lr_warmup_steps=0,
        # One pass over the weights a step instead of a dozen.
        override_optimizer_config={"fused": True},
    )
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(
                path=str(model),
                # The tokenizer's files are copied as they are; nothing here tokenises.
                load_tokenizer=False,
                use_remove_padding=True,
                enable_gradient_checkpointing=not cpu,
                override_config={"attn_implementation": "sdpa" if cpu else "flash_attention_2"},
            ),
            engine_config=engine,
            optimizer_config=optimizer,
            # Weights are chained through the checkpoint's fp32 folder, which is exact.
            checkpoint_config=CheckpointConfig(
                save_contents=["optimizer", "extra"], load_contents=["optimizer", "extra"]
            ),
            profiler_config=None,
        )
    )
    worker.reset()
    worker.set_loss_fn(partial(_loss, config=_actor_config(config, engine, optimizer)))
    return worker


def _actor_config(config: RunConfig, engine: FSDPEngineConfig, optimizer: FSDPOptimizerConfig) -> FSDPActorConfig:
    actor = config.actor
    return FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        use_dynamic_bsz=True,
        ppo_micro_batch_size_per_gpu=1,
        ppo_mini_batch_size=actor.ppo_mini_batch_size,
        ppo_epochs=actor.ppo_epochs,
        clip_ratio=actor.clip_ratio_low,
        clip_ratio_low=actor.clip_ratio_low,
        clip_ratio_high=actor.clip_ratio_high,
        clip_ratio_c=actor.clip_ratio_c,
        loss_agg_mode=actor.loss_agg_mode,
        entropy_coeff=actor.entropy_coeff,
        fsdp_config=engine,
        optim=optimizer,
    )


def _loss(
    config: FSDPActorConfig, model_output: Mapping[str, Any], data: TensorDict, dp_group: Any = None
) -> tuple[torch.Tensor, dict[str, Any]]:
    """veRL's `ppo_loss`, with two figures on how far trainer and sampler are apart."""
    loss, metrics = ppo_loss(config, model_output, data, dp_group)
    with torch.no_grad():
        mask = data["response_mask"].to_padded_tensor(0).bool()
        now = no_padding_2_padding(model_output["log_probs"], data)
        apart = ((now - data["rollout_log_probs"].to_padded_tensor(0.0)).abs() * mask).double()
        metrics["diff_sum"], metrics["diff_max"] = float(apart.sum()), float(apart.max())
    return loss, metrics


def resume(worker: TrainingWorker, state: Path, config: RunConfig) -> None:
    """Load optimizer, scheduler and RNG; the configuration's optimizer settings win over the saved ones."""
    worker.load_checkpoint(str(state))
    optim = config.actor.optim
    for group in worker.engine.optimizer.param_groups:
        group.update(lr=optim.lr, initial_lr=optim.lr, weight_decay=optim.weight_decay, betas=optim.betas)
    scheduler = worker.engine.lr_scheduler
    scheduler.base_lrs = [optim.lr] * len(scheduler.base_lrs)


def weights(worker: TrainingWorker) -> dict[str, torch.Tensor]:
    """Full weights by name, on every process (a collective call), in the trainer's dtype."""
    full = {}
    for name, value in worker.engine.module.state_dict().items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        full[name] = whole.detach().cpu().contiguous()
    return full


def batch(rows: Sequence[Row], columns: Columns, pad: int, **settings: Any) -> TensorDict:
    """veRL's TensorDict of rows; the last `pad` rows only even out the ranks: nothing of them is trained.

    `columns` are further tensors over the responses, a list a column in the rows' order.
    """
    real = len(rows) - pad
    masks = [torch.from_numpy(r.mask if i < real else r.mask * 0) for i, r in enumerate(rows)]
    tensors = {
        "input_ids": _nested([torch.from_numpy(r.token_ids) for r in rows]),
        "position_ids": _nested([torch.arange(len(r.token_ids)) for r in rows]),
        "prompts": _nested([torch.from_numpy(r.token_ids[: r.prompt_length]) for r in rows]),
        "responses": _nested([torch.from_numpy(r.token_ids[r.prompt_length :]) for r in rows]),
        "response_mask": _nested(masks),
        "loss_mask": _nested(masks),
        "rollout_log_probs": _nested([torch.from_numpy(r.recorded) for r in rows]),
        **{name: _nested(list(values)) for name, values in columns.items()},
    }
    return tu.get_tensordict(tensors, {"pad_token_id": 0, **settings})


def _nested(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)


def log_probs(worker: TrainingWorker, data: TensorDict) -> list[torch.Tensor]:
    """Log-probs of the responses of `data` under the worker's weights, a tensor (R) a row."""
    tu.assign_non_tensor(
        data,
        compute_loss=False,
        calculate_entropy=False,
        global_token_num=NonTensorData(data["input_ids"].offsets().diff().tolist()),
    )
    out = worker.infer_batch(data)
    return [t.clone() for t in response_from_nested(tu.get(out, "log_probs"), data["response_mask"]).unbind()]


def step(worker: TrainingWorker, data: TensorDict, lengths: Sequence[int], episodes: float) -> dict[str, float]:
    """One optimizer step on this process's share of a mini-batch; its metrics over all processes.

    `lengths` are those of all processes' rows, `episodes` the sum of the real rows' weights: what veRL
    divides a sum over sequences by (`global_batch_size`), so that an episode counts once however many rows it
    has.
    """
    tu.assign_non_tensor(
        data,
        compute_loss=True,
        update_lr_scheduler=True,
        global_token_num=NonTensorData(list(lengths)),
        global_batch_size=episodes,
    )
    raw = dict(tu.get(worker.train_batch(data), "metrics"))
    keep = {
        k: v for k, v in raw.items() if k in ("loss", "grad_norm", "lr", "diff_sum", "diff_max") or k[:6] == "actor/"
    }
    return {k: _number(k, v) for k, v in keep.items()}


def _number(name: str, value: Any) -> float:
    """One metric over micro-batches and processes: veRL's own aggregation, ours for the two figures of
    `_loss`."""
    if not isinstance(value, list):
        return float(value)
    if hasattr(value[0], "aggregate"):
        return float(type(value[0]).aggregate_dp(value))
    flat = [float(x) for part in value for x in (part if isinstance(part, list) else [part])]
    return {"diff_sum": sum(flat), "diff_max": max(flat)}.get(name, sum(flat) / len(flat))
