"""What a configuration names outside itself: files, folders and modules exist, and a run's past fits its present."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from openforge.config import ConfigError, EvalConfig, RunConfig, Tasks
from openforge.policy.prepare import BUNDLED
from openforge.tables import write_beside
from openforge.tasks import GENERATED, SOURCES, TasksError, layout
from openforge.tasks.table import verifier_files

# What a run is made with: changed under finished iterations, its checkpoints would be of two runs.
FROZEN = ("model", "seed", "environment", "tasks", "lag", "algorithm", "data")


def check(run: str, config: RunConfig | EvalConfig, root: Path) -> None:
    """Refuse what no job could find, before any job.

    Raises:
        ConfigError: one sentence that names the key, and the file or folder that does not exist.
    """
    label = f"config/{run}.yaml"
    for key, path in _files(config):
        if path is not None and not (root / path).is_file():
            raise ConfigError(f"{label}: {key} {path!r}: {root / path} does not exist")
    _tasks(label, config.tasks, root)
    _model(label, "model", config.model, root)
    if isinstance(config, EvalConfig) and config.policy is not None and "://" not in config.policy:
        _model(label, "policy", config.policy, root)
    name = config.environment
    module = name if "." in name else f"openforge.environments.{name}.env"
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise ConfigError(f"{label}: environment {name!r}: there is no module {module}")


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
    """Refuse a secret's variable that is not set, before any job.

    Raises:
        ConfigError: names the key and the variable; nothing of a value.
    """
    name = config.server.api_key_env
    if name is not None and not os.environ.get(name, "").strip():
        raise ConfigError(
            f"config/{run}.yaml: server.api_key_env names the environment variable {name}, which is not set: export it"
        )


def _files(config: RunConfig | EvalConfig) -> Iterator[tuple[str, str | None]]:
    yield "harness.config", config.harness.config
    yield "server.chat_template", config.server.chat_template
    for i, cell in enumerate(config.cells):
        yield f"cells[{i}].harness.config", cell.harness.config
        if cell.server is not None:
            yield f"cells[{i}].server.chat_template", cell.server.chat_template


def _model(label: str, key: str, value: str, root: Path) -> None:
    # With an @ it is a hub id or RUN@k: the one is looked up when it is prepared, the other has a check of its own.
    if value in BUNDLED or "@" in value or (root / value).is_dir():
        return
    raise ConfigError(
        f"{label}: {key} {value!r} must be a model folder, a hub id with its revision ({value}@REVISION), or one of "
        f"{', '.join(BUNDLED)}"
    )


def _frozen(config: RunConfig | EvalConfig) -> dict[str, Any]:
    data = config.model_dump(mode="json")
    return {k: data[k] for k in FROZEN if k in data}


def freeze(config: RunConfig | EvalConfig, run_dir: Path) -> None:
    """Write down what the run is made with; its first job does."""
    write_beside(run_dir / "frozen.json", json.dumps(_frozen(config), indent=1) + "\n")


def check_frozen(run: str, config: RunConfig | EvalConfig, run_dir: Path) -> None:
    """Refuse to go on with a run under other inputs than it was made with.

    Raises:
        ConfigError: names the key, both values, and what to do.
    """
    file = run_dir / "frozen.json"
    if not file.exists():
        return
    then, now = json.loads(file.read_text()), _frozen(config)
    for key in now:
        if then.get(key) != now[key]:
            raise ConfigError(
                f"run {run} was made with {key} = {json.dumps(then.get(key))}, now it is {json.dumps(now[key])}: "
                f"copy config/{run}.yaml to another run name, or remove results/{run} to begin anew"
            )
