"""`openforge sql --journal DIR`: the views `calls` and `blobs` over what a recording proxy wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from openforge.proxy.journal import JournalError, by_episode, read
from openforge.proxy.lineage import call_rows
from openforge.store import Reader, StoreError
from openforge.tables import TABLES


def query(folder: Path, sql: str) -> pa.Table:
    """One statement on the calls of a journal's folder, sessions that are still open included.

    Raises:
        StoreError: there is no journal, it is damaged, or DuckDB refuses the statement.
    """
    calls, blobs = _rows(folder)
    with duckdb.connect() as connection:
        connection.register("calls", TABLES["calls"].arrow(calls))
        connection.register("blobs", TABLES["blobs"].arrow(blobs))
        return Reader(connection).query(sql)


def _rows(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    try:
        records = read(folder)
    except JournalError as e:
        raise StoreError(str(e)) from None
    if not records:
        raise StoreError(f"{folder} holds no journal of a recording proxy, or one without a session")
    calls: list[dict[str, Any]] = []
    blobs: dict[str, dict[str, Any]] = {}
    for episode in by_episode(records).values():
        rows, named = call_rows(episode)
        calls += rows
        blobs |= {b["sha256"]: b for b in named}
    return calls, list(blobs.values())
