"""veRL's configurations of an engine, its optimizer and its checkpoints, made from ours: FSDP2 or Megatron."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from verl.trainer.config import CheckpointConfig
from verl.workers.config import (
    ActorConfig,
    EngineConfig,
    FSDPActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    McoreActorConfig,
    McoreEngineConfig,
    McoreOptimizerConfig,
    OptimizerConfig,
    PolicyLossConfig,
)

from openforge.config import RunConfig
from openforge.config_training import Optim


def engine_config(config: RunConfig) -> EngineConfig:
    """How the model is sharded and its micro-batches are cut, for either engine."""
    actor = config.actor
    common = {
        "use_dynamic_bsz": actor.use_dynamic_bsz,
        "micro_batch_size_per_gpu": actor.ppo_micro_batch_size_per_gpu,
        "infer_micro_batch_size_per_gpu": actor.ppo_micro_batch_size_per_gpu,
        "max_token_len_per_gpu": actor.ppo_max_token_len_per_gpu,
        "infer_max_token_len_per_gpu": actor.ppo_max_token_len_per_gpu,
    }
    return _megatron(config, common) if actor.strategy == "megatron" else _fsdp(config, common)


def checkpointing(config: RunConfig) -> bool:
    """Whether activations are computed anew in the backward pass."""
    asked = config.actor.model.enable_gradient_checkpointing
    return config.trainer.device == "gpu" if asked is None else asked


def model_overrides(config: RunConfig, model: Path) -> dict[str, Any]:
    """What veRL lays over the model's own configuration.

    mbridge reads `rope_theta`, which transformers 5 has moved into `rope_parameters`.
    """
    overrides: dict[str, Any] = {
        "attn_implementation": "sdpa" if config.trainer.device == "cpu" else "flash_attention_2"
    }
    if config.actor.strategy == "megatron":
        found = json.loads((model / "config.json").read_text())
        overrides["rope_theta"] = found.get("rope_theta") or found["rope_parameters"]["rope_theta"]
    return overrides


def _fsdp(config: RunConfig, common: dict[str, Any]) -> FSDPEngineConfig:
    fsdp, cpu = config.actor.fsdp_config, config.trainer.device == "cpu"
    compute = "fp32" if cpu else "bf16"
    return FSDPEngineConfig(
        strategy="fsdp2",
        model_dtype="fp32",
        mixed_precision={"param_dtype": compute, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        use_torch_compile=not cpu,
        param_offload=fsdp.param_offload,
        optimizer_offload=fsdp.optimizer_offload,
        offload_policy=fsdp.offload_policy,
        # On CPU nothing is gained by giving memory back between forward and backward.
        reshard_after_forward=not cpu if fsdp.reshard_after_forward is None else fsdp.reshard_after_forward,
        fsdp_size=fsdp.fsdp_size or -1,
        ulysses_sequence_parallel_size=fsdp.ulysses_sequence_parallel_size,
        **common,
    )


def _megatron(config: RunConfig, common: dict[str, Any]) -> McoreEngineConfig:
    megatron = config.actor.megatron
    # Megatron's own defaults would keep every activation. What the configuration names wins.
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    override = {**(recompute if checkpointing(config) else {}), **megatron.override_transformer_config}
    # Megatron-Bridge, veRL's default, is for other versions of CPython or transformers than veRL's and ours.
    return McoreEngineConfig(
        tensor_model_parallel_size=megatron.tensor_model_parallel_size,
        pipeline_model_parallel_size=megatron.pipeline_model_parallel_size,
        context_parallel_size=megatron.context_parallel_size,
        expert_model_parallel_size=megatron.expert_model_parallel_size,
        expert_tensor_parallel_size=megatron.expert_tensor_parallel_size,
        sequence_parallel=megatron.sequence_parallel,
        use_distributed_optimizer=megatron.use_distributed_optimizer,
        param_offload=megatron.param_offload,
        optimizer_offload=megatron.optimizer_offload,
        override_transformer_config=override,
        vanilla_mbridge=True,
        **common,
    )


def optimizer_config(config: RunConfig, optim: Optim) -> OptimizerConfig:
    """AdamW and its schedule: from 0 up over the warm-up, then constant or half a cosine, then as it is."""
    common = {
        "lr": optim.lr,
        "weight_decay": optim.weight_decay,
        "betas": optim.betas,
        "clip_grad": optim.clip_grad,
        "lr_warmup_steps": optim.lr_warmup_steps,
    }
    if config.actor.strategy == "fsdp2":
        return FSDPOptimizerConfig(
            lr_scheduler_type=optim.lr_scheduler_type,
            total_training_steps=optim.total_training_steps or -1,
            min_lr_ratio=optim.min_lr_ratio,
            # One pass over the weights a step instead of a dozen.
            override_optimizer_config={"fused": True},
            **common,
        )
    return McoreOptimizerConfig(
        lr_decay_style=optim.lr_scheduler_type,
        # A constant rate has no horizon, but Megatron wants one beyond the warm-up.
        total_training_steps=optim.total_training_steps or optim.lr_warmup_steps + 1,
        min_lr=optim.min_lr_ratio * optim.lr,
        # veRL does not hand `betas` on to Megatron.
        override_optimizer_config={"adam_beta1": optim.betas[0], "adam_beta2": optim.betas[1]},
        **common,
    )


def checkpoint_config(config: RunConfig) -> CheckpointConfig:
    """What the state holds. FSDP2's weights are chained through the checkpoint's fp32 folder, which is exact;
    Megatron's are bf16 there, and whole with the optimizer's fp32 copies only."""
    contents = ["optimizer", "extra"] if config.actor.strategy == "fsdp2" else ["model", "optimizer", "extra"]
    return CheckpointConfig(save_contents=contents, load_contents=contents)


def actor_config(config: RunConfig, engine: EngineConfig, optimizer: OptimizerConfig) -> ActorConfig:
    """What veRL's policy losses read."""
    actor = config.actor
    common = {
        "strategy": actor.strategy,
        "rollout_n": 1,
        "use_dynamic_bsz": True,
        "ppo_micro_batch_size_per_gpu": 1,
        "ppo_mini_batch_size": actor.ppo_mini_batch_size,
        "ppo_epochs": actor.ppo_epochs,
        "policy_loss": PolicyLossConfig(loss_mode=actor.policy_loss.loss_mode, dro_beta=actor.policy_loss.dro_beta),
        "clip_ratio": actor.clip_ratio,
        "clip_ratio_low": actor.clip_ratio_low,
        "clip_ratio_high": actor.clip_ratio_high,
        "clip_ratio_c": actor.clip_ratio_c,
        "tau_pos": actor.tau_pos,
        "tau_neg": actor.tau_neg,
        "loss_agg_mode": actor.loss_agg_mode,
        "loss_scale_factor": actor.loss_scale_factor,
        "entropy_coeff": actor.entropy_coeff,
        "use_kl_loss": actor.use_kl_loss,
        "kl_loss_coef": actor.kl_loss_coef,
        "kl_loss_type": actor.kl_loss_type,
        "optim": optimizer,
    }
    if actor.strategy == "megatron":
        return McoreActorConfig(megatron=engine, **common)
    return FSDPActorConfig(fsdp_config=engine, **common)
