"""Keys of training: shaping, credit (docs/credit.md), the policy's update (docs/algorithms.md) and how it is run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from openforge.config_reading import Above0, NonNegative, Positive, Section, Seed, Share, Text, only_if
from openforge.samples.credit import ESTIMATORS

if TYPE_CHECKING:
    EstimatorName = str
else:
    EstimatorName = Literal[tuple(ESTIMATORS)]


class OverlongBuffer(Section):
    enable: bool = Field(default=False, description="Whether long episodes are punished.")
    len: Positive | None = Field(
        default=None,
        description="Tokens before max_resp_len over which the punishment grows.",
        json_schema_extra=only_if(enable=True),
    )
    penalty_factor: Annotated[float, Field(gt=0)] = Field(
        default=1.0, description="The punishment at max_resp_len and beyond.", json_schema_extra=only_if(enable=True)
    )


class RewardKwargs(Section):
    max_resp_len: Positive | None = Field(
        default=None, description="Trained tokens of an episode from which on it is punished in full."
    )
    overlong_buffer_cfg: OverlongBuffer = Field(
        default_factory=OverlongBuffer, description="DAPO's soft overlong punishment, added to the reward."
    )


class Reward(Section):
    """What a verdict is worth in training (veRL's `reward`)."""

    claw: Literal["pass", "minus_floor", "score"] = Field(
        default="pass",
        description="Reward of a verdict with ClawEval's dimensions: 1 if passed, else 0; its task_score above that of "
        "doing nothing, max(0, (s - 0.2) / 0.8); or task_score as it is, which pays 0.2 for nothing.",
    )
    reward_kwargs: RewardKwargs = Field(default_factory=RewardKwargs, description="As of veRL's reward manager `dapo`.")


class RolloutCorrection(Section):
    bypass_mode: bool = Field(
        default=False,
        description="Take the recorded logprobs as old logprobs instead of recomputing them with checkpoint k-1.",
    )
    rollout_is_threshold: Above0 = Field(
        default=2.0,
        description="Bound of a token's importance weight, the recomputed old probability over the recorded one.",
        json_schema_extra=only_if(bypass_mode=False),
    )


class FilterGroups(Section):
    enable: bool = Field(default=False, description="Whether a reserve group takes the place of one without variance.")
    metric: Literal["reward", "acc"] = Field(
        default="reward",
        description="What a group's episodes must differ in: the reward before shaping, or whether they passed.",
        json_schema_extra=only_if(enable=True),
    )
    max_num_gen_batches: Annotated[int, Field(ge=2)] = Field(
        default=4,
        description="Batches an iteration at most: all but the first are reserve groups, run only where needed.",
        json_schema_extra=only_if(enable=True),
    )


class Algorithm(Section):
    """Credit (veRL's `algorithm`)."""

    adv_estimator: EstimatorName = Field(default="grpo", description="Advantage estimator.")
    norm_adv_by_std_in_grpo: bool = Field(
        default=True,
        description="Divide a group's advantages by its standard deviation.",
        json_schema_extra=only_if(adv_estimator=[n for n, e in ESTIMATORS.items() if e.by_std]),
    )
    gamma: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0,
        description="Discount a call: the t-th of an episode's T trained calls has gamma^(T-t) times its advantage; "
        "gae: discount a trained token.",
        json_schema_extra=only_if(
            adv_estimator=[n for n, e in ESTIMATORS.items() if e.critic or (e.formula and e.within != "episode")]
        ),
    )
    lam: Share = Field(
        default=1.0,
        description="GAE's lambda, a trained token.",
        json_schema_extra=only_if(adv_estimator=[n for n, e in ESTIMATORS.items() if e.critic]),
    )
    filter_groups: FilterGroups = Field(default_factory=FilterGroups, description="DAPO's dynamic sampling.")
    rollout_correction: RolloutCorrection = Field(
        default_factory=RolloutCorrection, description="Where old logprobs come from."
    )


class Optim(Section):
    lr: Above0 = Field(default=1e-6, description="Learning rate, the highest one of the schedule.")
    lr_scheduler_type: Literal["constant", "cosine"] = Field(
        default="constant", description="Learning rate after the warm-up."
    )
    lr_warmup_steps: NonNegative = Field(
        default=0, description="Optimizer steps of the run over which the rate rises from 0, where the first one is."
    )
    total_training_steps: Positive | None = Field(
        default=None,
        description="Horizon of the schedule in optimizer steps of the run, required; afterwards the rate stays.",
        json_schema_extra=only_if(lr_scheduler_type="cosine"),
    )
    min_lr_ratio: Share = Field(
        default=0.0,
        description="Rate at the horizon, as a share of lr.",
        json_schema_extra=only_if(lr_scheduler_type="cosine"),
    )
    weight_decay: Annotated[float, Field(ge=0)] = Field(default=0.01, description="AdamW's weight decay.")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=(0.9, 0.999), description="AdamW's betas.", strict=False
    )
    clip_grad: Above0 = Field(default=1.0, description="Gradient norm clip.")


