"""Keys that are right one by one and wrong together: a `ConfigError`, one sentence, before any job.

`openforge.config` calls them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from openforge.config_reading import ConfigError
from openforge.config_sandbox import ENGINES
from openforge.samples.credit import ESTIMATORS

if TYPE_CHECKING:
    from openforge.config import Cell, EvalConfig, Harness, RunConfig, Sampling, Server, Tasks
    from openforge.config_judge import Judge
    from openforge.config_training import FSDP, Actor, Megatron, Optim, RewardKwargs, Trainer

# Sampling under which the logprobs of the policy and of its sampling distribution are the same.
_ON_POLICY = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
_CLIP = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")
# Keys of `actor` that veRL's policy losses read, by loss_mode; another loss of veRL is one line here and in Actor.
# Its geo_mean, clip_cov and kl_cov are not offered: how a mini-batch is cut for memory would change their gradient.
LOSS_KEYS: dict[str, tuple[str, ...]] = {
    "vanilla": (*_CLIP, "clip_ratio_c"),
    "gspo": _CLIP,
    "sapo": ("tau_pos", "tau_neg"),
    "gpg": (),
    "cispo": _CLIP,
    "dro": (),
    "dppo_tv": (*_CLIP, "clip_ratio_c"),
    "dppo_kl": (*_CLIP, "clip_ratio_c"),
}
# Keys of `server` that say something about an endpoint only.
_ENDPOINT = ("replicas", "api", "model", "api_key_env")


def no_endpoint(server: Server, label: str, why: str) -> None:
    """Refuse what says something about an endpoint where there is none."""
    for key in _ENDPOINT:
        if key in server.model_fields_set:
            raise ConfigError(f"{label}: key 'server.{key}' has no effect {why}; remove it")


def cells(cells: Sequence[Cell], label: str) -> None:
    """Every cell has the suite's one policy."""
    for i, cell in enumerate(cells):
        for key in ("url", *_ENDPOINT):
            if cell.server is not None and key in cell.server.model_fields_set:
                raise ConfigError(
                    f"{label}: key 'cells[{i}].server.{key}' has no effect: all cells have one policy; set server.{key}"
                )


def policy(config: EvalConfig, label: str) -> None:
    """Refuse two policies, and an endpoint's URL or key that would show a secret."""
    if config.policy is not None and config.server.url is not None:
        raise ConfigError(
            f"{label}: policy {config.policy!r} and server.url {config.server.url!r} name two policies; remove one"
        )
    url = config.server.url or config.policy or ""
    if "://" not in url:
        no_endpoint(config.server, label, "without an endpoint (server.url, or a URL as policy)")
        return
    for address in (url, *config.server.replicas):
        endpoint(address, label)
    variable(config.server.api_key_env, "server.api_key_env", label)


def judge(judge: Judge, label: str) -> None:
    """Refuse a judge's URL or key that would show a secret."""
    endpoint(judge.url, label)
    variable(judge.api_key_env, "judge.api_key_env", label)


def variable(name: str | None, key: str, label: str) -> None:
    """Refuse what is no variable's name: it may be the key itself."""
    if name is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ConfigError(f"{label}: {key} must be the NAME of an environment variable (letters, digits, _), not a key")


def endpoint(url: str, label: str) -> None:
    """Refuse an endpoint's URL that is none, or that would show a secret."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{label}: the endpoint {url!r} must be http://HOST:PORT/v1 or https://HOST/v1")
    if parts.username is not None or parts.query or parts.fragment:
        # Not shown: it may be a key. It would stand in every table.
        raise ConfigError(
            f"{label}: the URL of the endpoint {parts.hostname} must be its address only, without user, password or "
            "query; name the variable that holds its key in server.api_key_env"
        )


def server_url(url: str, label: str) -> None:
    """Refuse a URL of the sandboxes' server that is none, or that would show a secret."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{label}: sandbox.url {url!r} must be http://HOST:PORT or https://HOST")
    if parts.username is not None or parts.query or parts.fragment:
        raise ConfigError(
            f"{label}: sandbox.url at {parts.hostname} must be the server's address only, without user, password or "
            "query; name the variable that holds its key in sandbox.api_key_env"
        )


def tasks(tasks: Tasks, label: str) -> None:
    """Refuse what has no effect on the source of tasks."""
    for key in ("tags", "columns", "verifier", "verifier_seconds"):
        if tasks.source in ("demo", "tiny") and key in tasks.model_fields_set:
            raise ConfigError(f"{label}: key 'tasks.{key}' has no effect on the generated tasks {tasks.source!r}")
    if tasks.verifier is None and "verifier_seconds" in tasks.model_fields_set:
        raise ConfigError(f"{label}: key 'tasks.verifier_seconds' has no effect without tasks.verifier; remove it")


