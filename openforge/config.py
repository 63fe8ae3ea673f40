"""The typed configuration of a run (config/RUN.yaml) and of an evaluation suite (config/eval_SUITE.yaml).

Every key has a type, a default or none, and one sentence; docs/config.md and config/schema.json are rendered from
here. An unknown, mistyped or ineffective key is a `ConfigError`: one sentence that names file and key.
Keys keep veRL's names where veRL has the notion.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticUndefined

RUN_NAME = re.compile(r"[a-z0-9_]+")


class ConfigError(ValueError):
    """One sentence: the file, the key, and what would be right."""


def only_if(**conditions: Any) -> dict[str, Any]:
    """Marks a key as effective only while sibling keys have the given values (set otherwise, it is an error)."""
    return {"only_if": {k: list(v) if isinstance(v, (list, tuple)) else [v] for k, v in conditions.items()}}


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9_]+$")]


class Tasks(Section):
    """Where raw tasks come from."""

    source: str = Field(
        description="`demo` (the generated demo tasks), `tiny` (the tests' kind), or a folder of task folders in ClawEval's format."
    )
    train: NonNegative = Field(64, description="Tasks generated for the train split.", json_schema_extra=only_if(source=["demo", "tiny"]))
    heldout: NonNegative = Field(64, description="Tasks generated for the heldout split.", json_schema_extra=only_if(source=["demo", "tiny"]))
    seed: int = Field(0, description="Seed of the generator.", json_schema_extra=only_if(source=["demo", "tiny"]))


class Data(Section):
    """Drawing of tasks."""

    train_batch_size: Positive = Field(8, description="Groups an iteration (veRL: prompts a batch).")
    train_split: str = Field("train", description="Split that training draws from.")


class Sampling(Section):
    """Sampling sent upstream with every call, whatever the harness asks for."""

    temperature: Annotated[float, Field(ge=0)] = Field(1.0, description="0 is greedy.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="Keep 1 in training: the logprobs are renormalised otherwise.")
    top_k: int = Field(-1, description="-1 is off; keep it off in training.")
    min_p: Share = Field(0.0, description="0 is off.")
    repetition_penalty: Annotated[float, Field(gt=0)] = Field(1.0, description="1 is off.")
    presence_penalty: float = Field(0.0, description="0 is off.")
    frequency_penalty: float = Field(0.0, description="0 is off.")
    max_tokens: Positive = Field(512, description="Sampled tokens a call at most; the harness may ask for fewer.")


class Limits(Section):
    """Limits of an episode; the lower of these and the task's own holds."""

    turns: Positive | None = Field(None, description="Model calls an episode; NULL leaves the task's own.")
    tokens: Positive | None = Field(None, description="Sampled tokens an episode; NULL sets none.")
    seconds: Annotated[float, Field(gt=0)] = Field(120.0, description="Seconds of the agent phase.")


class Harness(Section):
    """Which harness drives an episode and how."""

    name: Literal["mini_swe_agent", "pi"] = Field("mini_swe_agent", description="Module below openforge/harnesses.")
    config: str | None = Field(None, description="mini_swe_agent's YAML, a path from the project's root; the harness's own default without one.", json_schema_extra=only_if(name="mini_swe_agent"))
    launch: Literal["fork", "command"] = Field("fork", description="mini_swe_agent: forked from a warm process, or its shipped command started anew.", json_schema_extra=only_if(name="mini_swe_agent"))


class Rollout(Section):
    """How episodes are run."""

    n: Positive = Field(8, description="Rollouts a group.")
    shards: Annotated[int, Field(ge=1, le=9999)] = Field(1, description="Jobs that an iteration's rollouts are cut into.")
    concurrency: Positive = Field(16, description="Episodes in flight a shard.")
    attempts: Positive = Field(2, description="Attempts a rollout at most, when infrastructure fails.")
    quorum: Share = Field(0.75, description="Share of an iteration's rollouts that must end with a reward, or score stops the run.")
    sandbox: Literal["local"] = Field("local", description="Sandbox backend.")
    network: Literal["proxy", "none"] = Field("proxy", description="What a sandbox reaches: the proxy, or nothing.")
    keep_artifacts: NonNegative = Field(10, description="Work folders and harness logs kept a shard (the first ones).")