class PolicyLoss(Section):
    """Which of veRL's policy losses (veRL's `actor.policy_loss`)."""

    loss_mode: Literal["vanilla", "gspo", "sapo", "gpg", "cispo", "dro", "dppo_tv", "dppo_kl"] = Field(
        default="vanilla", description="Policy loss, by veRL's name; `vanilla` is PPO's clipped one."
    )
    dro_beta: Above0 | None = Field(
        default=None,
        description="Weight of the squared log-ratio, required.",
        json_schema_extra=only_if(loss_mode="dro"),
    )


class Model(Section):
    """How the policy is trained (veRL's `actor_rollout_ref.model`)."""

    lora_rank: NonNegative = Field(default=0, description="Rank of LoRA's adapters; 0 trains all weights.")
    lora_alpha: Positive = Field(default=16, description="LoRA: adapters count lora_alpha / lora_rank times.")
    target_modules: Annotated[tuple[Text, ...], Field(strict=False)] | Text = Field(
        default="all-linear",
        description="LoRA: names of linear layers, a list or one pattern; `all-linear` is all but the head.",
    )
    enable_gradient_checkpointing: bool | None = Field(
        default=None, description="Compute activations anew in the backward pass; NULL does on a GPU only."
    )


class FSDP(Section):
    """FSDP2 (veRL's `actor.fsdp_config`)."""

    param_offload: bool = Field(default=False, description="Keep weights on the CPU while they are not used.")
    optimizer_offload: bool = Field(default=False, description="Keep the optimizer on the CPU between its steps.")
    offload_policy: bool = Field(
        default=False, description="FSDP2's own: weights, gradients and optimizer live on the CPU."
    )
    reshard_after_forward: bool | None = Field(
        default=None, description="Give up whole weights between forward and backward; NULL does on a GPU only."
    )
    fsdp_size: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Processes that share one copy of the weights; NULL is all of them."
    )
    ulysses_sequence_parallel_size: Positive = Field(
        default=1, description="Processes that share a row's tokens, so that rows may be as many times longer."
    )


class Megatron(Section):
    """Megatron-Core (veRL's `actor.megatron`)."""

    tensor_model_parallel_size: Positive = Field(default=1, description="Processes that share each layer (TP).")
    pipeline_model_parallel_size: Positive = Field(default=1, description="Stages that the layers are cut into (PP).")
    context_parallel_size: Positive = Field(
        default=1, description="Processes that share a row's tokens (CP), so that rows may be as many times longer."
    )
    expert_model_parallel_size: Positive = Field(
        default=1, description="Processes that share the experts of a mixture (EP)."
    )
    expert_tensor_parallel_size: Positive | None = Field(
        default=None, description="Processes that share each expert; NULL is as TP."
    )
    sequence_parallel: bool = Field(default=True, description="With TP: norms and dropout on a share of the tokens.")
    use_distributed_optimizer: bool = Field(default=True, description="Share the optimizer over the replicas.")
    param_offload: bool = Field(default=False, description="Keep weights on the CPU while they are not used.")
    optimizer_offload: bool = Field(default=False, description="Keep the optimizer on the CPU between its steps.")
    override_transformer_config: dict[str, bool | int | float | str] = Field(
        default={}, description="Fields of Megatron's TransformerConfig, e.g. `moe_router_dtype: fp32`."
    )


