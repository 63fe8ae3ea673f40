"""A condition on an iteration's episodes (`data.filter`): checked before any job, applied by samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.dataset as ds

from openforge import store, views
from openforge.tables import CALLS, EPISODES, SCORES


class ConditionError(ValueError):
    """Text that is no condition on episodes, or that an iteration's values do not fit; one sentence."""

    def __init__(self, condition: str, why: str) -> None:
        super().__init__(f"data.filter is {condition!r}: {why}")


def check(condition: str) -> None:
    """Refuse what DuckDB does not take behind WHERE over the view `episodes`.

    Raises:
        ConditionError: it is no expression, names an unknown column, or is not true or false.
    """
    with _views({t.name: t.arrow([]) for t in (EPISODES, SCORES, CALLS)}) as views:
        _run(views, condition, _where(condition))
        described = _run(views, condition, f"DESCRIBE SELECT ({condition}\n) FROM episodes")
    kind = described[0]["column_type"]
    if kind != "BOOLEAN":
        raise ConditionError(condition, f"its type is {kind}; a condition is true or false")


def failing(condition: str, files: Mapping[str, Sequence[Path | str]]) -> frozenset[str]:
    """Final episodes of an iteration of which a condition does not hold (it is false, or NULL).

    Args:
        files: the iteration's files of the tables episodes, scores and calls.

    Raises:
        ConditionError: a value that the condition cannot be asked about, such as a text that is cast to a number.
    """
    sources = {
        t.name: ds.dataset([str(f) for f in files[t.name]], schema=t.schema, format="parquet")
        for t in (EPISODES, SCORES, CALLS)
    }
    with _views(sources) as views:
        everyone = _run(views, condition, "SELECT episode_id FROM episodes")
        passing = {r["episode_id"] for r in _run(views, condition, _where(condition))}
    return frozenset(r["episode_id"] for r in everyone) - passing


def _where(condition: str) -> str:
    # On a line of its own, for it may end with a comment.
    return f"SELECT episode_id FROM episodes WHERE (\n{condition}\n)"


@contextmanager
def _views(sources: Mapping[str, Any]) -> Iterator[store.Reader]:
    """The store's views of these tables alone, in memory."""
    with duckdb.connect() as connection:
        for name, source in sources.items():
            connection.register("all_episodes" if name == EPISODES.name else name, source)
        for name, select in views.EPISODES.items():
            connection.execute(f"CREATE VIEW {name} AS {select}")
        yield store.Reader(connection)


def _run(tables: store.Reader, condition: str, sql: str) -> list[dict[str, Any]]:
    try:
        store.check_reads(sql)
        return tables.rows(sql)
    except store.StoreError as e:
        raise ConditionError(condition, str(e)) from None
