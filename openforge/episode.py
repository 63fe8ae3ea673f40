"""`openforge episode`: what the command line names, as a rollout row, a policy and a server; or a replay."""

from __future__ import annotations

import argparse
import difflib
import hashlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from openforge import config as typed
from openforge import config_paths, harnesses, plan, store, tables
from openforge.config import Cell, EvalConfig, Harness, Limits, RunConfig, Sampling, Server, Tasks
from openforge.environments.claw_eval.folder import FolderError, read_folder
from openforge.eval import policies
from openforge.policy import models
from openforge.policy.lease import PolicyMismatch, ServerError
from openforge.policy.prepare import BUNDLED, ModelError, check_folder
from openforge.policy.weights import CheckpointError, read_checkpoint
from openforge.proxy.client import ProxyError
from openforge.rollout import by_hand, replay
from openforge.sandboxes import SandboxError
from openforge.software import SoftwareMissing

INTERRUPTED = 130
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+@[\w.-]+")


class BadInput(ValueError):
    """What the command line names does not exist or cannot be used; one sentence."""


@dataclass(frozen=True)
class Settings:
    """How an episode is run where the command line does not say it: a run's configuration, or one of its cells."""

    config: RunConfig | EvalConfig
    harness: Harness | None
    sampling: Sampling
    limits: Limits
    server: Server


@dataclass(frozen=True)
class Policy:
    """A policy to be served: a checkpoint's folder, a model to be prepared into one, or None for an endpoint."""

    folder: Path | None
    model: str = ""


def run(args: argparse.Namespace, root: Path) -> int:
    """The verb; 0 if the episode ended with a verdict (of a replay: as recorded), 1 otherwise.

    Raises:
        BadInput, ConfigError, StoreError, TableError: bad input.
    """
    # A user's environment is named by its import path from the project's root.
    sys.path.append(str(root))
    _check_words(args)
    try:
        return _replayed(args, root) if args.replay else _driven(args, root)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        e = error
        while isinstance(e, ExceptionGroup):
            e = e.exceptions[0]
        if not isinstance(e, _FAILED):
            raise
        print(f"error: {e}", file=sys.stderr)
        return 1


_FAILED = (ServerError, PolicyMismatch, ProxyError, SandboxError, SoftwareMissing, ModelError, harnesses.HarnessError)


def _check_words(args: argparse.Namespace) -> None:
    if args.replay:
        given = {"--task": args.task, "--model": args.model, "--harness": args.harness, "--limits": args.limits}
        wrong = [k for k, v in (given | {"--harness-config": args.harness_config}).items() if v]
        if wrong:
            raise BadInput(f"{wrong[0]} has no effect with --replay: what is replayed is the record's")
        if not args.run:
            raise BadInput("--replay needs --run RUN, the run whose episode it is")
    elif not args.task:
        raise BadInput("--task is needed (a task folder, or with --run a task's id), or --replay EPISODE_ID")
    if args.cell and not args.config:
        raise BadInput("--cell needs --config RUN, the configuration whose cell it is")
    if args.json is not None and not Path(args.json).absolute().parent.is_dir():
        raise BadInput(f"--json {args.json}: the folder {Path(args.json).absolute().parent} does not exist")


# ---- an episode ------------------------------------------------------------------------------------------------
def _driven(args: argparse.Namespace, root: Path) -> int:
    settings = _settings(args.config, args.cell, root)
    if args.config:
        config_paths.check(args.config, settings.config, root)
    task = _task(args, settings, root)
    harness = _harness(args, settings)
    limits = settings.limits.model_copy(update=_limits(args.limits))
    model = args.model or getattr(settings.config, "policy", None) or settings.config.model
    if not model:
        raise BadInput("--model is needed, or --config RUN whose model is taken")
    policy, server = _policy(model, settings.server, root)
    told = config_paths.unfit(harness, server)
    if told is not None:
        raise BadInput(told)
    cell = Cell(name=by_hand.CELL, split=task["split"], harness=harness, sampling=settings.sampling, limits=limits)
    config = settings.config.model_copy(update={"cells": (cell,)})
    (row,) = plan.eval_table(by_hand.CELL, config, [task], cell, None, model)
    if server.url is None and server.tool_call_parser is None and harness.config is None:
        _say("note: server.tool_call_parser is not set, so native tool calls are off (--config RUN names settings)")
    folder = _prepared(policy, server, root)
    outcome = by_hand.run(row, config, folder, server, root, keep=args.keep, say=_say)
    for line in by_hand.summary(outcome):
        _say(line)
    if args.json is not None:
        tables.write_beside(args.json, outcome.text())
    return 0 if outcome.reward is not None else 1


