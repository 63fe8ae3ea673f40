"""The typed configuration of a run (config/RUN.yaml) and of an evaluation suite (config/eval_SUITE.yaml).

Every key has a type, a default or none, and one sentence; docs/config.md and config/schema.json are rendered
from here. An unknown, mistyped or ineffective key is a `ConfigError`: one sentence that names file and key.
Keys keep veRL's names where veRL has the notion.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError
from pydantic.json_schema import models_json_schema

from openforge import config_checks as checks
from openforge import config_docs
from openforge import config_reading as reading
from openforge.config_judge import Judge
from openforge.config_reading import (
    ConfigError,
    Name,
    NonNegative,
    Positive,
    Section,
    Seed,
    Share,
    Text,
    only_if,
    read_yaml,
)
from openforge.config_sandbox import Sandbox
from openforge.config_tasks import Data, Tasks
from openforge.config_training import Actor, Algorithm, Critic, KeepCheckpoints, Reward, Trainer

__all__ = [
    "Cell",
    "ConfigError",
    "EvalConfig",
    "KeepCheckpoints",
    "Loaded",
    "NoSource",
    "RunConfig",
    "Sandbox",
    "Tasks",
    "describe",
    "digest",
    "from_iteration",
    "load",
    "markdown",
    "read_yaml",
    "runs",
    "schema",
    "suites",
]

RUN_NAME = re.compile(r"[a-z0-9_]+")
# Given with --config like a key, but a command and no part of a configuration.
FROM_ITERATION = "from_iteration"


class NoSource(ConfigError):
    """The variable that would name the tasks is not set: whatever does not need this run goes on without it."""


class Sampling(Section):
    """Sampling sent upstream with every call, whatever the harness asks for."""

    temperature: Annotated[float, Field(ge=0)] = Field(default=1.0, description="0 is greedy.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description="Keep 1 in training: the logprobs are renormalised otherwise."
    )
    top_k: Annotated[int, Field(ge=-1)] = Field(default=-1, description="-1 is off; keep it off in training.")
    min_p: Share = Field(default=0.0, description="0 is off.")
    repetition_penalty: Annotated[float, Field(gt=0)] = Field(default=1.0, description="1 is off.")
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = Field(default=0.0, description="0 is off.")
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = Field(default=0.0, description="0 is off.")
    max_tokens: Positive = Field(
        default=512, description="Sampled tokens a call at most; the harness may ask for fewer."
    )


class Limits(Section):
    """Limits of an episode; the lower of these and the task's own holds."""

    turns: Positive | None = Field(default=None, description="Model calls an episode; NULL leaves the task's own.")
    tokens: Positive | None = Field(default=None, description="Sampled tokens an episode; NULL sets none.")
    seconds: Annotated[float, Field(gt=0)] = Field(default=120.0, description="Seconds of the agent phase.")


class Harness(Section):
    """Which harness drives an episode and how."""

    name: Literal[
        "mini_swe_agent", "pi", "codex", "claude_code", "openclaw", "opencode", "qwen_code", "zeroclaw", "scripted"
    ] = Field(default="mini_swe_agent", description="Module below openforge/harnesses (docs/harnesses.md).")
    config: str | None = Field(
        default=None,
        description="mini_swe_agent's YAML, a path from the project's root; the harness's own default without one.",
        json_schema_extra=only_if(name="mini_swe_agent"),
    )
    launch: Literal["fork", "command"] | None = Field(
        default=None,
        description="mini_swe_agent: forked from a warm process, or its shipped command started anew; without it fork "
        "where it can be had, which is sandbox.backend local without an image.",
        json_schema_extra=only_if(name="mini_swe_agent"),
    )
    instructions: str | None = Field(
        default=None,
        description="File in place of the harness's own system prompt, a path from the project's root.",
        json_schema_extra=only_if(name=["codex", "claude_code", "qwen_code"]),
    )
    bare: bool = Field(
        default=False,
        description="The harness's own reduced mode: fewer tools and a shorter prompt.",
        json_schema_extra=only_if(name=["claude_code", "openclaw"]),
    )
    tools: str | None = Field(
        default=None,
        description="Names of the tools that it offers, separated by commas; all of its own without one.",
        json_schema_extra=only_if(name=["claude_code", "qwen_code"]),
    )
    binary: str | None = Field(
        default=None,
        description="ZeroClaw's program, a path from the project's root: it comes with no package.",
        json_schema_extra=only_if(name="zeroclaw"),
    )
    wire_api: Literal["chat_completions", "responses"] = Field(
        default="chat_completions",
        description="Dialect that zeroclaw speaks.",
        json_schema_extra=only_if(name="zeroclaw"),
    )
    agent: Literal["reference", "nothing", "cheat"] = Field(
        default="reference",
        description="Script of the task folder's agents/ that runs in the agent's place; no model is asked.",
        json_schema_extra=only_if(name="scripted"),
    )


