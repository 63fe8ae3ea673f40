"""veRL's TrainingWorker for one process of the job, its batches, and what it returns, in plain types."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import NonTensorData, TensorDict
from transformers import AutoConfig
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric
from verl.workers.config import HFModelConfig, TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.padding import response_from_nested

from openforge.config import RunConfig
from openforge.config_training import Optim
from openforge.train.engines import (
    actor_config,
    checkpoint_config,
    checkpointing,
    engine_config,
    model_overrides,
    optimizer_config,
)
from openforge.train.job import TrainError
from openforge.train.losses import policy_loss
from openforge.train.rows import Row

if TYPE_CHECKING:
    from openforge.train.images import Images

# Where padding is removed, veRL gives them an attention that is flash attention's; and see _whole_to_merged.
_QWEN2_VL = ("qwen2_vl", "qwen2_5_vl")

Columns = Mapping[str, Sequence[torch.Tensor]]


def build(model: Path, config: RunConfig, adapter: Path | None = None, reference: bool = False) -> TrainingWorker:
    """A worker with the model of a Hugging Face folder loaded, its optimizer fresh, and the policy's loss set.

    With LoRA the model is what adapters are on: `adapter` holds those so far, else they are fresh and change nothing
    yet. A `reference` has none.
    """
    actor = config.actor
    options = {
        "path": str(model),
        "lora_rank": 0 if reference else actor.model.lora_rank,
        "lora_alpha": actor.model.lora_alpha,
        "target_modules": _modules(actor.model.target_modules),
        "lora_adapter_path": None if adapter is None else str(adapter),
    }
    worker = make("language_model", options, config, actor.optim)
    worker.set_loss_fn(partial(policy_loss, config=actor_config(config, worker.engine_config, worker.optimizer_config)))
    return worker


def make(kind: str, options: dict[str, Any], config: RunConfig, optim: Optim) -> TrainingWorker:
    """A worker of veRL's model type `kind`, without a loss; `options` are those of its HFModelConfig."""
    # Fresh adapters and a critic's fresh head are drawn.
    torch.manual_seed(config.seed)
    cpu = config.trainer.device == "cpu"
    qwen2_vl = AutoConfig.from_pretrained(options["path"]).model_type in _QWEN2_VL
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type=kind,
            model_config=HFModelConfig(
                # The tokenizer's files are copied as they are; nothing here tokenises.
                load_tokenizer=False,
                use_remove_padding=not (cpu and qwen2_vl),
                enable_gradient_checkpointing=checkpointing(config),
                override_config=model_overrides(config, Path(options["path"])),
                **options,
            ),
            engine_config=engine_config(config),
            optimizer_config=optimizer_config(config, optim),
            checkpoint_config=checkpoint_config(config),
            profiler_config=None,
        )
    )
    worker.reset()
    if qwen2_vl:
        _whole_to_merged(worker.engine.module)
    if config.actor.strategy == "fsdp2":
        _hold_after(worker.engine.lr_scheduler, optim)
    return worker


def _whole_to_merged(module: torch.nn.Module) -> None:
    """Let a vision tower return the merged patches alone: where a micro-batch shows nothing, veRL's forward of Qwen2-VL
    takes the mean of what it returns, and transformers 5 returns more than a tensor."""
    for name, part in module.named_modules():
        if name.rpartition(".")[2] == "visual":
            part.register_forward_hook(lambda _, __, output: getattr(output, "pooler_output", output))


def _modules(targets: str | tuple[str, ...]) -> str | list[str]:
    return targets if isinstance(targets, str) else list(targets)


def _hold_after(scheduler: Any, optim: Optim) -> None:
    """Beyond its horizon the rate stays: veRL's cosine would rise again, and a run may go on at will."""
    horizon = optim.total_training_steps
    if horizon is not None:
        scheduler.lr_lambdas = [_held(f, horizon) for f in scheduler.lr_lambdas]


def _held(schedule: Callable[[int], float], horizon: int) -> Callable[[int], float]:
    return lambda step: schedule(min(step, horizon))


def resume(worker: TrainingWorker, state: Path, optim: Optim) -> None:
    """Load what the state holds; the configuration's optimizer and schedule win over the saved ones, from the step on
    that was reached."""
    worker.load_checkpoint(str(state))
    scheduler = worker.engine.lr_scheduler
    if hasattr(scheduler, "lr_lambdas"):
        scheduler.base_lrs = [optim.lr] * len(scheduler.base_lrs)
        rates = [optim.lr * f(scheduler.last_epoch) for f in scheduler.lr_lambdas]
        for group, rate in zip(worker.engine.optimizer.param_groups, rates, strict=True):
            group.update(lr=rate, initial_lr=optim.lr)
    # Megatron's scheduler has taken the configuration's rates itself, at the step that was reached.
    for group in worker.engine.optimizer.param_groups:
        group.update(weight_decay=optim.weight_decay, betas=optim.betas)


