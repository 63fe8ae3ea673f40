"""What a training job refuses of its samples before it loads a model: one sentence that names the sample."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from openforge.config import RunConfig
from openforge.config_training import Trainer
from openforge.policy.weights import read_checkpoint
from openforge.samples.credit import ESTIMATORS
from openforge.samples.images import Vision
from openforge.train.job import Job, TrainError

# Lists of a sample, one value a token each.
LISTS = ("token_ids", "loss_mask", "logprobs", "rewards", "advantages")

# Model types that mbridge brings into Megatron and back beside veRL's transformers: none of those with images.
MEGATRON_MODELS = ("llama", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
# What config.json calls the number of experts.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")

# The logarithm of a probability of 1 may come out above 0 by this much.
ROUNDING = 1e-3


def check_samples(job: Job, samples: Sequence[Mapping[str, Any]]) -> None:
    """Refuse samples that cannot be trained on, or not from this checkpoint.

    Raises:
        TrainError: names the table, the sample and what would be right.
    """
    source, folder = Path(job.samples), Path(job.checkpoint_in)
    estimator = job.typed.algorithm.adv_estimator
    if ESTIMATORS[estimator].critic and Vision.of(folder) is not None:
        raise TrainError(
            f"algorithm.adv_estimator {estimator} has a critic, and there is none of a model that sees images, as "
            f"{folder} does; take another estimator"
        )
    words, most = vocabulary(folder), job.typed.actor.row_tokens
    version = str(read_checkpoint(folder)["policy_version"])
    if len({s["advantages"] is None for s in samples}) > 1:
        raise TrainError(f"{source}: some samples have advantages and some have none; write the samples again")
    for s in samples:
        where = f"{source}: sample {s['sample_id']}"
        _lists(where, s)
        _values(where, s)
        ids: Any = np.asarray(s["token_ids"], np.int64)
        strange = ids[(ids < 0) | (ids >= words)]
        if len(strange):
            raise TrainError(
                f"{where} holds token id {strange[0]}, but the vocabulary of {folder} has {words} tokens; it was "
                "sampled by another model"
            )
        if len(ids) > most:
            raise TrainError(
                f"{where} has {len(ids)} tokens, more than a row may have ({most}, by actor.ppo_max_token_len_per_gpu)"
                "; write the samples again, which leaves such rows out and counts them"
            )
        if s["policy_version"] != version and s["policy_version"].partition("@")[0] == version.partition("@")[0]:
            raise TrainError(
                f"{where} was sampled by {s['policy_version']}, but {folder} is {version}; remove the iteration's "
                "episodes and run them again"
            )


def check_device(trainer: Trainer, env: Mapping[str, str], gpus: int) -> None:
    """Refuse a process without a GPU of its own where training is on GPUs; `env` is torchrun's, `gpus` are those that
    torch sees.

    Raises:
        TrainError: names the process, its node, and what is missing.
    """
    local = int(env["LOCAL_RANK"])
    if trainer.device == "gpu" and gpus <= local:
        raise TrainError(
            f"rank {env['RANK']} of {env['WORLD_SIZE']} (process {local + 1} of {trainer.nproc_per_node} on "
            f"{platform.node()}) needs a GPU of its own, but torch sees {gpus} there; lower trainer.nproc_per_node, "
            "run the job where there are as many GPUs, or set trainer.device: cpu"
        )


def check_model(config: RunConfig, checkpoint: Path) -> None:
    """Refuse a model that Megatron cannot train as it is asked to.

    Raises:
        TrainError: its architecture has no bridge, or experts are to be shared where there are none.
    """
    if config.actor.strategy != "megatron":
        return
    found = json.loads((checkpoint / "config.json").read_text())
    kind, text = str(found.get("model_type")), found.get("text_config") or found
    if kind not in MEGATRON_MODELS:
        raise TrainError(
            f"{checkpoint} is a model of type {kind}, which actor.strategy megatron cannot load (it knows "
            f"{', '.join(MEGATRON_MODELS)}); set actor.strategy: fsdp2"
        )
    experts = next((text[k] for k in EXPERTS if text.get(k)), 0)
    size = config.actor.megatron.expert_model_parallel_size
    if size > 1 and (not experts or experts % size):
        raise TrainError(
            f"actor.megatron.expert_model_parallel_size is {size}, but the model in {checkpoint} has {experts} "
            "experts; it must divide their number, and be 1 where there are none"
        )


def vocabulary(checkpoint: Path) -> int:
    """Token ids that a model knows, from its config.json.

    Raises:
        TrainError: it does not say.
    """
    file = checkpoint / "config.json"
    try:
        config = json.loads(file.read_text())
        return int((config.get("text_config") or config)["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise TrainError(f"{file} does not give the model's vocab_size ({type(e).__name__}: {e})") from None


def _lists(where: str, sample: Mapping[str, Any]) -> None:
    """Every list holds one value a token, and none is NULL."""
    tokens = len(sample["token_ids"] or ())
    for column in LISTS:
        values = sample[column]
        if values is None and column == "advantages":
            # The training job estimates them.
            continue
        if values is None or len(values) != tokens:
            raise TrainError(
                f"{where} has {tokens} token ids and {'no' if values is None else len(values)} {column}; each token "
                "needs one value: write the samples again"
            )
        if any(v is None for v in values):
            raise TrainError(f"{where} has a NULL among its {column}; write the samples again")


def _values(where: str, sample: Mapping[str, Any]) -> None:
    """Something is trained, and what is trained has a finite advantage and a log-prob."""
    mask: Any = np.asarray(sample["loss_mask"])
    if not mask.any() or mask[0]:
        raise TrainError(
            f"{where} trains {'its first token, which nothing predicts' if mask.any() else 'no token'}; write the "
            "samples again"
        )
    for column in ("logprobs", "advantages", "rewards"):
        if sample[column] is None:
            continue
        values: Any = np.asarray(sample[column], np.float64)[mask != 0]
        if not np.isfinite(values).all() or (column == "logprobs" and values.max() > ROUNDING):
            bad = next(float(v) for v in values if not np.isfinite(v) or v > ROUNDING)
            right = "a logarithm of a probability, at most 0" if column == "logprobs" else "a number"
            raise TrainError(f"{where} has {bad} among the {column} of its trained tokens; each must be {right}")