def _say(line: str) -> None:
    print(line, flush=True)


def _settings(run: str | None, cell: str | None, root: Path) -> Settings:
    """The settings of a run's training, of one of its cells, or the defaults of each key."""
    if run is None:
        nothing = EvalConfig(model="", tasks=Tasks(source="demo"))
        return Settings(nothing, None, Sampling(), nothing.limits, nothing.server)
    config = typed.load(run, root).config
    if cell is not None:
        found = next((c for c in config.cells if c.name == cell), None)
        if found is None:
            known = ", ".join(c.name for c in config.cells) or "none"
            raise BadInput(f"config/{run}.yaml has no cell {cell!r}; its cells: {known}")
        own = found.server or config.server
        return Settings(config, found.harness, found.sampling, found.limits or config.limits, own)
    sampling = config.sampling if isinstance(config, RunConfig) else Sampling()
    # Of a mix its first harness, unless one is named.
    harness = plan.harness_of(config, 1, 1) if isinstance(config, RunConfig) else config.harness
    return Settings(config, harness, sampling, config.limits, config.server)


def _task(args: argparse.Namespace, settings: Settings, root: Path) -> dict[str, Any]:
    if not args.run:
        path = Path(args.task)
        if not path.is_dir():
            raise BadInput(f"--task {args.task}: there is no such task folder (a task's id needs --run RUN)")
        try:
            row = read_folder(path, split=by_hand.CELL)
        except FolderError as e:
            raise BadInput(str(e)) from None
        return row | ({"environment": settings.config.environment} if args.config else {})
    run_dir = _run_dir(args.run, root)
    if not (run_dir / "tasks.parquet").is_file():
        raise BadInput(f"run {args.run} has no tasks.parquet in {run_dir}; its first job writes it")
    rows = {r["task_id"]: r for r in tables.read_rows(run_dir / "tasks.parquet", tables.TASKS)}
    if args.task not in rows:
        close = difflib.get_close_matches(args.task, list(rows), n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"one of them is {next(iter(rows), 'none')!r}"
        raise BadInput(f"run {args.run} has no task {args.task!r}; it has {len(rows)}, {hint}")
    return rows[args.task]


def _run_dir(run: str, root: Path) -> Path:
    known = store.runs(root / "results")
    if run not in known:
        raise BadInput(f"there is no run {run!r} in results/; runs there: {', '.join(known) or 'none'}")
    return root / "results" / run


def _harness(args: argparse.Namespace, settings: Settings) -> Harness:
    """The harness named, with a run's options where it is the run's own."""
    own = settings.harness
    name = args.harness or (own.name if own is not None else None)
    if name is None:
        raise BadInput(
            f"--harness is needed, one of {', '.join(harnesses.NAMES)}, or --config RUN whose harness is taken"
        )
    if name not in harnesses.NAMES:
        raise BadInput(f"there is no harness {name!r}; harnesses: {', '.join(harnesses.NAMES)}")
    chosen = own if own is not None and own.name == name else Harness(name=name)
    if args.harness_config is None:
        return chosen
    if name != "mini_swe_agent":
        raise BadInput(f"--harness-config has no effect with {name}, which takes no configuration file")
    if not Path(args.harness_config).is_file():
        raise BadInput(f"--harness-config {args.harness_config}: there is no such file")
    return chosen.model_copy(update={"config": str(Path(args.harness_config).resolve())})


def _limits(words: list[str] | None) -> dict[str, Any]:
    """turns=4 tokens=500 seconds=60 as values of `Limits`."""
    given: dict[str, Any] = {}
    for word in words or ():
        key, equals, value = word.partition("=")
        if not equals or key not in Limits.model_fields:
            raise BadInput(f"--limits {word!r} must be KEY=VALUE with a key of {', '.join(Limits.model_fields)}")
        try:
            given[key] = getattr(Limits.model_validate({key: yaml.safe_load(value)}), key)
        except (ValidationError, yaml.YAMLError):
            raise BadInput(f"--limits {word!r}: {value!r} must be a number above 0") from None
    return given


def _policy(value: str, server: Server, root: Path) -> tuple[Policy, Server]:
    """What `--model` names, checked as far as it can be without a job, and its server."""
    if value.startswith(("http://", "https://")):
        return Policy(None), server.model_copy(update={"url": value})
    if server.url is not None:
        raise BadInput(f"--model {value}: the configuration's server.url is {server.url}, which serves its own model")
    if value in BUNDLED:
        return Policy(None, value), server
    folder = next((f for f in (Path(value), root / value) if f.is_dir()), None)
    if folder is not None:
        return _folder(folder.resolve()), server
    if HUB_ID.fullmatch(value):
        return Policy(None, value), server
    config = EvalConfig(model=value, policy=value, tasks=Tasks(source="demo"))
    ref = policies.reference(config)
    if ref.kind == "checkpoint":
        policies.check(config, root)
        return Policy(policies.checkpoint_file(ref, root).resolve().parent), server
    raise BadInput(
        f"--model {value!r} must be a model folder, a hub id with its revision (OWNER/NAME@REVISION), RUN@k, a URL, or "
        f"one of {', '.join(BUNDLED)}"
    )


def _folder(folder: Path) -> Policy:
    """A folder of weights: a checkpoint as it stands, any other one to be prepared."""
    try:
        check_folder(folder)
        if (folder / "checkpoint.json").exists():
            read_checkpoint(folder)
            return Policy(folder)
    except (ModelError, CheckpointError) as e:
        raise BadInput(f"--model: {e}") from None
    return Policy(None, str(folder))


def _prepared(policy: Policy, server: Server, root: Path) -> Path | None:
    """The folder that is served: results/.models/<slug> for a model, made on first use."""
    if policy.folder is not None or not policy.model:
        return policy.folder
    name = policy.model
    if Path(name).is_absolute():
        # The same folder with other weights is another model.
        files = sorted((f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in Path(name).iterdir() if f.is_file())
        name = f"{name}-{hashlib.sha256(repr(files).encode()).hexdigest()[:8]}"
    slug = policies.reference(EvalConfig(model=name, policy=name, tasks=Tasks(source="demo"))).slug
    folder = root / "results" / ".models" / f"{slug}-{server.device}-{server.dtype}"
    if not (folder / "checkpoint.json").is_file():
        _say(f"preparing {policy.model} in {folder}")
        models.prepare(policy.model, folder, device=server.device, dtype=server.dtype, root=root)
    return folder


# ---- a replay --------------------------------------------------------------------------------------------------
def _replayed(args: argparse.Namespace, root: Path) -> int:
    try:
        record = replay.read(_run_dir(args.run, root), args.replay)
    except replay.RecordError as e:
        raise BadInput(str(e)) from None
    row = record.rollout
    name = args.cell or (None if row["purpose"] == "train" else str(row["cell"]).split(".")[0])
    settings = _settings(args.config or args.run, name, root)
    # What the row does not hold: the window, which some harnesses are told.
    upstream = replay.Upstream(record, settings.server.max_model_len, _say)
    cell = Cell(name=by_hand.CELL)
    config = settings.config.model_copy(update={"cells": (cell,)})
    with replay.serving(upstream) as url:
        server = settings.server.model_copy(update={"url": url})
        outcome = by_hand.run(row, config, None, server, root, keep=args.keep, say=_say)
    same, verdict = replay.ends(record.episode, outcome.episode)
    for line in by_hand.summary(outcome):
        _say(line)
    _say(f"requests: {upstream.verdict()}")
    _say(f"verdict: {verdict}")
    for line in replay.versions(record.episode, outcome.episode):
        _say(f"another version: {line}")
    if args.json is not None:
        tables.write_beside(args.json, outcome.text())
    return 0 if upstream.same and same else 1
