"""What becomes of an iteration's failed rollouts once its quorum is known.

Shards whose rollouts failed for want of infrastructure keep their partial folder. If the iteration reaches its quorum,
the folders go. If not, those shards' files go and their folders stay: the same command, typed again, runs the failed
rollouts on from there with further attempts, and none of the others.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from openforge import tables
from openforge.rollout.partial import append, drop
from openforge.rollout.status import failed


def folder(run_dir: Path, purpose: str, cell: str, iteration: str, shard: str) -> Path:
    """Where the partial folders of a shard lie, by digest; the words are those of its path in results/."""
    return run_dir / "partial" / f"{purpose}-{cell}-{iteration}" / shard


def _base(run_dir: Path, episodes: Path) -> Path:
    """The same for the shard whose file this is: episodes/purpose=P/cell=C/iteration=K/shard=S/episodes.parquet."""
    _, *partition, _ = episodes.resolve().relative_to(run_dir.resolve()).parts
    purpose, cell, iteration, shard = (part.partition("=")[2] for part in partition)
    return folder(run_dir, purpose, cell, iteration, shard)


def settle(run_dir: Path, episodes: Iterable[Path]) -> None:
    """The quorum is reached: failed rollouts stay as they are, the partial folders go."""
    for file in episodes:
        for kept in _base(run_dir, file).glob("*"):
            drop(kept)


def reopen(run_dir: Path, episodes: Iterable[Path]) -> int:
    """The quorum is missed: have the shards with failed rollouts run again; the number of those rollouts."""
    count = 0
    for file in episodes:
        lost = sum(r["final"] and failed(r["status"]) for r in tables.read_rows(file, tables.EPISODES))
        kept = list(_base(run_dir, file).glob("*/episodes.jsonl"))
        if not lost or not kept:
            continue
        for records in kept:
            fd = os.open(records, os.O_WRONLY | os.O_APPEND)
            append(fd, records, {"event": "reopen"})
            os.close(fd)
        # Episodes first: without them Snakemake runs the shard, whatever else is left.
        partition = file.resolve().parent.relative_to(run_dir.resolve() / "episodes")
        for table in ("episodes", "calls", "blobs"):
            (run_dir / table / partition / f"{table}.parquet").unlink(missing_ok=True)
        count += lost
    return count