class Actor(Section):
    """The policy's update (veRL's `actor_rollout_ref.actor`)."""

    strategy: Literal["fsdp2", "megatron"] = Field(
        default="fsdp2", description="Engine that shards the model; megatron on GPUs only."
    )
    fsdp_config: FSDP = Field(
        default_factory=FSDP, description="Sharding by FSDP2.", json_schema_extra=only_if(strategy="fsdp2")
    )
    megatron: Megatron = Field(
        default_factory=Megatron, description="Sharding by Megatron.", json_schema_extra=only_if(strategy="megatron")
    )
    optim: Optim = Field(default_factory=Optim, description="Optimizer.")
    model: Model = Field(default_factory=Model, description="How the policy is trained.")
    ppo_mini_batch_size: Positive = Field(default=64, description="Training rows an optimizer step.")
    ppo_epochs: Positive = Field(default=1, description="Passes over an iteration's rows.")
    use_dynamic_bsz: bool = Field(
        default=True, description="Cut micro-batches by ppo_max_token_len_per_gpu, else by rows."
    )
    ppo_max_token_len_per_gpu: Positive = Field(default=16384, description="Tokens of a micro-batch; a row must fit.")
    ppo_micro_batch_size_per_gpu: Positive | None = Field(
        default=None, description="Rows of a micro-batch, required.", json_schema_extra=only_if(use_dynamic_bsz=False)
    )
    policy_loss: PolicyLoss = Field(default_factory=PolicyLoss, description="Policy loss.")
    clip_ratio: Above0 = Field(default=0.2, description="Clip of the ratio where low or high are not given.")
    clip_ratio_low: Above0 | None = Field(default=None, description="Lower clip: the ratio is kept above 1 - it.")
    clip_ratio_high: Above0 | None = Field(default=None, description="Upper clip: the ratio is kept below 1 + it.")
    clip_ratio_c: Annotated[float, Field(gt=1)] = Field(
        default=3.0, description="Dual clip of the ratio for negative advantages; dppo: bound of its weights."
    )
    tau_pos: Above0 = Field(default=1.0, description="sapo: temperature of the gate for positive advantages.")
    tau_neg: Above0 = Field(default=1.05, description="sapo: temperature of the gate for negative advantages.")
    loss_agg_mode: Literal[
        "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    ] = Field(default="token-mean", description="How token losses are added up; a sequence is an episode.")
    loss_scale_factor: Positive | None = Field(
        default=None,
        description="What the sum of tokens is divided by, required.",
        json_schema_extra=only_if(loss_agg_mode="seq-mean-token-sum-norm"),
    )
    entropy_coeff: float = Field(default=0.0, description="Entropy bonus.")
    use_kl_loss: bool = Field(default=False, description="Add the KL divergence from checkpoint 0 to the loss.")
    kl_loss_coef: Above0 = Field(
        default=0.001, description="Weight of the KL divergence.", json_schema_extra=only_if(use_kl_loss=True)
    )
    kl_loss_type: Literal["kl", "abs", "mse", "low_var_kl", "kl+", "abs+", "low_var_kl+"] = Field(
        default="low_var_kl",
        description="Its estimator (k1, absolute, k2, k3); with + its gradient is k2's, which is that of the KL.",
        json_schema_extra=only_if(use_kl_loss=True),
    )
    use_shared_prefix: bool = Field(
        default=True, description="Compute a prefix that several rows share once (CPU; exact to rounding)."
    )
    data_loader_seed: Seed = Field(default=1, description="Seed of the mini-batch permutation.")

    @property
    def row_tokens(self) -> int:
        """Tokens that a row may have: those of a micro-batch, on all processes that share a row."""
        shared = self.megatron.context_parallel_size * self.fsdp_config.ulysses_sequence_parallel_size
        # Only the engine that is used has keys.
        return self.ppo_max_token_len_per_gpu * (shared if self.use_dynamic_bsz else 1)


def _critic_optim() -> Optim:
    return Optim(lr=1e-5)


class Critic(Section):
    """PPO's critic (veRL's `critic`); its mini-batches are the actor's."""

    optim: Optim = Field(default_factory=_critic_optim, description="Optimizer; without lr the critic's is 1e-5.")
    cliprange_value: Above0 = Field(default=0.5, description="How far a value may move to lower its loss.")


class KeepCheckpoints(Section):
    """Which weights stay; besides these, checkpoint 0, the newest one, and what is still to be read."""

    last: Positive | None = Field(default=None, description="The newest so many.")
    every: Positive | None = Field(default=None, description="Every so many iterations one.")
    best: Positive | None = Field(
        default=None, description="So many with the best pass@1 of the first cell that has at: every."
    )


class Trainer(Section):
    """The training job (veRL's `trainer`)."""

    device: Literal["cpu", "gpu"] = Field(default="cpu", description="Which software environment and engine settings.")
    nnodes: Positive = Field(default=1, description="Nodes; several are those of a SLURM job.")
    nproc_per_node: Positive = Field(default=1, description="Processes a node that torchrun starts; one a GPU.")
    threads: Positive = Field(default=2, description="Threads a process.", json_schema_extra=only_if(device="cpu"))
    max_actor_ckpt_to_keep: Positive = Field(
        default=1, description="Optimizer states kept besides the newest; older ones become tombstones."
    )
    keep_checkpoints: KeepCheckpoints | None = Field(
        default=None, description="Weights kept, the union of what is named; all of them without it."
    )

    @property
    def world_size(self) -> int:
        """Processes on all nodes."""
        return self.nnodes * self.nproc_per_node
