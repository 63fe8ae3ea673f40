"""What a rollout table that stands was planned with: it decides over its iteration, not the configuration of today."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from openforge.tables import ROLLOUTS, TableError, check_file


class Standing(NamedTuple):
    """A planned table.

    Attributes:
        shards: jobs that its rollouts are cut into.
        policy: its policy column, RUN@k or the words of an evaluation's configuration.
        harnesses: name of the harness of each shard, the first one's first.
    """

    shards: int
    policy: str
    harnesses: tuple[str, ...]


def standing(table: Path) -> Standing | None:
    """What a rollouts.parquet was planned with; None if it does not stand.

    Raises:
        TableError: it cannot be read as a table of rollouts, or is empty.
    """
    try:
        return _read(table, table.stat().st_mtime_ns)
    except FileNotFoundError:
        return None


@cache
def _read(table: Path, mtime_ns: int) -> Standing:
    # Asked for once a job while the DAG is built: three columns of it, once a file.
    check_file(table, ROLLOUTS)
    try:
        with pq.ParquetFile(table) as f:
            rows = f.read(columns=["shard", "policy", "harness"])
    except (OSError, pa.ArrowInvalid) as e:
        raise TableError(f"{table} cannot be read as table {ROLLOUTS.name}: {e}") from e
    if rows.num_rows == 0:
        raise TableError(f"{table} holds no rollout; remove it to plan it again")
    shards, policy, harness = (rows.column(n).to_pylist() for n in ("shard", "policy", "harness"))
    by_shard = dict(zip(shards, harness, strict=True))
    return Standing(max(shards), policy[0], tuple(by_shard[i] for i in sorted(by_shard)))
