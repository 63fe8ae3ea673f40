"""trainer.keep_checkpoints: which weights of a run stay. A pruned checkpoint keeps its card: nothing is re-planned."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from openforge.config import ConfigError, RunConfig
from openforge.eval.policies import evaluated
from openforge.plan.standing import standing
from openforge.policy.weights import TOMBSTONE
from openforge.tables import TableError
from openforge.train.checkpoint import CARD, bury, folders


def apply(run_dir: Path, config: RunConfig, say: Callable[[str], None], spare: int = 0) -> None:
    """`prune`, told of in a line. What it cannot read is a line too: it comes after work that must not be lost."""
    try:
        pruned = prune(run_dir, config, spare)
    except (ConfigError, TableError, OSError) as e:
        say(f"warning: no weights were pruned: {e}")
        return
    if pruned:
        say(f"pruned the weights of checkpoints {', '.join(map(str, pruned))}")


def prune(run_dir: Path, config: RunConfig, spare: int = 0) -> list[int]:
    """Remove the weights that trainer.keep_checkpoints does not name and nothing needs any more.

    Checkpoint 0, the newest one, and those that a rollout or an evaluation is still to sample from always stay.

    Args:
        spare: so many before the newest stay as well.

    Returns:
        The checkpoints that were pruned now.

    Raises:
        ConfigError: an eval.json that `best` needs cannot be read.
        TableError: a rollout table that cannot be read.
    """
    if config.trainer.keep_checkpoints is None:
        return []
    there = folders(run_dir / "checkpoints", CARD)
    stay = _named(run_dir, config, [int(p.name) for p in there]) | set(_needed(run_dir, config, spare))
    pruned = []
    for p in there:
        buried = (p / TOMBSTONE).exists()
        if buried or int(p.name) not in stay:
            bury(p, CARD, int(there[-1].name))
            pruned += [] if buried else [int(p.name)]
    return pruned


def _named(run_dir: Path, config: RunConfig, there: list[int]) -> set[int]:
    """What keep_checkpoints names."""
    keep = config.trainer.keep_checkpoints
    assert keep is not None
    stay = set(there[-keep.last :]) if keep.last else set()
    if keep.every:
        stay |= {k for k in there if k % keep.every == 0}
    if keep.best:
        cell = next(c.name for c in config.cells if c.at == "every")
        rates = [(rate, k) for k in there if (rate := _pass_rate(run_dir, cell, k)) is not None]
        # Of two that are equally good, the later one.
        stay |= {k for _, k in sorted(rates)[-keep.best :]}
    return stay


def _result(run_dir: Path, cell: str, iteration: str) -> Path:
    return run_dir / "eval" / f"cell={cell}" / f"iteration={iteration}" / "eval.json"


def _pass_rate(run_dir: Path, cell: str, k: int) -> float | None:
    file = _result(run_dir, cell, f"{k:04d}")
    if not file.exists():
        return None
    try:
        return float(json.loads(file.read_text())["p"])
    except (ValueError, KeyError, TypeError) as e:
        raise ConfigError(f"{file} is damaged ({e}), so trainer.keep_checkpoints.best cannot be told") from None


def _needed(run_dir: Path, config: RunConfig, spare: int) -> Iterator[int]:
    """What training, rollouts and evaluations are still to read, whatever keep_checkpoints says."""
    newest = int(folders(run_dir / "checkpoints", CARD)[-1].name)
    yield 0
    # Training goes on from the newest; with a lag, rollouts sample from earlier ones.
    yield from range(max(0, newest - max(spare, config.lag)), newest + 1)
    for table in run_dir.glob("rollouts/purpose=train/cell=train/iteration=*/rollouts.parquet"):
        if int(table.parent.name.removeprefix("iteration=")) > newest:
            yield _policy(table, run_dir.name)
    for cell in config.cells:
        for k in evaluated(cell, max(config.iterations, newest)):
            if not _result(run_dir, cell.name, f"{k:04d}").exists():
                yield k
    # A suite that samples from a checkpoint of this run has planned so.
    for table in run_dir.parent.glob("eval_*/rollouts/purpose=eval/cell=*/iteration=[0-9]*/rollouts.parquet"):
        name, iteration = (table.parents[i].name.partition("=")[2] for i in (1, 0))
        if not _result(table.parents[4], name, iteration).exists():
            yield _policy(table, run_dir.name)


def _policy(table: Path, run: str) -> int:
    """The checkpoint of `run` that a rollout table samples from; 0, which always stays, for another policy."""
    planned = standing(table)
    name, _, k = planned.policy.rpartition("@") if planned else ("", "", "")
    return int(k) if name == run and k.isdecimal() else 0