class MixedHarness(Harness):
    """One harness of a mix."""

    weight: Annotated[float, Field(gt=0)] = Field(
        default=1.0, description="Its share of the shards beside the others'."
    )


class Rollout(Section):
    """How episodes are run."""

    n: Positive = Field(default=8, description="Rollouts a group.")
    shards: Annotated[int, Field(ge=1, le=9999)] = Field(
        default=1, description="Jobs that an iteration's rollouts are cut into."
    )
    concurrency: Positive = Field(default=16, description="Episodes in flight a shard.")
    attempts: Positive = Field(default=2, description="Attempts a rollout at most, when infrastructure fails.")
    quorum: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.75,
        description="Share of an iteration's rollouts that must end with a reward, or score stops the run.",
    )


class Server(Section):
    """The vLLM server of the policy."""

    url: Text | None = Field(
        default=None,
        description="Attach to an OpenAI-compatible server instead of starting one (evaluation only).",
    )
    replicas: list[Text] = Field(
        default=[],
        description="Endpoint: URLs of further servers of the same model; an episode stays with one that answers.",
    )
    api: Literal["auto", "vllm", "openai"] = Field(
        default="auto",
        description="Endpoint: fields it takes; `auto` looks whether vLLM or SGLang answers, `openai` is any other.",
    )
    model: str | None = Field(
        default=None, description="Endpoint: model to ask for; needed where it lists several and none is `policy`."
    )
    api_key_env: str | None = Field(
        default=None, description="Endpoint: NAME of the environment variable with its key; no key without one."
    )
    device: Literal["cpu", "gpu"] = Field(
        default="cpu", description="Which vLLM build and flags.", json_schema_extra=only_if(url=None)
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Weights and activations.", json_schema_extra=only_if(url=None)
    )
    max_model_len: Annotated[int, Field(ge=64)] = Field(
        default=2048, description="Context window in tokens, of prompt and response together."
    )
    max_num_seqs: Positive = Field(default=64, description="Sequences in flight.", json_schema_extra=only_if(url=None))
    block_size: Positive = Field(
        default=32,
        description="KV-cache block in tokens; on CPU a multiple of 32, and 32 reuses short prompts best.",
        json_schema_extra=only_if(url=None),
    )
    kv_cache_gb: Positive = Field(
        default=1,
        description="KV cache in GB (VLLM_CPU_KVCACHE_SPACE).",
        json_schema_extra=only_if(url=None, device="cpu"),
    )
    tensor_parallel_size: Positive = Field(
        default=1, description="GPUs a replica.", json_schema_extra=only_if(url=None, device="gpu")
    )
    chat_template: str | None = Field(
        default=None,
        description="Jinja file, a path from the project's root; the model's own without one.",
        json_schema_extra=only_if(url=None),
    )
    tool_call_parser: str | None = Field(
        default=None,
        description="vLLM's tool parser, e.g. hermes; native tool calls are off without one.",
        json_schema_extra=only_if(url=None),
    )
    warm: bool = Field(
        default=True,
        description="Keep the server between the jobs of one machine, weights swapped by lease.",
        json_schema_extra=only_if(url=None),
    )
    start_seconds: Annotated[float, Field(gt=0)] = Field(
        default=300.0,
        description="Seconds until a server must be healthy.",
        json_schema_extra=only_if(url=None),
    )


class Cell(Section):
    """One evaluation cell: the same policy under one split, harness, window and sampling."""

    name: Name = Field(description="Name of the cell, part of its path.")
    split: str = Field(default="heldout", description="Split that is evaluated.")
    tasks: Positive | None = Field(default=None, description="First so many tasks of the seeded order; all without it.")
    n: Positive = Field(default=1, description="Samples a task.")
    harness: Harness = Field(default_factory=Harness, description="Harness of the cell.")
    sampling: Sampling = Field(default_factory=Sampling, description="Sampling of the cell.")
    server: Server | None = Field(default=None, description="Another window, template or tool parser than the run's.")
    limits: Limits | None = Field(default=None, description="Other limits than the run's.")
    concurrency: Positive | None = Field(default=None, description="Episodes in flight; the run's without it.")
    at: Literal["first_and_last", "last", "every"] = Field(
        default="first_and_last", description="Checkpoints of a training run that the cell is run on."
    )