def weights(worker: TrainingWorker, keep: bool) -> dict[str, torch.Tensor]:
    """Full weights by their names in a Hugging Face folder, in the trainer's dtype (a collective call); empty where
    `keep` is false, so that the model is once in a node's memory."""
    full = {}
    for name, value in _named(worker):
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        if not bool(torch.isfinite(whole).all()):
            raise TrainError(
                f"the last step left {name} without a number; nothing was written, the checkpoint before stays: lower "
                "actor.optim.lr"
            )
        if keep:
            full[name] = whole.detach().cpu().contiguous()
    return full


def _named(worker: TrainingWorker) -> Iterable[tuple[str, torch.Tensor]]:
    if worker.engine_config.strategy == "megatron":
        # Each tensor is put together from all processes, under the name that the bridge knows.
        named: Iterable[tuple[str, torch.Tensor]] = worker.engine.get_per_tensor_param()[0]
        return named
    state: Mapping[str, torch.Tensor] = worker.engine.module.state_dict()
    return state.items()


def batch(rows: Sequence[Row], columns: Columns, pad: int, images: Images | None = None, **settings: Any) -> TensorDict:
    """veRL's TensorDict of rows; the last `pad` rows only even out the ranks: nothing of them is trained.

    `columns` are further tensors over the responses, a list a column in the rows' order; `images` those of a model that
    sees, whose positions have three dimensions whether a row shows something or not.
    """
    real = len(rows) - pad
    masks = [torch.from_numpy(r.mask if i < real else r.mask * 0) for i, r in enumerate(rows)]
    tensors = {
        "input_ids": _nested([torch.from_numpy(r.token_ids) for r in rows]),
        "position_ids": _nested([torch.arange(len(r.token_ids)) for r in rows])
        if images is None
        else tu.nested_tensor_from_tensor_list([images.positions(r) for r in rows], ragged_idx=2),
        "prompts": _nested([torch.from_numpy(r.token_ids[: r.prompt_length]) for r in rows]),
        "responses": _nested([torch.from_numpy(r.token_ids[r.prompt_length :]) for r in rows]),
        "response_mask": _nested(masks),
        "loss_mask": _nested(masks),
        "rollout_log_probs": _nested([torch.from_numpy(r.recorded) for r in rows]),
        **{name: _nested(list(values)) for name, values in columns.items()},
    }
    data = tu.get_tensordict(tensors, {"pad_token_id": 0, **settings})
    if images is not None:
        tu.assign_non_tensor_stack(data, "multi_modal_inputs", [images.patches(r) for r in rows])
    return data


def _nested(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)


def infer(worker: TrainingWorker, data: TensorDict, output: str) -> list[torch.Tensor] | None:
    """What the worker's weights give for the responses of `data`, a tensor (R) a row: `log_probs`, or `values` of the
    state before each token. None on a process that holds no outputs of its replica."""
    tu.assign_non_tensor(
        data,
        compute_loss=False,
        calculate_entropy=False,
        global_token_num=NonTensorData(data["input_ids"].offsets().diff().tolist()),
    )
    out = worker.infer_batch(data)
    if out is None:
        return None
    return [t.clone() for t in response_from_nested(tu.get(out, output), data["response_mask"]).unbind()]


def step(worker: TrainingWorker, data: TensorDict, lengths: Sequence[int], episodes: float) -> dict[str, float] | None:
    """One optimizer step on this replica's share of a mini-batch; its metrics over all replicas, None on a process that
    holds no outputs of its replica.

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
    rate = float(worker.engine.optimizer.param_groups[0]["lr"])
    out = worker.train_batch(data)
    if out is None:
        return None
    raw = dict(tu.get(out, "metrics"))
    found = {k: float(Metric.aggregate_dp(v)) for k, v in raw.items() if isinstance(v, list) and _is_metric(v[0])}
    # veRL's own `lr` is that of the next step.
    return found | {"loss": float(raw["loss"]), "grad_norm": float(raw["grad_norm"]), "lr": rate}


def replica(worker: TrainingWorker) -> tuple[int, int]:
    """Which replica of the model this process belongs to, and how many there are; rows are dealt to replicas."""
    return int(worker.engine.get_data_parallel_rank()), int(worker.engine.get_data_parallel_size())


def _is_metric(value: Any) -> bool:
    return isinstance(value, Metric)
