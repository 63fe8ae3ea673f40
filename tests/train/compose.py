"""Runs inside the train environment: veRL's and Megatron's own code on our configurations. `compose.py FOLDER NAMES`.

FOLDER holds NAME.json, the configurations. No model is built and no GPU needed: process groups are torch's fake ones.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import Any

from openforge.train import verl_cpu  # noqa: F401  first: it registers the CPU platform before veRL looks for one

import torch  # isort: skip
import torch.distributed as dist  # isort: skip
import verl  # isort: skip
from hydra import compose, initialize_config_dir  # isort: skip
from megatron.core import parallel_state  # isort: skip
from torch.testing._internal.distributed.fake_pg import FakeStore  # isort: skip
from transformers import CONFIG_MAPPING, Qwen3Config, Qwen3MoeConfig  # isort: skip
from verl.models.mcore.mbridge import AutoBridge  # isort: skip
from verl.trainer.ppo.utils import need_critic, need_reference_policy  # isort: skip
from verl.utils.config import omega_conf_to_dataclass, validate_config  # isort: skip
from verl.utils.megatron.optimizer import (  # isort: skip
    get_megatron_optimizer_param_scheduler,
    init_megatron_optim_config,
)
from verl.utils.megatron_utils import mapping_string_to_attn_backend  # isort: skip
from verl.workers.config import HFModelConfig  # isort: skip
from verl.workers.engine.megatron import MegatronEngineWithLMHead  # isort: skip

from openforge.config import RunConfig
from openforge.train.checks import MEGATRON_MODELS
from openforge.train.engines import actor_config, checkpoint_config, engine_config, model_overrides, optimizer_config

Json = dict[str, Any]
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4}
MODELS = {
    "claw": Qwen3MoeConfig(**SMALL, num_hidden_layers=4, num_experts=8, moe_intermediate_size=32),
    "claw_dense": Qwen3Config(**SMALL, num_hidden_layers=2),
}
THETA = 123456.0
# Keys of ours that veRL knows by the same name below `actor`, and what is compared of them.
SHARED = ("ppo_max_token_len_per_gpu", "use_dynamic_bsz", "ppo_epochs", "clip_ratio", "loss_agg_mode", "entropy_coeff")


def ours(config: RunConfig) -> tuple[Any, Any, Any]:
    engine, optimizer = engine_config(config), optimizer_config(config, config.actor.optim)
    contents = checkpoint_config(config).save_contents
    assert contents[-2:] == ["optimizer", "extra"]
    return engine, optimizer, actor_config(config, engine, optimizer)


def theirs(config: RunConfig) -> Any:
    """veRL's trainer configuration with our keys laid over it, validated by veRL for as many GPUs."""
    actor, trainer = config.actor, config.trainer
    megatron = actor.strategy == "megatron"
    own = actor.megatron if megatron else actor.fsdp_config
    section = "megatron" if megatron else "fsdp_config"
    keys: Json = {f"actor.{section}.{k}": v for k, v in own.model_dump().items() if v is not None}
    options = keys.pop("actor.megatron.override_transformer_config", {})
    keys |= {f"+actor.megatron.override_transformer_config.{k}": v for k, v in options.items()}
    keys |= {f"actor.{k}": getattr(actor, k) for k in SHARED}
    # Of the rest only what veRL requires.
    keys |= {"model.path": "model", "rollout.name": "vllm", "rollout.log_prob_use_dynamic_bsz": True}
    keys |= {"ref.log_prob_use_dynamic_bsz": True, "actor.ppo_mini_batch_size": 16, "rollout.n": config.rollout.n}
    if not megatron:
        keys["actor.strategy"] = "fsdp2"
    overrides = [
        f"{'+' if k[0] == '+' else ''}actor_rollout_ref.{k.lstrip('+')}={json.dumps(v)}" for k, v in keys.items()
    ]
    overrides += [f"trainer.nnodes={trainer.nnodes}", f"trainer.n_gpus_per_node={trainer.nproc_per_node}"]
    overrides += ["algorithm.adv_estimator=grpo", "data.train_batch_size=32"]
    whole = compose("ppo_megatron_trainer" if megatron else "ppo_trainer", overrides=overrides)
    validate_config(config=whole, use_reference_policy=need_reference_policy(whole), use_critic=need_critic(whole))
    return omega_conf_to_dataclass(whole.actor_rollout_ref.actor)