def _harnesses(config: RunConfig | EvalConfig) -> list[tuple[str, Harness]]:
    mix = getattr(config, "harness_mix", ())
    trained = [(f"harness_mix[{i}]", h) for i, h in enumerate(mix)] or [("harness", config.harness)]
    cells = [(f"cells[{i}].harness", c.harness) for i, c in enumerate(config.cells) if c.harness is not None]
    return [*trained, *cells]


def harnesses(config: RunConfig | EvalConfig, label: str) -> None:
    """Refuse a harness without what only its user can bring, and what cannot be trained."""
    mix = getattr(config, "harness_mix", ())
    if mix and "harness" in config.model_fields_set:
        raise ConfigError(f"{label}: key 'harness' has no effect beside harness_mix; remove one of them")
    for key, harness in _harnesses(config):
        if harness.name == "scripted" and not key.startswith("cells"):
            raise ConfigError(f"{label}: {key}.name is scripted, which calls no model; only a cell can have it")
        if harness.name == "zeroclaw" and harness.binary is None:
            raise ConfigError(
                f"{label}: key '{key}.binary' is required with zeroclaw, whose program is on no package registry: "
                "build it from its source and name the file (a path from the project's root)"
            )


def sandbox(config: RunConfig | EvalConfig, label: str) -> None:
    """Refuse what no sandbox of the chosen backend can have."""
    sandbox = config.sandbox
    variable(sandbox.api_key_env, "sandbox.api_key_env", label)
    if sandbox.url is not None:
        server_url(sandbox.url, label)
    if sandbox.backend in ENGINES and sandbox.image is None:
        raise ConfigError(f"{label}: key 'sandbox.image' is required while sandbox.backend is {sandbox.backend}")
    if sandbox.max_alive is not None and sandbox.max_alive <= sandbox.warm:
        raise ConfigError(
            f"{label}: sandbox.max_alive is {sandbox.max_alive}, but sandbox.warm keeps {sandbox.warm} ready, so that "
            "no episode could run; raise the one or lower the other"
        )
    limits = sandbox.limits
    if limits.best_effort and limits.memory_gb is limits.cpus is limits.processes is limits.disk_gb is None:
        raise ConfigError(f"{label}: key 'sandbox.limits.best_effort' has no effect without a limit; remove it")
    for key, harness in _harnesses(config):
        if harness.launch == "fork" and not sandbox.can_fork():
            why = f"sandbox.backend is {sandbox.backend}" if sandbox.image is None else "sandbox.image is set"
            raise ConfigError(
                f"{label}: key '{key}.launch' cannot be fork while {why}: a process is forked into sandboxes of this "
                "machine's own system only; remove it or set command"
            )


def windows(config: RunConfig | EvalConfig, trained: Sampling | None, label: str) -> None:
    """Refuse a window that holds no prompt beside the answer, in training (sampled as `trained`) and every cell."""
    uses: list[tuple[str, Server, str, Sampling]] = []
    if trained is not None:
        uses.append(("server", config.server, "sampling", trained))
    for i, cell in enumerate(config.cells):
        own = f"cells[{i}]"
        window, server = ("server", config.server) if cell.server is None else (f"{own}.server", cell.server)
        uses.append((window, server, f"{own}.sampling", cell.sampling))
    for window, server, sampling, asked in uses:
        if asked.max_tokens >= server.max_model_len:
            raise ConfigError(
                f"{label}: {sampling}.max_tokens is {asked.max_tokens}, but {window}.max_model_len is "
                f"{server.max_model_len}, which leaves no token for a prompt; lower the one or raise the other"
            )
        if server.device == "cpu" and server.block_size % 32:
            raise ConfigError(f"{label}: {window}.block_size is {server.block_size}; on cpu a multiple of 32 is needed")