class _Common(Section):
    model: str = Field(
        description="A model folder, a hub id@revision, or the bundled smollm2-135m-instruct, tiny-random or "
        "tiny-random-vl."
    )
    seed: Seed = Field(default=0, description="Seed of draws and rollouts.")
    environment: str = Field(default="claw_eval", description="Environment of the tasks.")
    tasks: Tasks = Field(description="Raw tasks.")
    rollout: Rollout = Field(default_factory=Rollout, description="Running episodes.")
    sandbox: Sandbox = Field(default_factory=Sandbox, description="Sandboxes of episodes.")
    harness: Harness = Field(default_factory=Harness, description="Harness of training episodes and default of cells.")
    limits: Limits = Field(default_factory=Limits, description="Limits of an episode.")
    server: Server = Field(default_factory=Server, description="Policy server.")
    judge: Judge | None = Field(default=None, description="The model that scores by rubric; none without it.")
    cells: tuple[Cell, ...] = Field(default=(), description="Evaluation cells.", strict=False)


class RunConfig(_Common):
    """config/RUN.yaml: a training run."""

    iterations: NonNegative = Field(description="Iterations N; raise it to go on.")
    lag: Annotated[int, Field(ge=0, le=2)] = Field(
        default=0,
        description="Iteration k samples with checkpoint max(0, k-1-lag). 0: on policy. 1: the rollouts of k+1 run "
        "beside the training of k. 2: they need not wait for it either.",
    )
    data: Data = Field(default_factory=Data, description="Drawing of tasks.")
    harness_mix: tuple[MixedHarness, ...] = Field(
        default=(),
        description="Harnesses of training episodes, in place of `harness`: each shard, and so each group, has one; "
        "over the iterations each has its weight's share of the shards.",
        strict=False,
    )
    sampling: Sampling = Field(default_factory=Sampling, description="Sampling of training episodes.")
    reward: Reward = Field(default_factory=Reward, description="Rewards and their shaping.")
    algorithm: Algorithm = Field(default_factory=Algorithm, description="Credit.")
    actor: Actor = Field(default_factory=Actor, description="The policy's update.")
    critic: Critic = Field(default_factory=Critic, description="PPO's critic, with adv_estimator: gae.")
    trainer: Trainer = Field(default_factory=Trainer, description="The training job.")

    def sampled(self, iteration: int) -> int:
        """b(k): the checkpoint that training iteration k >= 1 samples from."""
        return max(0, iteration - 1 - self.lag)


class EvalConfig(_Common):
    """config/eval_SUITE.yaml: an evaluation that never trains."""

    policy: Text | None = Field(
        default=None,
        description="A model folder, hub id@revision, URL of an endpoint, or RUN@k; without one server.url, else the "
        "config's model.",
    )
    suites: tuple[Name, ...] = Field(
        default=(),
        description="Further suites, names of config/NAME.yaml, that the same target takes and the same --config holds "
        "for: each whose tasks.source is there. Results and scores stay apart.",
        strict=False,
    )


@dataclass(frozen=True)
class Loaded:
    """A validated configuration, with the origin of every value by dotted key."""

    run: str
    config: RunConfig | EvalConfig
    origins: dict[str, str]


def load(run: str, root: Path, overrides: Mapping[str, Any] | None = None) -> Loaded:
    """Load config/<run>.yaml below `root`, with overrides (snakemake --config) laid over it.

    Raises:
        ConfigError: one sentence naming the file (or --config) and the key.
    """
    if not RUN_NAME.fullmatch(run):
        raise ConfigError(f"run name {run!r} must match [a-z0-9_]+")
    label = f"config/{run}.yaml"
    data = read_yaml(root / "config" / f"{run}.yaml", label)
    overrides = {k: v for k, v in (overrides or {}).items() if k != FROM_ITERATION}
    model: type[RunConfig] | type[EvalConfig] = EvalConfig if run.startswith("eval_") else RunConfig
    reading.check(model, data, "", label)
    marks = reading.marked(data, label)
    if overrides:
        for key, value in overrides.items():
            # Snakemake's reading of `key=`: a variable that was not set, more often than a value left out.
            if value is None:
                raise ConfigError(f"--config {key}= is empty; give it a value, or write {key}=null")
        over = reading.typed(model, reading.plain(overrides))
        marks = reading.merge(marks, reading.marked(over, "--config"))
        data, label = reading.merge(data, over), f"--config over {label}"
        # Checked together: an override can make a key of the file ineffective.
        reading.check(model, data, "", label)
    data = _sourced(data, f"config/{run}.yaml")
    try:
        config = model.model_validate(data)
    except ValidationError as e:
        raise ConfigError(reading.sentence(e, label)) from None
    _cross(config, label)
    return Loaded(run, config, reading.origins(config, data, marks))