def compared(actor: Any, config: RunConfig) -> Json:
    """The values of our keys in one of veRL's actor configurations."""
    own = config.actor.megatron if config.actor.strategy == "megatron" else config.actor.fsdp_config
    names = [k for k, v in own.model_dump().items() if v is not None and k != "override_transformer_config"]
    found = {k: getattr(actor.engine, k) for k in [*names, "strategy"]}
    options = dict(getattr(actor.engine, "override_transformer_config", {}))
    found |= {k: options[k] for k in config.actor.megatron.override_transformer_config}
    return found | {k: getattr(actor, k) for k in SHARED if k not in ("ppo_max_token_len_per_gpu", "use_dynamic_bsz")}


def as_rank(rank: int, world: int) -> None:
    """A fake process group; Megatron's gloo groups become fake ones too."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)


NEW_GROUP = dist.new_group
dist.new_group = lambda *a, **k: NEW_GROUP(*a, **{**k, "backend": "fake"})


def loaded(model: Any, config: RunConfig, name: str) -> Any:
    """A model's configuration as veRL reads it from its folder for our training job."""
    folder = Path(sys.argv[1]) / "models" / name
    model.architectures = ["Any"]
    model.rope_parameters = {"rope_type": "default", "rope_theta": THETA}
    model.save_pretrained(folder)
    read = HFModelConfig(path=str(folder), load_tokenizer=False, override_config=model_overrides(config, folder))
    return read.hf_config


def known(config: RunConfig) -> Json:
    """The rotary base that mbridge reads of a model of each type."""
    as_rank(0, 1)
    parallel_state.initialize_model_parallel()
    found = {}
    for kind in MEGATRON_MODELS:
        model = CONFIG_MAPPING[kind](**SMALL, num_hidden_layers=2)
        bridge = AutoBridge.from_config(loaded(model, config, kind), dtype=torch.bfloat16)
        found[kind] = bridge._get_gptmodel_args()["rotary_base"]
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return found


def replicas(engine: Any, config: RunConfig, name: str, found: Json) -> Json:
    """(replica, replicas, holds outputs) of four ranks, by veRL's engine; beside them what needs a rank to be asked."""
    out: Json = {}
    world = config.trainer.world_size
    for rank in (0, 1, world // 2 + 1, world - 2):
        as_rank(rank, world)
        worker = MegatronEngineWithLMHead.__new__(MegatronEngineWithLMHead)
        worker.engine_config = engine
        worker._init_device_mesh()
        size = worker.get_data_parallel_size()
        out[rank] = [worker.get_data_parallel_rank(), size, worker.is_mp_src_rank_with_outputs()]
        if not rank:
            bridge = AutoBridge.from_config(loaded(MODELS[name], config, name), dtype=torch.bfloat16)
            bridge.set_extra_args(**mapping_string_to_attn_backend({**engine.override_transformer_config}))
            keys = ("num_layers", "recompute_granularity", "bf16", "num_moe_experts", "moe_router_dtype")
            found["transformer"] = {k: getattr(bridge.config, k) for k in keys}
            found["rotary_base"] = bridge._get_gptmodel_args()["rotary_base"]
            found["transformer"]["expert_tensor_parallel_size"] = bridge.config.expert_tensor_parallel_size
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    return out


def rates(optimizer: Any, config: RunConfig) -> list[float]:
    """Learning rates of 16 steps by Megatron's own scheduler, and its optimizer's options."""
    adam = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = get_megatron_optimizer_param_scheduler(adam, optimizer)
    out = []
    for _ in range(16):
        out.append(float(adam.param_groups[0]["lr"]))
        scheduler.step(1)
    return out


def main(folder: Path, names: list[str]) -> None:
    packages = ("megatron-core", "mbridge", "transformers")
    result: Json = {"versions": {n: importlib.metadata.version(n) for n in packages}}
    with initialize_config_dir(os.path.join(os.path.dirname(verl.__file__), "trainer", "config"), version_base=None):
        for name in names:
            config = RunConfig.model_validate_json((folder / f"{name}.json").read_text())
            engine, optimizer, actor = ours(config)
            found: Json = {"engine": type(engine).__name__, "ours": compared(actor, config)}
            found["verl"] = compared(theirs(config), config)
            if config.actor.strategy == "megatron":
                found["replicas"] = replicas(engine, config, name, found)
                found["rates"] = rates(optimizer, config)
                # `OptimizerConfig` is Megatron's.
                made = init_megatron_optim_config(optimizer, use_distributed_optimizer=True, bf16=True)
                keys = ("adam_beta1", "adam_beta2", "weight_decay", "lr")
                found["optimizer"] = {k: getattr(made, k) for k in keys}
            result[name] = found
            if name == "claw_dense":
                result["models"] = known(config)
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