def training(config: RunConfig, label: str) -> None:
    """Refuse what no training can be made with."""
    if config.server.url is not None:
        raise ConfigError(f"{label}: server.url is for evaluation; training swaps weights in its own server")
    no_endpoint(config.server, label, "in training")
    for key, value in _ON_POLICY.items():
        if getattr(config.sampling, key) != value:
            raise ConfigError(
                f"{label}: sampling.{key} must be {value} in training: recorded logprobs would be of another "
                "distribution than the one trained"
            )
    if config.sampling.temperature == 0:
        raise ConfigError(f"{label}: sampling.temperature must be above 0 in training; a greedy group has no spread")
    estimator = config.algorithm.adv_estimator
    within = ESTIMATORS[estimator].within
    compared = config.rollout.n * (config.data.train_batch_size if within == "iteration" else 1)
    if within != "episode" and compared < 2 and config.iterations:
        raise ConfigError(
            f"{label}: rollout.n must be at least 2: {estimator} compares the rewards of one {within}'s episodes"
        )
    if config.algorithm.filter_groups.enable and within != "group":
        raise ConfigError(
            f"{label}: algorithm.filter_groups.enable has no use with {estimator}, which learns from groups without "
            "variance too; remove it or take another adv_estimator"
        )
    if within == "episode":
        likelihood(config, label)
    condition(config.data.filter, label)
    overlong(config.reward.reward_kwargs, label)
    losses(config.actor, label)
    schedule(config.actor.optim, label, "actor")
    schedule(config.critic.optim, label, "critic")
    if "critic" in config.model_fields_set and not ESTIMATORS[estimator].critic:
        raise ConfigError(
            f"{label}: key 'critic' has no effect while algorithm.adv_estimator is {estimator}; remove it or set gae"
        )
    memory(config.actor, label)
    engine(config, label)
    keep = config.trainer.keep_checkpoints
    if keep is not None and keep.last is keep.every is keep.best is None:
        raise ConfigError(f"{label}: key 'trainer.keep_checkpoints' is empty; set last, every or best, or remove it")
    if keep is not None and keep.best is not None and all(c.at != "every" for c in config.cells):
        raise ConfigError(
            f"{label}: key 'trainer.keep_checkpoints.best' has no effect without a cell that has 'at: every'; add one "
            "or remove the key"
        )


def losses(actor: Actor, label: str) -> None:
    """Refuse keys that the chosen loss does not use, and a loss that lacks one."""
    mode, given = actor.policy_loss.loss_mode, actor.model_fields_set
    for key in sorted({k for keys in LOSS_KEYS.values() for k in keys} - set(LOSS_KEYS[mode])):
        if key in given:
            users = " or ".join(m for m, keys in LOSS_KEYS.items() if key in keys)
            raise ConfigError(
                f"{label}: key 'actor.{key}' has no effect while actor.policy_loss.loss_mode is {mode}; remove it or "
                f"set loss_mode to {users}"
            )
    if "clip_ratio" in given and None not in (actor.clip_ratio_low, actor.clip_ratio_high):
        raise ConfigError(
            f"{label}: key 'actor.clip_ratio' has no effect beside clip_ratio_low and clip_ratio_high; remove it"
        )
    if mode == "dro" and actor.policy_loss.dro_beta is None:
        raise ConfigError(f"{label}: key 'actor.policy_loss.dro_beta' is required while loss_mode is dro")
    if mode == "sapo" and actor.loss_agg_mode != "seq-mean-token-mean":
        raise ConfigError(
            f"{label}: actor.loss_agg_mode is {actor.loss_agg_mode}, but the loss sapo is a mean over sequences of "
            "their means; set seq-mean-token-mean"
        )
    if actor.loss_agg_mode == "seq-mean-token-sum-norm" and actor.loss_scale_factor is None:
        raise ConfigError(
            f"{label}: key 'actor.loss_scale_factor' is required while loss_agg_mode is seq-mean-token-sum-norm: "
            "without it a token would count by the longest row that happens to be beside it"
        )


def engine(config: RunConfig, label: str) -> None:
    """Refuse an engine that cannot be cut over the processes, or that does not train what is asked for."""
    actor, trainer = config.actor, config.trainer
    if actor.strategy == "fsdp2":
        _fsdp(actor.fsdp_config, trainer, label)
        return
    _megatron(actor.megatron, trainer, label)
    if ESTIMATORS[config.algorithm.adv_estimator].critic:
        raise ConfigError(
            f"{label}: algorithm.adv_estimator {config.algorithm.adv_estimator} has a critic, which is trained with "
            "actor.strategy fsdp2 only"
        )
    if actor.model.lora_rank:
        raise ConfigError(f"{label}: adapters (actor.model.lora_rank) are trained with actor.strategy fsdp2 only")


def _fsdp(fsdp: FSDP, trainer: Trainer, label: str) -> None:
    where = f"{label}: key 'actor.fsdp_config"
    for key in ("param_offload", "optimizer_offload", "offload_policy", "ulysses_sequence_parallel_size"):
        if trainer.device == "cpu" and key in fsdp.model_fields_set:
            raise ConfigError(f"{where}.{key}' has no effect while trainer.device is cpu; remove it")
    if fsdp.offload_policy and (fsdp.param_offload or fsdp.optimizer_offload):
        raise ConfigError(f"{where}.offload_policy' keeps all on the CPU; remove param_offload and optimizer_offload")
    for key in ("fsdp_size", "ulysses_sequence_parallel_size"):
        _divides(trainer, getattr(fsdp, key) or 1, f"actor.fsdp_config.{key}", label)