def _sourced(data: dict[str, Any], label: str) -> dict[str, Any]:
    """The data with the variable of `tasks.source` read.

    Raises:
        NoSource: it is not set.
    """
    tasks = data.get("tasks")
    if not isinstance(tasks, dict):
        return data
    source = tasks.get("source")
    if not isinstance(source, str) or not source.startswith("$"):
        return data
    path = os.environ.get(source[1:], "").strip()
    if not path:
        raise NoSource(f"{label}: tasks.source is {source}, and no environment variable {source[1:]} names a folder")
    return data | {"tasks": tasks | {"source": path}}


def suites(run: str, root: Path) -> list[str]:
    """The further suites of an evaluation's target, as its file has them; none where that is wrong."""
    try:
        found = read_yaml(root / "config" / f"{run}.yaml").get("suites") if run.startswith("eval_") else None
    except ConfigError:
        return []
    return [n for n in found if isinstance(n, str)] if isinstance(found, list) else []


def from_iteration(overrides: Mapping[str, Any] | None) -> int | None:
    """K of `--config from_iteration=K`, from which on a run is made anew; None where it is not given.

    Raises:
        ConfigError: it is no whole number.
    """
    k = (overrides or {}).get(FROM_ITERATION)
    if FROM_ITERATION in (overrides or {}) and type(k) is not int:
        raise ConfigError(f"--config: {FROM_ITERATION} is {reading.show(k)}; it must be an iteration's number, from 1")
    return k


def digest(config: RunConfig | EvalConfig, without: tuple[str, ...] = ()) -> str:
    """SHA-256 of the resolved configuration, every default included; `without` leaves top-level keys out."""
    data = config.model_dump(mode="json", exclude=set(without))
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _cross(config: RunConfig | EvalConfig, label: str) -> None:
    """Refuse keys that are right one by one and wrong together."""
    names = [c.name for c in config.cells]
    for n in names:
        if names.count(n) > 1:
            raise ConfigError(f"{label}: two cells are named {n!r}; a cell's name is its path")
        if n == "train":
            raise ConfigError(f"{label}: a cell cannot be named 'train', the name of the training rollouts")
    checks.tasks(config.tasks, label)
    checks.harnesses(config, label)
    checks.sandbox(config, label)
    checks.cells(config.cells, label)
    if config.judge is not None:
        checks.judge(config.judge, label)
    checks.windows(config, config.sampling if isinstance(config, RunConfig) else None, label)
    if isinstance(config, RunConfig):
        checks.training(config, label)
        return
    checks.policy(config, label)
    for i, cell in enumerate(config.cells):
        if "at" in cell.model_fields_set:
            raise ConfigError(
                f"{label}: key 'cells[{i}].at' has no effect in an evaluation suite, which has one policy; remove it"
            )


def runs(root: Path) -> list[str]:
    """Names of the configurations in config/, sorted."""
    return sorted(p.stem for p in (root / "config").glob("*.yaml"))


def describe(loaded: Loaded) -> str:
    """`openforge config RUN`: every value with its origin, one line a key."""
    values = config_docs.flatten(loaded.config.model_dump(mode="json"))
    width = max(map(len, values))
    return "\n".join(
        f"{k:{width}}  {reading.show(v):24}  {loaded.origins.get(k, 'default')}" for k, v in values.items()
    )


def schema() -> dict[str, Any]:
    """JSON schema of both kinds of file (config/schema.json)."""
    _, top = models_json_schema(
        [(RunConfig, "validation"), (EvalConfig, "validation")], title="OpenForge configuration"
    )
    top["anyOf"] = [{"$ref": "#/$defs/RunConfig"}, {"$ref": "#/$defs/EvalConfig"}]
    return top


def markdown() -> str:
    """docs/config.md."""
    out = [
        "# Configuration",
        "",
        "Rendered from `openforge/config.py` by `make docs`; a test compares. A run is `config/RUN.yaml`, a "
        "suite `config/eval_SUITE.yaml`; `openforge config RUN` prints every value with its origin. Lay values "
        "over a file with `snakemake TARGET --config iterations=8 'actor={optim: {lr: 1e-5}}'`.",
        "",
    ]
    for title, model in (("A training run", RunConfig), ("An evaluation suite", EvalConfig)):
        header = ["| key | type | default | meaning |", "|---|---|---|---|"]
        out += [f"## {title}", "", *header, *config_docs.key_rows(model), ""]
    return "\n".join(out)