class Server(Section):
    """The vLLM server of the policy."""

    url: str | None = Field(None, description="Attach to an OpenAI-compatible server instead of starting one (evaluation only).")
    device: Literal["cpu", "gpu"] = Field("cpu", description="Which vLLM build and flags.")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Weights and activations.")
    max_model_len: Positive = Field(2048, description="Context window in tokens.")
    max_num_seqs: Positive = Field(64, description="Sequences in flight.")
    block_size: Positive = Field(32, description="KV-cache block; on CPU 32 reuses short prompts best and 16 is refused.")
    kv_cache_gb: Positive = Field(1, description="KV cache in GB (VLLM_CPU_KVCACHE_SPACE).", json_schema_extra=only_if(device="cpu"))
    tensor_parallel_size: Positive = Field(1, description="GPUs a replica.", json_schema_extra=only_if(device="gpu"))
    chat_template: str | None = Field(None, description="Jinja file, a path from the project's root; the model's own without one.")
    tool_call_parser: str | None = Field(None, description="vLLM's tool parser, e.g. hermes; native tool calls are off without one.")
    warm: bool = Field(True, description="Keep the server between the jobs of one machine, weights swapped by lease.")
    start_seconds: Annotated[float, Field(gt=0)] = Field(300.0, description="Seconds until a server must be healthy.")


class RolloutCorrection(Section):
    bypass_mode: bool = Field(False, description="Take the recorded logprobs as old logprobs instead of recomputing them with checkpoint k-1.")


class Algorithm(Section):
    """Credit (veRL's `algorithm`)."""

    adv_estimator: Literal["grpo"] = Field("grpo", description="Advantage estimator.")
    norm_adv_by_std_in_grpo: bool = Field(True, description="Divide a group's advantages by its standard deviation.")
    rollout_correction: RolloutCorrection = Field(default_factory=RolloutCorrection, description="Where old logprobs come from.")


class Optim(Section):
    lr: Annotated[float, Field(gt=0)] = Field(1e-6, description="Learning rate (constant).")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.01, description="AdamW's weight decay.")
    betas: tuple[float, float] = Field((0.9, 0.999), description="AdamW's betas.", strict=False)
    clip_grad: Annotated[float, Field(gt=0)] = Field(1.0, description="Gradient norm clip.")


class Actor(Section):
    """The policy's update (veRL's `actor_rollout_ref.actor`)."""

    optim: Optim = Field(default_factory=Optim, description="Optimizer.")
    ppo_mini_batch_size: Positive = Field(64, description="Training rows an optimizer step.")
    ppo_epochs: Positive = Field(1, description="Passes over an iteration's rows.")
    ppo_max_token_len_per_gpu: Positive = Field(16384, description="Tokens of a micro-batch; a row must fit.")
    clip_ratio_low: Annotated[float, Field(gt=0)] = Field(0.2, description="Lower PPO clip.")
    clip_ratio_high: Annotated[float, Field(gt=0)] = Field(0.2, description="Upper PPO clip.")
    clip_ratio_c: Annotated[float, Field(gt=1)] = Field(3.0, description="Dual clip for negative advantages.")
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = Field("token-mean", description="How token losses are added up.")
    entropy_coeff: float = Field(0.0, description="Entropy bonus.")
    use_shared_prefix: bool = Field(True, description="Compute a prefix that several rows share once (CPU; exact to rounding).")
    data_loader_seed: int = Field(1, description="Seed of the mini-batch permutation.")


class Trainer(Section):
    """The training job (veRL's `trainer`)."""

    device: Literal["cpu", "gpu"] = Field("cpu", description="Which software environment and engine settings.")
    nproc_per_node: Positive = Field(1, description="Processes that torchrun starts.")
    threads: Positive = Field(2, description="Threads a process.", json_schema_extra=only_if(device="cpu"))
    max_actor_ckpt_to_keep: Positive = Field(1, description="Optimizer states kept; older ones become tombstones. Weights are all kept.")


class Cell(Section):
    """One evaluation cell: the same policy under one split, harness, window and sampling."""

    name: Name = Field(description="Name of the cell, part of its path.")
    split: str = Field("heldout", description="Split that is evaluated.")
    tasks: Positive | None = Field(None, description="First so many tasks of the seeded order; all without it.")
    n: Positive = Field(1, description="Samples a task.")
    harness: Harness = Field(default_factory=Harness, description="Harness of the cell.")
    sampling: Sampling = Field(default_factory=Sampling, description="Sampling of the cell.")
    server: Server | None = Field(None, description="Another window, template or tool parser than the run's.")
    limits: Limits | None = Field(None, description="Other limits than the run's.")
    concurrency: Positive | None = Field(None, description="Episodes in flight; the run's without it.")
    at: Literal["first_and_last", "last", "every"] = Field("first_and_last", description="Checkpoints of a training run that the cell is run on.")


