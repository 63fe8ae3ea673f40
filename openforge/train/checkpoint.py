"""Checkpoint and state folders: written beside and renamed, carried over where nothing was trained, pruned.

Everything here runs in the core environment and in the training job alike (no torch).
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openforge.policy.weights import read_checkpoint, write_checkpoint
from openforge.tables import write_beside
from openforge.train.job import Job, TrainError

CARD = "checkpoint.json"
STATE_CARD = "state.json"
TOMBSTONE = "tombstone.json"
PROBE = "probe.json"


@contextmanager
def folder_beside(target: Path) -> Iterator[Path]:
    """A new folder next to `target` that takes its place on success and is removed on failure."""
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    beside.mkdir()
    try:
        yield beside
        old = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.old")
        if target.exists():
            os.rename(target, old)
        os.rename(beside, target)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def copy_companions(source: Path, target: Path) -> None:
    """Copy what belongs to a model beside its weights: config, tokenizer, templates, generation defaults."""
    for f in sorted(source.iterdir()):
        weights = f.name.endswith((".safetensors", ".safetensors.index.json"))
        if f.is_file() and not weights and f.name not in (CARD, PROBE):
            shutil.copyfile(f, target / f.name)


def write_card(folder: Path, job: Job, **note: Any) -> str:
    """checkpoint.json, the last file of a checkpoint folder; returns its policy_version."""
    card = write_checkpoint(folder, job.iteration, run=job.run, config_digest=job.config_digest, **note)
    return str(card["policy_version"])


def check_state(state: Path, checkpoint: Path, world: int | None) -> None:
    """Refuse a state that `world` processes (None: it does not matter how many) cannot resume from.

    Raises:
        TrainError: it is missing or a tombstone, of other weights, or written by another number of processes.
        CheckpointError: `checkpoint` is no checkpoint folder.
    """
    if (state / TOMBSTONE).exists():
        earlier = [p for p in sorted(state.parent.glob("[0-9]*")) if p.name < state.name]
        full = [p.name for p in earlier if (p / STATE_CARD).exists() and not (p / TOMBSTONE).exists()]
        nearest = f"the nearest full state before it is {full[-1]}" if full else "no full state is left before it"
        raise TrainError(f"the optimizer's state in {state} was pruned; {nearest}")
    if not (state / STATE_CARD).exists():
        raise TrainError(
            f"{state} holds no optimizer state ({STATE_CARD} is missing); train the iteration before again"
        )
    card = json.loads((state / STATE_CARD).read_text())
    version = read_checkpoint(checkpoint)["policy_version"]
    if card["policy_version"] != version:
        raise TrainError(
            f"the state in {state} belongs to policy {card['policy_version']}, but {checkpoint} is {version}"
        )
    if world is not None and card["world_size"] not in (world, 0):
        raise TrainError(
            f"the state in {state} was written by {card['world_size']} processes and loads on as many only; "
            f"set trainer.nproc_per_node to {card['world_size']}"
        )


def write_state_card(folder: Path, job: Job, version: str, world: int) -> None:
    """state.json: whose state it is. `world` 0: there is none yet (nothing was ever trained)."""
    card = {"iteration": job.iteration, "policy_version": version, "world_size": world}
    write_beside(folder / STATE_CARD, json.dumps(card, indent=1) + "\n")


def world_size(state: Path) -> int:
    """Processes that wrote a state; 0 where nothing was ever trained and it holds no optimizer."""
    return int(json.loads((state / STATE_CARD).read_text())["world_size"])


def carry_over(job: Job, reason: str) -> str:
    """Checkpoint k and state k where nothing was trained: hard links of k-1 with their own cards.

    Returns the policy_version, which names the new iteration and the old weights' digest.
    """
    source, target = Path(job.checkpoint_in), Path(job.checkpoint_out)
    before, after = None if job.state_in is None else Path(job.state_in), Path(job.state_out)
    world = 0
    if before is not None:
        check_state(before, source, None)
        world = world_size(before)
    with folder_beside(after) as s, folder_beside(target) as c:
        _link(source, c, CARD)
        version = write_card(c, job, trained=False, reason=reason)
        if before is not None:
            _link(before, s, STATE_CARD)
        write_state_card(s, job, version, world)
    return version


def _link(source: Path, target: Path, but: str) -> None:
    for f in sorted(source.rglob("*")):
        to = target / f.relative_to(source)
        if f.is_dir():
            to.mkdir()
        elif f.name != but:
            try:
                os.link(f.resolve(), to)
            except OSError:  # another file system
                shutil.copyfile(f, to)


def prune_states(folder: Path, before: int, keep: int) -> list[str]:
    """Turn the full states of iterations below `before` into tombstones, all but the newest `keep`.

    state.json stays as it is: it is what a workflow knows of a finished iteration. Returns the pruned names.
    """
    full = [p for p in sorted(folder.glob("[0-9]*")) if (p / STATE_CARD).exists()]
    older = [p for p in full if int(p.name) < before and not (p / TOMBSTONE).exists()]
    pruned = older[: max(0, len(older) - keep)]
    for p in pruned:
        write_beside(p / TOMBSTONE, json.dumps({"iteration": int(p.name), "pruned_before": before}) + "\n")
        for f in p.iterdir():
            if f.is_dir():
                shutil.rmtree(f)
            elif f.name not in (TOMBSTONE, STATE_CARD):
                f.unlink()
    return [p.name for p in pruned]
