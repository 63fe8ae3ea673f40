"""`--config from_iteration=K`: iterations K and later are made anew; what stands of them moves to superseded/NNNN/.

Nothing is deleted, and the moved files keep their layout. What is to be done is written down first (redo.json), so a
kill at any moment leaves something that the next command finishes; and the same command, typed again, goes on with the
iterations that it began instead of moving them away once more.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from openforge import config as typed
from openforge.config import ConfigError, EvalConfig, RunConfig
from openforge.config_paths import frozen, last_finished, write_frozen
from openforge.policy.weights import CheckpointError, check_kept
from openforge.tables import write_beside

RECORD = "redo.json"
SUPERSEDED = "superseded"
_ITERATION = re.compile(r"iteration=(\d+)")
# They tell of all iterations: with the moved ones goes what was said of them.
_SUMMARIES = ("summary.json", "report")


def check(run: str, config: RunConfig | EvalConfig, run_dir: Path, k: int) -> None:
    """Refuse a from_iteration that cannot be, before anything is moved.

    Raises:
        ConfigError: an evaluation's; outside 1 .. last finished + 1; or what iteration k begins from was pruned.
    """
    given = f"--config {typed.FROM_ITERATION}={k}"
    if isinstance(config, EvalConfig):
        raise ConfigError(f"{given}: {run} is an evaluation and has no iterations; it is a run's: snakemake train_RUN")
    last = last_finished(run_dir)
    if not 1 <= k <= last + 1:
        raise ConfigError(f"{given}: run {run} has finished {last} iterations; K must be from 1 to {last + 1}")
    if goes_on(run_dir, config, k):
        return
    good = [i for i in range(1, last + 2) if _lost(run_dir, config, i) is None]
    lost = _lost(run_dir, config, k)
    if lost is not None:
        raise ConfigError(f"{given}: {lost}; run {run} can be made anew from {', '.join(map(str, good))}")


def _lost(run_dir: Path, config: RunConfig, k: int) -> str | None:
    """What iteration k begins from, or with a lag one of the next samples from, and was pruned."""
    for i in range(max(0, k - 1 - config.lag), k):
        try:
            check_kept(run_dir / "checkpoints" / f"{i:04d}")
        except CheckpointError as e:
            return str(e)
    if k > 1 and (run_dir / "state" / f"{k - 1:04d}" / "tombstone.json").exists():
        return f"the optimizer's state of iteration {k - 1} was pruned (trainer.max_actor_ckpt_to_keep)"
    return None


def _digest(config: RunConfig) -> str:
    # Raising `iterations` goes on with a run; it is no reason to make its iterations once more.
    return typed.digest(config, without=("iterations",))


def _read(run_dir: Path) -> dict[str, Any] | None:
    try:
        record: dict[str, Any] = json.loads((run_dir / RECORD).read_text())
        return record
    except FileNotFoundError:
        return None
    except ValueError as e:
        raise ConfigError(f"{run_dir / RECORD} is damaged ({e}); remove it, and type the command again") from None


def goes_on(run_dir: Path, config: RunConfig, k: int) -> bool:
    """Whether the last command that made iterations anew is this one: there is nothing to move."""
    record = _read(run_dir)
    return record is not None and (record[typed.FROM_ITERATION], record["config_digest"]) == (k, _digest(config))


def outlook(run_dir: Path, config: RunConfig, k: int) -> str:
    """What `redo` would do, in a sentence."""
    if goes_on(run_dir, config, k):
        return _going_on(run_dir, k)
    n = len(list(moved(run_dir, k)))
    if n == 0:
        return f"{run_dir.name}: from_iteration={k} finds nothing to move"
    return (
        f"{run_dir.name}: from_iteration={k} would move {n} files and folders of iterations {k} and later to "
        f"{SUPERSEDED}/{_next(run_dir)}; this dry run still finds them where they are"
    )


def _going_on(run_dir: Path, k: int) -> str:
    return (
        f"{run_dir.name}: going on with what from_iteration={k} began under this configuration; "
        f"to make these iterations once more, remove results/{run_dir.name}/{RECORD}"
    )


def _next(run_dir: Path) -> str:
    numbers = [int(p.name) for p in run_dir.glob(f"{SUPERSEDED}/[0-9]*")]
    return f"{max(numbers, default=0) + 1:04d}"


def redo(run_dir: Path, config: RunConfig, k: int) -> str:
    """Move away what stands of iterations k and later, and make the run one of this configuration.

    To be called while no job of the run works, after `check` and `finish`. Returns what was done, in a sentence.

    Raises:
        ConfigError: redo.json is damaged.
    """
    if goes_on(run_dir, config, k):
        return _going_on(run_dir, k)
    record = {
        typed.FROM_ITERATION: k,
        "config_digest": _digest(config),
        "folder": f"{SUPERSEDED}/{_next(run_dir)}",
        "frozen": frozen(config),
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "done": False,
    }
    found = any(moved(run_dir, k))
    write_beside(run_dir / RECORD, json.dumps(record, indent=1) + "\n")
    finish(run_dir)
    said = f"earlier results of iterations {k} and later are in {record['folder']}" if found else "nothing to move"
    return f"{run_dir.name}: from_iteration={k}, {said}"


def finish(run_dir: Path) -> None:
    """Finish what a killed command began to move, if there is such.

    Raises:
        ConfigError: redo.json is damaged.
    """
    record = _read(run_dir)
    if record is None or record["done"]:
        return
    target = run_dir / record["folder"]
    if (run_dir / "frozen.json").exists():
        old = target / "frozen.json"
        if not old.exists():
            write_beside(old, (run_dir / "frozen.json").read_bytes())
    for path in list(moved(run_dir, record[typed.FROM_ITERATION])):
        _move(path, target / path.relative_to(run_dir))
    write_frozen(record["frozen"], run_dir)
    write_beside(run_dir / RECORD, json.dumps(record | {"done": True}, indent=1) + "\n")


def moved(run_dir: Path, k: int) -> Iterator[Path]:
    """Files and folders of iterations k and later, evaluations of checkpoints k and later included."""
    for folder, folders, _ in os.walk(run_dir):
        if Path(folder) == run_dir:
            folders[:] = [d for d in folders if d not in (SUPERSEDED, "tasks", "partial", "checkpoints", "state")]
        here = [d for d in folders if (m := _ITERATION.fullmatch(d)) and int(m[1]) >= k]
        yield from (Path(folder, d) for d in here)
        folders[:] = [d for d in folders if not d.startswith("iteration=")]
    for name in ("checkpoints", "state"):
        yield from (p for p in run_dir.glob(f"{name}/[0-9]*") if int(p.name) >= k)
    # partial/PURPOSE-CELL-ITERATION
    for part in run_dir.glob("partial/*-*-*"):
        number = part.name.rpartition("-")[2]
        if number.isdecimal() and int(number) >= k:
            yield part
    for file in run_dir.glob("timings/*.json"):
        if _timed(file) >= k:
            yield file
    yield from (run_dir / n for n in _SUMMARIES if (run_dir / n).exists())


def _timed(file: Path) -> int:
    """Iteration of a timing file; -1 for a job of the whole run, or one that cannot be read."""
    try:
        number = str(json.loads(file.read_text()).get("k"))
    except (ValueError, AttributeError):
        return -1
    return int(number) if number.isdecimal() else -1


def _move(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.rename(source, target)
        return
    except OSError as e:
        if e.errno != errno.EXDEV:
            raise
    # A folder of results may be a link to another disk: copied beside first, so that a kill leaves one of both whole.
    if not target.exists():
        beside = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
        shutil.copytree(source, beside, symlinks=True) if source.is_dir() else shutil.copy2(source, beside)
        os.rename(beside, target)
    shutil.rmtree(source) if source.is_dir() else source.unlink()