class _Common(Section):
    model: str = Field(description="A model folder, a hub id@revision, or the bundled smollm2-135m-instruct or tiny-random.")
    seed: int = Field(0, description="Seed of draws and rollouts.")
    environment: str = Field("claw_eval", description="Environment of the tasks.")
    tasks: Tasks = Field(description="Raw tasks.")
    rollout: Rollout = Field(default_factory=Rollout, description="Running episodes.")
    harness: Harness = Field(default_factory=Harness, description="Harness of training episodes and default of cells.")
    limits: Limits = Field(default_factory=Limits, description="Limits of an episode.")
    server: Server = Field(default_factory=Server, description="Policy server.")
    cells: tuple[Cell, ...] = Field((), description="Evaluation cells.", strict=False)


class RunConfig(_Common):
    """config/RUN.yaml: a training run."""

    iterations: NonNegative = Field(description="Iterations N; raise it to go on.")
    lag: Annotated[int, Field(ge=0, le=1)] = Field(0, description="0: on policy. 1: the rollouts of k+1 run beside the training of k.")
    data: Data = Field(default_factory=Data, description="Drawing of tasks.")
    sampling: Sampling = Field(default_factory=Sampling, description="Sampling of training episodes.")
    algorithm: Algorithm = Field(default_factory=Algorithm, description="Credit.")
    actor: Actor = Field(default_factory=Actor, description="The policy's update.")
    trainer: Trainer = Field(default_factory=Trainer, description="The training job.")


class EvalConfig(_Common):
    """config/eval_SUITE.yaml: an evaluation that never trains."""

    policy: str | None = Field(None, description="A model folder, hub id@revision, URL, or RUN@k; the config's model without one.")


@dataclass(frozen=True)
class Loaded:
    """A validated configuration, with the origin of every value by dotted key."""

    run: str
    config: RunConfig | EvalConfig
    origins: dict[str, str]


def _fields(model: type[BaseModel]) -> dict[str, Any]:
    return dict(model.model_fields)


def _section(annotation: Any) -> type[BaseModel] | None:
    """The section class inside an annotation such as `Server | None` or `tuple[Cell, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for arg in get_args(annotation):
        found = _section(arg)
        if found is not None:
            return found
    return None


def _check(model: type[BaseModel], data: Any, where: str, source: str) -> None:
    """Unknown and ineffective keys, before pydantic sees the data."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"{source}: {where or 'the file'} must be a mapping of keys, not {_show(data)}")
    fields = _fields(model)
    for key, value in data.items():
        dotted = f"{where}.{key}" if where else str(key)
        if key not in fields:
            raise ConfigError(f"{source}: unknown key {dotted!r}{_nearest(str(key), where, fields)}")
        extra = fields[key].json_schema_extra or {}
        for sibling, allowed in extra.get("only_if", {}).items():
            actual = data.get(sibling, fields[sibling].default)
            if actual not in allowed:
                raise ConfigError(
                    f"{source}: key {dotted!r} has no effect while {where + '.' if where else ''}{sibling} is "
                    f"{_show(actual)}; remove it or set {sibling} to {' or '.join(map(_show, allowed))}"
                )
        sub = _section(fields[key].annotation)
        if sub is None or value is None:
            continue
        if isinstance(value, (list, tuple)):
            for i, item in enumerate(value):
                _check(sub, item, f"{dotted}[{i}]", source)
        else:
            _check(sub, value, dotted, source)


