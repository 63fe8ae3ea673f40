"""`openforge sql --journal DIR`: the views `calls` and `blobs` over what a recording proxy wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from openforge.proxy.journal import JournalError, stored, whole
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
    calls: list[dict[str, Any]] = []
    blobs: dict[str, dict[str, Any]] = {}
    try:
        episodes = stored(folder)
        for episode in episodes.values():
            rows, named = call_rows(whole(episode))
            calls += rows
            blobs |= {b["sha256"]: b for b in named}
    except JournalError as e:
        raise StoreError(str(e)) from None
    if not episodes:
        raise StoreError(f"{folder} holds no journal of a recording proxy, or one without a session")
    return calls, list(blobs.values())
