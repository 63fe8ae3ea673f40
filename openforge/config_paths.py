"""What a configuration names outside itself: files, folders and modules exist, and a run's past fits its present."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from openforge import environments, harnesses
from openforge.config import ConfigError, EvalConfig, Harness, RunConfig, Server, Tasks
from openforge.config_reading import merge
from openforge.policy.prepare import BUNDLED, ModelError, check_folder
from openforge.tables import write_beside
from openforge.tasks import GENERATED, SOURCES, TasksError, layout
from openforge.tasks.table import verifier_files

# What a run is made with: changed under finished iterations, its checkpoints would be of two runs.
FROZEN = ("model", "seed", "environment", "tasks", "lag", "algorithm", "data", "reward")
# Where the sandboxes' server is, as Orchard's own client reads it.
SANDBOX_URL = "SANDBOX_BASE_URL"
# No iteration of it can be made anew with another one of these: checkpoint 0 and the tasks are what all begin from.
IDENTITY = ("model", "environment", "tasks")


def check(run: str, config: RunConfig | EvalConfig, root: Path) -> None:
    """Refuse what no job could find, before any job.

    Raises:
        ConfigError: one sentence that names the key, and the file or folder that does not exist.
    """
    label = f"config/{run}.yaml"
    for key, path in _files(config):
        if path is not None and not (root / path).is_file():
            raise ConfigError(f"{label}: {key} {path!r}: {root / path} does not exist")
    for key, harness, server in _harnesses(config):
        told = unfit(harness, server)
        if told is not None:
            raise ConfigError(f"{label}: {key}: {told}")
    _tasks(label, config.tasks, root)
    _splits(label, config)
    _model(label, "model", config.model, root, needs_template(config))
    for suite in config.suites if isinstance(config, EvalConfig) else ():
        if not suite.startswith("eval_") or suite == run or not (root / "config" / f"{suite}.yaml").is_file():
            raise ConfigError(f"{label}: suites names {suite!r}; it must be another evaluation, config/eval_NAME.yaml")
    if isinstance(config, EvalConfig) and config.policy is not None and "://" not in config.policy:
        _model(label, "policy", config.policy, root, needs_template(config))
    try:
        environments.load(config.environment)
    except environments.UnknownEnvironment as e:
        raise ConfigError(f"{label}: {e}") from None


def unfit(harness: Harness, server: Server) -> str | None:
    """Why the window holds not even the harness's first prompt, as a sentence; None if it may.

    A harness that counts tokens itself would end without asking once, which looks like the agent's own failure.
    """
    tokens = harnesses.start_tokens(harness.name, harness.model_dump(exclude={"name"}))
    # Counted by one model's tokenizer: another's may need some fewer.
    if tokens is None or server.max_model_len >= 0.75 * tokens:
        return None
    return (
        f"{harness.name} begins with about {tokens} tokens, but server.max_model_len is {server.max_model_len}; raise "
        "it, or take a harness or options with a shorter prompt (docs/harnesses.md)"
    )


def _harnesses(config: RunConfig | EvalConfig) -> Iterator[tuple[str, Harness, Server]]:
    if isinstance(config, RunConfig) and config.iterations:
        for key, harness in mixed(config):
            yield key, harness, config.server
    for i, cell in enumerate(config.cells):
        yield f"cells[{i}].harness", cell.harness, cell.server or config.server


def mixed(config: RunConfig | EvalConfig) -> list[tuple[str, Harness]]:
    """The harnesses of training episodes by their keys."""
    mix = config.harness_mix if isinstance(config, RunConfig) else ()
    return [(f"harness_mix[{i}]", h) for i, h in enumerate(mix)] or [("harness", config.harness)]


def needs_template(config: RunConfig | EvalConfig) -> bool:
    """Whether a server of the configuration is without a chat template of its own, so that the model must have one."""
    servers = [cell.server or config.server for cell in config.cells]
    if isinstance(config, RunConfig) and config.iterations:
        servers.append(config.server)
    return any(s.chat_template is None and s.url is None for s in servers)


def _tasks(label: str, tasks: Tasks, root: Path) -> None:
    if tasks.source in GENERATED:
        return
    kind = layout.kind(root / tasks.source)
    if kind is None:
        raise ConfigError(f"{label}: tasks.source {tasks.source!r} must be {SOURCES}; {root / tasks.source} is none")
    for key in ("columns", "verifier"):
        if kind == "folders" and key in tasks.model_fields_set:
            raise ConfigError(f"{label}: key 'tasks.{key}' has no effect on task folders, which {tasks.source!r} holds")
    try:
        if tasks.verifier is not None:
            verifier_files(tasks.verifier, root)
    except TasksError as e:
        raise ConfigError(f"{label}: {e}") from None


def check_variables(run: str, config: RunConfig | EvalConfig) -> None:
    """Refuse a variable that is needed and not set, before any job.

    Raises:
        ConfigError: names the key and the variable; nothing of a value.
    """
    sandbox, judge = config.sandbox, config.judge
    names = {
        "server": config.server.api_key_env,
        "judge": judge.api_key_env if judge else None,
        # Without a key by default: a server may ask for none.
        "sandbox": sandbox.api_key_env if "api_key_env" in sandbox.model_fields_set else None,
    }
    for section, name in names.items():
        if name is not None and not os.environ.get(name, "").strip():
            raise ConfigError(
                f"config/{run}.yaml: {section}.api_key_env names the environment variable {name}, which is not set: "
                "export it"
            )
    if sandbox.backend == "orchard" and sandbox.url is None and not os.environ.get(SANDBOX_URL, "").strip():
        raise ConfigError(
            f"config/{run}.yaml: sandbox.backend is orchard, but neither sandbox.url nor the environment variable "
            f"{SANDBOX_URL} says where its server is; set one"
        )


def _files(config: RunConfig | EvalConfig) -> Iterator[tuple[str, str | None]]:
    for key, harness in mixed(config):
        yield from _harness_files(key, harness)
    yield "server.chat_template", config.server.chat_template
    if config.sandbox.backend == "local":
        yield "sandbox.image", config.sandbox.image
    for i, cell in enumerate(config.cells):
        yield from _harness_files(f"cells[{i}].harness", cell.harness)
        if cell.server is not None:
            yield f"cells[{i}].server.chat_template", cell.server.chat_template


def _harness_files(key: str, harness: Harness) -> Iterator[tuple[str, str | None]]:
    yield f"{key}.config", harness.config
    yield f"{key}.instructions", harness.instructions
    yield f"{key}.binary", harness.binary


def _splits(label: str, config: RunConfig | EvalConfig) -> None:
    """Splits of generated tasks are known beforehand; those of a folder only when it has been read."""
    tasks = config.tasks
    if tasks.source not in GENERATED:
        return
    sizes = {"train": tasks.train, "heldout": tasks.heldout, "unseen": tasks.unseen}
    uses = [(f"cells[{i}].split", c.split, c.tasks) for i, c in enumerate(config.cells)]
    if isinstance(config, RunConfig) and config.iterations:
        uses.append(("data.train_split", config.data.train_split, None))
    for key, split, count in uses:
        if not sizes.get(split):
            known = ", ".join(f"{s} ({n})" for s, n in sizes.items() if n) or "none"
            raise ConfigError(f"{label}: {key} is {split!r}, a split without tasks; those of tasks are: {known}")
        if count is not None and count > sizes[split]:
            raise ConfigError(
                f"{label}: {key.removesuffix('.split')}.tasks is {count}, but split {split!r} has {sizes[split]} "
                f"(tasks.{split})"
            )


def _model(label: str, key: str, value: str, root: Path, template: bool) -> None:
    if (root / value).is_dir():
        try:
            check_folder(root / value, template)
        except ModelError as e:
            raise ConfigError(f"{label}: {key} {value!r}: {e}") from None
        return
    # With an @ it is a hub id or RUN@k: the one is looked up when it is prepared, the other has a check of its own.
    if value in BUNDLED or "@" in value:
        return
    raise ConfigError(
        f"{label}: {key} {value!r} must be a model folder, a hub id with its revision ({value}@REVISION), or one of "
        f"{', '.join(BUNDLED)}"
    )


def frozen(config: RunConfig | EvalConfig) -> dict[str, Any]:
    """The values of the keys that a run is made with."""
    data = config.model_dump(mode="json")
    return {k: data[k] for k in FROZEN if k in data}


def freeze(config: RunConfig | EvalConfig, run_dir: Path) -> None:
    """Write down what the run is made with; its first job does."""
    write_frozen(frozen(config), run_dir)


def write_frozen(values: dict[str, Any], run_dir: Path) -> None:
    write_beside(run_dir / "frozen.json", json.dumps(values, indent=1) + "\n")


def check_frozen(run: str, config: RunConfig | EvalConfig, run_dir: Path, anew: bool = False) -> None:
    """Refuse to go on with a run under other inputs than it was made with.

    Args:
        anew: the command makes iterations of it anew (from_iteration), under new values of all but IDENTITY.

    Raises:
        ConfigError: names the key, both values, and what to do.
    """
    file = run_dir / "frozen.json"
    if not file.exists():
        return
    try:
        then, now = _today(json.loads(file.read_text()), config), frozen(config)
    except (ValueError, TypeError, OSError) as e:
        raise ConfigError(
            f"{file} cannot be read ({e}), so nobody can say what run {run} was made with; restore it, or remove "
            f"results/{run} to begin anew"
        ) from None
    for key in IDENTITY if anew else now:
        if then.get(key) == now[key]:
            continue
        do = f"copy config/{run}.yaml to another run name"
        if key in IDENTITY or isinstance(config, EvalConfig):
            do += f", or remove results/{run} to begin anew"
        else:
            k = last_finished(run_dir) + 1
            do += (
                f", or make it anew from an iteration on, 1 to {k} (what stands of them moves to "
                f"results/{run}/superseded): snakemake train_{run} --config from_iteration={k}"
            )
        raise ConfigError(
            f"run {run} was made with {key} = {json.dumps(then.get(key))}, now it is {json.dumps(now[key])}: {do}"
        )


def _today(then: dict[str, Any], config: RunConfig | EvalConfig) -> dict[str, Any]:
    """What a run was made with, in today's keys: one that did not exist then had what its default says now."""
    filled = dict(then)
    for key in FROZEN:
        field = type(config).model_fields.get(key)
        if field is not None and field.default_factory is not None:
            defaults: Any = field.get_default(call_default_factory=True)
            filled[key] = merge(defaults.model_dump(mode="json"), then.get(key, {}))
    return filled


def last_finished(run_dir: Path) -> int:
    """The newest checkpoint that stands; 0 where nothing was trained."""
    return max((int(p.parent.name) for p in run_dir.glob("checkpoints/[0-9]*/checkpoint.json")), default=0)