def _nearest(key: str, where: str, fields: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(key, list(fields), n=1, cutoff=0.5)
    prefix = f"{where}." if where else ""
    if close:
        return f"; did you mean {prefix + close[0]!r}?"
    return f"; known keys here: {', '.join(fields)}"


def _show(v: Any) -> str:
    return json.dumps(v, default=str)


def _origins(model: BaseModel, given: Any, source: Mapping[str, Any], where: str, out: dict[str, str]) -> None:
    for key in type(model).model_fields:
        dotted = f"{where}.{key}" if where else key
        value = getattr(model, key)
        here = given.get(key, PydanticUndefined) if isinstance(given, Mapping) else PydanticUndefined
        mark = source.get(key, {}) if isinstance(source, Mapping) else source
        if isinstance(value, BaseModel):
            _origins(value, here if isinstance(here, Mapping) else {}, mark, dotted, out)
        elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
            for i, item in enumerate(value):
                sub = here[i] if isinstance(here, (list, tuple)) else {}
                mk = mark[i] if isinstance(mark, list) else mark
                _origins(item, sub, mk, f"{dotted}[{i}]", out)
        else:
            out[dotted] = "default" if here is PydanticUndefined else str(mark)


def _marked(data: Any, mark: str) -> Any:
    """The shape of `data` with every leaf replaced by `mark`."""
    if isinstance(data, Mapping):
        return {k: _marked(v, mark) for k, v in data.items()}
    if isinstance(data, list) and data and isinstance(data[0], Mapping):
        return [_marked(v, mark) for v in data]
    return mark


def _merge(base: Any, over: Any) -> Any:
    if isinstance(base, Mapping) and isinstance(over, Mapping):
        return {**base, **{k: _merge(base[k], v) if k in base else v for k, v in over.items()}}
    return over


def _plain(data: Any) -> Any:
    """Snakemake hands nested overrides over as its own dict and list types."""
    if isinstance(data, Mapping):
        return {str(k): _plain(v) for k, v in data.items()}
    if isinstance(data, (list, tuple)):
        return [_plain(v) for v in data]
    return data


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML mapping without repeated keys; `ConfigError` with the place otherwise."""

    class Loader(yaml.SafeLoader):
        pass

    def mapping(loader: Any, node: yaml.MappingNode) -> dict[Any, Any]:
        seen: dict[Any, Any] = {}
        for k, v in node.value:
            key = loader.construct_object(k, deep=True)
            if key in seen:
                raise ConfigError(f"{path}: key {key!r} stands twice (line {k.start_mark.line + 1})")
            seen[key] = loader.construct_object(v, deep=True)
        return seen

    Loader.add_constructor("tag:yaml.org,2002:map", mapping)
    # YAML 1.1 reads 1e-5 as a string; every user of this field writes learning rates so.
    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
        list("-+0123456789"),
    )
    try:
        data = yaml.load(path.read_text(), Loader)
    except FileNotFoundError:
        known = ", ".join(sorted(p.stem for p in path.parent.glob("*.yaml"))) or "none"
        raise ConfigError(f"{path} does not exist; configurations there: {known}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path} is not readable YAML: {' '.join(str(e).split())}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a mapping of keys, not {_show(data)}")
    return data


def load(run: str, root: Path, overrides: Mapping[str, Any] | None = None) -> Loaded:
    """Load config/<run>.yaml below `root`, with overrides (snakemake --config) laid over it.

    Raises:
        ConfigError: one sentence naming the file (or --config) and the key.
    """
    if not RUN_NAME.fullmatch(run):
        raise ConfigError(f"run name {run!r} must match [a-z0-9_]+")
    path = root / "config" / f"{run}.yaml"
    label = f"config/{run}.yaml"
    data = read_yaml(path)
    model: type[RunConfig] | type[EvalConfig] = EvalConfig if run.startswith("eval_") else RunConfig
    _check(model, data, "", label)
    marks = _marked(data, label)
    over = _plain(overrides or {})
    if over:
        merged = _merge(data, over)
        # Checked together: an override can make a key of the file ineffective.
        _check(model, merged, "", f"--config over {label}")
        data, marks = merged, _merge(marks, _marked(over, "--config"))
    try:
        config = model.model_validate(data)
    except ValidationError as e:
        raise ConfigError(_sentence(e, label if not over else f"--config over {label}")) from None
    _cross(config, label)
    origins: dict[str, str] = {}
    _origins(config, data, marks, "", origins)
    return Loaded(run, config, origins)


def _sentence(e: ValidationError, label: str) -> str:
    err = e.errors()[0]
    # A union's branch name is no key of the user's: keep the parts that are.
    key = ".".join(str(p) for p in err["loc"])
    msg = err["msg"][0].lower() + err["msg"][1:]
    if err["type"] == "missing":
        return f"{label}: key {key!r} is required"
    return f"{label}: key {key!r} is {_show(err['input'])}, but {msg}"


def _cross(config: RunConfig | EvalConfig, label: str) -> None:
    names = [c.name for c in config.cells]
    for n in names:
        if names.count(n) > 1:
            raise ConfigError(f"{label}: two cells are named {n!r}; a cell's name is its path")
        if n == "train":
            raise ConfigError(f"{label}: a cell cannot be named 'train', the name of the training rollouts")
    if isinstance(config, RunConfig):
        if config.server.url is not None:
            raise ConfigError(f"{label}: server.url is for evaluation; training swaps weights in its own server")
        s = config.sampling
        off = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        for key, value in off.items():
            if getattr(s, key) != value:
                raise ConfigError(
                    f"{label}: sampling.{key} must be {value} in training: recorded logprobs would be of another "
                    "distribution than the one trained"
                )
        if s.temperature == 0:
            raise ConfigError(f"{label}: sampling.temperature must be above 0 in training; a greedy group has no spread")
        if config.rollout.n < 2 and config.iterations:
            raise ConfigError(f"{label}: rollout.n must be at least 2; an advantage needs a group")
        if config.lag and config.algorithm.rollout_correction.bypass_mode is False:
            pass  # decoupled: old logprobs are recomputed with checkpoint k-1


def runs(root: Path) -> list[str]:
    """Names of the configurations in config/, sorted."""
    return sorted(p.stem for p in (root / "config").glob("*.yaml"))


def describe(loaded: Loaded) -> str:
    """`openforge config RUN`: every value with its origin, one line a key."""
    values = _flatten(loaded.config.model_dump(mode="json"))
    width = max(map(len, values))
    return "\n".join(f"{k:{width}}  {_show(v):24}  {loaded.origins.get(k, 'default')}" for k, v in values.items())


def _flatten(data: Any, where: str = "") -> dict[str, Any]:
    if isinstance(data, dict):
        out: dict[str, Any] = {}
        for k, v in data.items():
            out |= _flatten(v, f"{where}.{k}" if where else k)
        return out
    if isinstance(data, list) and data and isinstance(data[0], dict):
        out = {}
        for i, v in enumerate(data):
            out |= _flatten(v, f"{where}[{i}]")
        return out
    return {where: data}


def schema() -> dict[str, Any]:
    """JSON schema of both kinds of file (config/schema.json)."""
    from pydantic.json_schema import models_json_schema

    _, top = models_json_schema([(RunConfig, "validation"), (EvalConfig, "validation")], title="OpenForge configuration")
    top["anyOf"] = [{"$ref": "#/$defs/RunConfig"}, {"$ref": "#/$defs/EvalConfig"}]
    return top


def markdown() -> str:
    """docs/config.md."""
    out = [
        "# Configuration",
        "",
        "Rendered from `openforge/config.py` by `make docs`; a test compares. A run is `config/RUN.yaml`, a suite "
        "`config/eval_SUITE.yaml`; `openforge config RUN` prints every value with its origin. Lay values over a file "
        "with `snakemake TARGET --config iterations=8 'actor={optim: {lr: 1e-5}}'`.",
        "",
    ]
    for title, model in (("A training run", RunConfig), ("An evaluation suite", EvalConfig)):
        out += [f"## {title}", "", "| key | type | default | meaning |", "|---|---|---|---|", *_doc_rows(model, ""), ""]
    return "\n".join(out)


def _doc_rows(model: type[BaseModel], where: str) -> list[str]:
    rows = []
    for key, f in model.model_fields.items():
        dotted = f"{where}.{key}" if where else key
        sub = _section(f.annotation)
        doc = f.description or ""
        cond = (f.json_schema_extra or {}).get("only_if", {}) if isinstance(f.json_schema_extra, dict) else {}
        if cond:
            doc += " Only with " + ", ".join(f"{k} = {' or '.join(map(str, v))}" for k, v in cond.items()) + "."
        if sub is not None:
            many = get_origin(f.annotation) is tuple
            name = f"{dotted}[]" if many else dotted
            rows.append(f"| **{name}** | | {'none' if not f.is_required() and (many or f.default is None) else ''} | {doc} |")
            if where == "" or sub not in (Harness, Sampling, Server, Limits):
                rows += _doc_rows(sub, name)
        else:
            default = "required" if f.is_required() else f"`{_show(f.default)}`"
            rows.append(f"| {dotted} | {_type(f.annotation)} | {default} | {doc} |")
    return rows


def _type(a: Any) -> str:
    if get_origin(a) is Literal:
        return " \\| ".join(map(str, get_args(a)))
    if a is type(None):
        return "null"
    if isinstance(a, type):
        return a.__name__
    if get_origin(a) is Annotated:
        return _type(get_args(a)[0])
    return " \\| ".join(_type(x) for x in get_args(a) if x is not Ellipsis)