def _megatron(megatron: Megatron, trainer: Trainer, label: str) -> None:
    if trainer.device != "gpu":
        raise ConfigError(f"{label}: actor.strategy megatron needs trainer.device: gpu; on CPUs take fsdp2")
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    where = f"{label}: key 'actor.megatron"
    if "sequence_parallel" in megatron.model_fields_set and tp == 1:
        raise ConfigError(f"{where}.sequence_parallel' has no effect while tensor_model_parallel_size is 1; remove it")
    if megatron.expert_tensor_parallel_size is not None and megatron.expert_model_parallel_size == 1:
        raise ConfigError(
            f"{where}.expert_tensor_parallel_size' has no effect while expert_model_parallel_size is 1; remove it"
        )
    sizes = "tensor_model_parallel_size x pipeline_model_parallel_size x context_parallel_size"
    _divides(trainer, tp * pp * megatron.context_parallel_size, f"actor.megatron: {sizes}", label)
    expert = megatron.expert_model_parallel_size * (megatron.expert_tensor_parallel_size or tp)
    sizes = "expert_model_parallel_size x expert_tensor_parallel_size x pipeline_model_parallel_size"
    _divides(trainer, expert * pp, f"actor.megatron: {sizes}", label)


def _divides(trainer: Trainer, size: int, what: str, label: str) -> None:
    if trainer.world_size % size:
        raise ConfigError(
            f"{label}: {what} is {size}, which does not divide the {trainer.world_size} processes (trainer.nnodes "
            f"{trainer.nnodes} x nproc_per_node {trainer.nproc_per_node})"
        )


def likelihood(config: RunConfig, label: str) -> None:
    """Refuse to train on successes by another loss than their likelihood."""
    mode, bypass = config.actor.policy_loss.loss_mode, config.algorithm.rollout_correction.bypass_mode
    if mode != "gpg" or not bypass:
        raise ConfigError(
            f"{label}: algorithm.adv_estimator {config.algorithm.adv_estimator} raises the likelihood of successes, "
            "with neither ratio nor importance weights: set actor.policy_loss.loss_mode: gpg and "
            "algorithm.rollout_correction.bypass_mode: true"
        )


def schedule(optim: Optim, label: str, whose: str) -> None:
    """Refuse a schedule without a horizon, or one that ends before it has warmed up."""
    if optim.lr_scheduler_type == "cosine" and optim.total_training_steps is None:
        raise ConfigError(
            f"{label}: key '{whose}.optim.total_training_steps' is required while lr_scheduler_type is cosine: the "
            "optimizer steps after which the rate is lowest, however many iterations there are"
        )
    if optim.total_training_steps is not None and optim.lr_warmup_steps >= optim.total_training_steps:
        raise ConfigError(
            f"{label}: {whose}.optim.lr_warmup_steps is {optim.lr_warmup_steps}, but the schedule ends after "
            f"total_training_steps {optim.total_training_steps}; lower the one or raise the other"
        )


def memory(actor: Actor, label: str) -> None:
    """Refuse keys of adapters without adapters, and micro-batches of no size."""
    for key in ("lora_alpha", "target_modules"):
        if not actor.model.lora_rank and key in actor.model.model_fields_set:
            raise ConfigError(f"{label}: key 'actor.model.{key}' has no effect while lora_rank is 0; remove it")
    if not actor.use_dynamic_bsz and actor.ppo_micro_batch_size_per_gpu is None:
        raise ConfigError(
            f"{label}: key 'actor.ppo_micro_batch_size_per_gpu' is required while use_dynamic_bsz is false"
        )


def overlong(kwargs: RewardKwargs, label: str) -> None:
    """Refuse a punishment of long episodes that does not say from where to where it grows."""
    where, buffer = f"{label}: reward.reward_kwargs", kwargs.overlong_buffer_cfg
    if not buffer.enable:
        if kwargs.max_resp_len is not None:
            raise ConfigError(f"{where}.max_resp_len has no effect without overlong_buffer_cfg.enable; remove it")
        return
    if kwargs.max_resp_len is None or buffer.len is None:
        raise ConfigError(f"{where}: max_resp_len and overlong_buffer_cfg.len must be set where enable is true")
    if buffer.len > kwargs.max_resp_len:
        raise ConfigError(
            f"{where}.overlong_buffer_cfg.len is {buffer.len}, more than max_resp_len ({kwargs.max_resp_len}); even an "
            "empty episode would be punished"
        )


def condition(where: str | None, label: str) -> None:
    """Refuse a filter of episodes that DuckDB does not take."""
    if where is None:
        return
    # Not at the top: the training job reads configurations where there is no DuckDB.
    from openforge.condition import ConditionError, check

    try:
        check(where)
    except ConditionError as e:
        raise ConfigError(f"{label}: {e}") from None
