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

from openforge.config import RunConfig
from openforge.policy.weights import TOMBSTONE, read_checkpoint, write_checkpoint
from openforge.samples.credit import ESTIMATORS
from openforge.tables import write_beside
from openforge.train.job import Job, TrainError, layout_of, lora_of

CARD = "checkpoint.json"
STATE_CARD = "state.json"
PROBE = "probe.json"
ALL_WEIGHTS = "all weights (actor.model.lora_rank 0)"
CRITIC = "critic"  # below a state's folder, where there is a critic


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


def check_state(state: Path, checkpoint: Path, config: RunConfig | None) -> None:
    """Refuse a state that a job of `config` (None: nothing is trained, it is carried on) cannot resume from.

    Raises:
        TrainError: it is missing or a tombstone, of other weights, or written by another number of processes or with
            other adapters.
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
    if config is None or card["world_size"] == 0:
        return
    trainer, world = config.trainer, int(card["world_size"])
    if world != trainer.world_size:
        right = f"set trainer.nproc_per_node to {world // trainer.nnodes}"
        if world % trainer.nnodes:
            right = f"set trainer.nnodes times trainer.nproc_per_node to {world}"
        raise TrainError(f"the state in {state} was written by {world} processes and loads on as many only; {right}")
    if card.get("layout") != layout_of(config):
        raise TrainError(
            f"the state in {state} was cut as {_named(card.get('layout'), 'fsdp2')}, the configuration says "
            f"{_named(layout_of(config), 'fsdp2')}; set actor back, or begin a run of another name"
        )
    if card.get("lora") != lora_of(config):
        raise TrainError(
            f"the state in {state} was trained with {_named(card.get('lora'), ALL_WEIGHTS)}, the configuration says "
            f"{_named(lora_of(config), ALL_WEIGHTS)}; set actor.model back, or begin a run of another name"
        )
    if ESTIMATORS[config.algorithm.adv_estimator].critic and not (state / CRITIC / "config.json").exists():
        raise TrainError(
            f"the state in {state} holds no critic, which adv_estimator {config.algorithm.adv_estimator} goes on from; "
            "begin a run of another name, or this one anew from iteration 1"
        )


def _named(keys: dict[str, Any] | None, none: str) -> str:
    return none if keys is None else " ".join(f"{k} {v}" for k, v in keys.items())


def write_state_card(folder: Path, job: Job, version: str, world: int, **shape: Any) -> None:
    """state.json: whose state it is. `world` 0: there is none yet (nothing was ever trained)."""
    card = {"iteration": job.iteration, "policy_version": version, "world_size": world, **shape}
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
    world, shape = 0, {"lora": None, "layout": None}
    if before is not None:
        check_state(before, source, None)
        card = json.loads((before / STATE_CARD).read_text())
        world, shape = card["world_size"], {k: card.get(k) for k in shape}
    with folder_beside(after) as s, folder_beside(target) as c:
        _link(source, c, CARD)
        version = write_card(c, job, trained=False, reason=reason)
        if before is not None:
            _link(before, s, STATE_CARD)
        write_state_card(s, job, version, world, **shape)
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

    Returns the pruned names.
    """
    older = [p for p in folders(folder, STATE_CARD) if int(p.name) < before]
    full = [p for p in older if not (p / TOMBSTONE).exists()]
    pruned = full[: max(0, len(full) - keep)]
    for p in older:
        if p in pruned or (p / TOMBSTONE).exists():
            bury(p, STATE_CARD, before)
    return [p.name for p in pruned]


def folders(folder: Path, card: str) -> list[Path]:
    """Folders of iterations that are whole or pruned, oldest first."""
    return sorted(p for p in folder.glob("[0-9]*") if (p / card).exists())


def bury(folder: Path, card: str, before: int) -> None:
    """Remove all but the card, which is what a workflow knows of a finished iteration, and leave a tombstone.

    The tombstone comes first: what a kill leaves beside it is no checkpoint or state any more, and goes next time.
    """
    if not (folder / TOMBSTONE).exists():
        note = {"iteration": int(folder.name), "pruned_before": before}
        write_beside(folder / TOMBSTONE, json.dumps(note) + "\n")
    for f in folder.iterdir():
        if f.is_dir():
            shutil.rmtree(f)
        elif f.name not in (TOMBSTONE, card):
            f.unlink()


# In copies of the weights, all of them 32-bit as the checkpoint is: two moments; and weights and gradients beside them.
STATE_SIZE = 2
MEMORY_SIZE = 4
MARGIN = 256 * 2**20


def weights_size(checkpoint: Path) -> int:
    """Bytes of a checkpoint's weights."""
    return sum(f.stat().st_size for f in checkpoint.glob("*.safetensors"))


def check_room(job: Job) -> None:
    """Refuse an iteration whose checkpoint and state would not fit on their disks, or whose trainer not in memory.

    Raises:
        TrainError: names the path, what is needed and what there is.
    """
    size = weights_size(Path(job.checkpoint_in))
    models = 2 if ESTIMATORS[job.typed.algorithm.adv_estimator].critic else 1
    state = STATE_SIZE * models + models - 1  # a critic's weights are in the state
    if job.typed.actor.strategy == "megatron":
        state += 2  # and so are the policy's, twice
    needs: dict[int, tuple[Path, int]] = {}
    for place, need in ((job.checkpoint_out, size), (job.state_out, state * size)):
        folder = Path(place).parent
        folder.mkdir(parents=True, exist_ok=True)
        disk = folder.stat().st_dev
        path, so_far = needs.get(disk, (folder, MARGIN))
        needs[disk] = path, so_far + need
    for path, need in needs.values():
        free = shutil.disk_usage(path).free
        if free < need:
            raise TrainError(
                f"iteration {job.iteration} needs about {need / 1e9:.1f} GB of disk for its checkpoint and optimizer "
                f"state, {free / 1e9:.1f} GB are free in {path}; make room, or set trainer.keep_checkpoints"
            )
    if job.typed.trainer.device == "cpu":
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        need = MEMORY_SIZE * models * size
        if memory < need:
            raise TrainError(
                f"training a model of {size / 1e9:.1f} GB takes at least {need / 1e9:.1f} GB of memory (weights, "
                f"gradients and two moments), this machine has {memory / 1e9:.1f} GB; take a smaller model or another "
                "machine"
            )
