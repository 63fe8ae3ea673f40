"""DuckDB over results/<run>/: store.duckdb holds views only, so no job ever holds it open.

Views: every table of `openforge.tables` under its own name with its partition keys as typed columns, except
that `all_episodes` has every attempt and `episodes` the final ones with their latest score; those of `openforge.views`;
`unreadable_files`, what the others leave out.

A view reads a pattern, so files written later appear without a refresh. Three traps of DuckDB shape it: a
pattern without files is an error (hence an empty twin of each table, its name with a leading dot, which
the pattern matches too), one unreadable file kills a whole view (hence then a list of the readable ones),
and a relative path depends on the client's working directory (hence absolute ones, rewritten when the folder
has moved).
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from openforge.tables import TABLES, Table, TableError, check_file, write_table
from openforge.views import JOINED, MACROS

STORE = "store.duckdb"
# The oldest storage that clients in use open: duckdb-cli lags behind the library.
STORAGE_VERSION = "v1.2.0"

# Partition keys that are numbers; the path says `none` for the iteration of a foreign policy.
_NUMBERS = {k: f"CAST(nullif({k}, 'none') AS INTEGER) AS {k}" for k in ("iteration", "shard")}

# Statements that only read. EXPLAIN ANALYZE runs what it explains, and MULTI is any statement with a PIVOT in it, so
# the first word counts as well.
_READING = ("SELECT", "EXPLAIN", "PRAGMA", "MULTI")
_WORDS = "select|with|from|values|table|describe|desc|show|summarize|pivot|unpivot|pragma"
_SPACE = r"(?:\s|--[^\n]*(?:\n|$)|/\*.*?\*/)*"
_READS = re.compile(
    rf"{_SPACE}(?:explain{_SPACE}(?:analyze{_SPACE})?(?:\([^)]*\){_SPACE})?)?(?:\({_SPACE})*(?:{_WORDS})\b", re.S | re.I
)
_HIDDEN = re.compile(r"\b(?:copy|create|install)\b", re.I)


class StoreError(ValueError):
    """A run without results, or a query that DuckDB refuses; one sentence."""


@dataclass(frozen=True)
class Unreadable:
    """A file, or a folder of files, that the views leave out, and why."""

    table: str
    path: Path
    error: str


def unreadable(run_dir: Path) -> list[Unreadable]:
    """What of the run cannot be read: truncated files, another table's, of another schema version, closed folders."""
    found = []
    for table in TABLES.values():
        found += [
            Unreadable(table.name, Path(e.filename), f"{e.filename}: {e.strerror}") for e in _closed(run_dir, table)
        ]
        for path in _files(run_dir, table):
            try:
                check_file(path, table)
            except TableError as e:
                found.append(Unreadable(table.name, path, str(e)))
    return found


def refresh(run_dir: Path) -> list[Unreadable]:
    """Bring results/<run>/store.duckdb up to date; it is rewritten only if its views have changed.

    Names every unreadable file on stderr and returns them.

    Raises:
        StoreError: the run has no results folder, or the store cannot be written.
    """
    run_dir = run_dir.absolute()
    if not run_dir.is_dir():
        known = ", ".join(runs(run_dir.parent)) or "none"
        raise StoreError(f"run {run_dir.name!r} has no results in {run_dir.parent}; runs there: {known}")
    bad = unreadable(run_dir)
    for u in bad:
        print(f"warning: left out of view {u.table}: {u.error}", file=sys.stderr)
    try:
        for table in TABLES.values():
            twin = run_dir / _twin(table)
            if not _readable(twin, table):
                write_table(twin, table, [])
        views = _views(run_dir, bad)
        if _definition(run_dir / STORE) != _digest(views):
            _write(run_dir / STORE, views)
    except OSError as e:
        raise StoreError(f"{run_dir / STORE} cannot be written: {e}") from e
    return bad


class Reader:
    """A store opened for reading; times are in UTC."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        connection.execute("SET TimeZone = 'UTC'")

    def query(self, sql: str, params: Sequence[Any] = ()) -> pa.Table:
        """Run one statement, its `?` filled with `params`.

        Raises:
            StoreError: the first line of DuckDB's message on a statement that it refuses.
        """
        try:
            result = self._connection.sql(sql, params=list(params) or None)
            return pa.table({}) if result is None else result.to_arrow_table()
        except duckdb.Error as e:
            raise StoreError(str(e).strip().splitlines()[0]) from None

    def rows(self, sql: str, params: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """`query` as a list of dicts; see `records`."""
        return records(self.query(sql, params))


@contextmanager
def reader(run_dir: Path) -> Iterator[Reader]:
    """Refresh the store and open it for reading.

    Raises:
        StoreError: see `refresh`; or the store cannot be opened.
    """
    refresh(run_dir)
    store = run_dir.absolute() / STORE
    try:
        connection = duckdb.connect(str(store), read_only=True)
    except duckdb.Error as e:
        raise StoreError(f"{store} cannot be opened: {str(e).strip().splitlines()[0]}") from None
    with connection:
        yield Reader(connection)


def check_reads(sql: str) -> None:
    """Refuse what is not one statement that only reads. A read-only store is no help there: COPY writes beside it.

    Raises:
        StoreError: names what the statement is.
    """
    try:
        statements = duckdb.extract_statements(sql)
    except duckdb.Error as e:
        raise StoreError(str(e).strip().splitlines()[0]) from None
    if len(statements) != 1:
        raise StoreError(f"one SQL statement is expected, this is {len(statements) or 'none'}")
    (one,) = statements
    if one.type.name not in _READING or not _READS.match(one.query):
        # The type of `explain analyze copy` is EXPLAIN, that of `install` LOAD.
        word = _HIDDEN.search(one.query)
        raise StoreError(f"queries are read-only: {word[0].upper() if word else one.type.name} is refused; use SELECT")


def query(run_dir: Path, sql: str) -> pa.Table:
    """One statement on the refreshed store; see `Reader.query`."""
    with reader(run_dir) as store:
        return store.query(sql)


def rows(run_dir: Path, sql: str) -> list[dict[str, Any]]:
    """One statement on the refreshed store, as a list of dicts."""
    with reader(run_dir) as store:
        return store.rows(sql)


def values(table: pa.Table) -> list[tuple[Any, ...]]:
    """Rows of a query's result as Python values, in the order of its columns.

    Raises:
        StoreError: a column holds a date that Python has no value for, such as infinity.
    """
    columns = []
    for name, column in zip(table.column_names, table.columns, strict=True):
        try:
            columns.append(column.to_pylist())
        except (OverflowError, ValueError) as e:
            raise StoreError(f"column {name!r} cannot be shown ({e}); cast it to text: {name}::text") from None
    return list(zip(*columns, strict=True))


def records(table: pa.Table) -> list[dict[str, Any]]:
    """Rows of a query's result by column name.

    Raises:
        StoreError: two columns have one name, of which a dict would keep the last; or see `values`.
    """
    names = table.column_names
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice is not None:
        raise StoreError(f"column {twice!r} stands twice in the result; give one of them another name with AS")
    return [dict(zip(names, row, strict=True)) for row in values(table)]


def runs(results: Path) -> list[str]:
    """Names of the runs in a results folder, sorted."""
    if not results.is_dir():
        return []
    return sorted(p.name for p in results.iterdir() if p.is_dir() and not p.name.startswith("."))


def _pattern(table: Table) -> str:
    """Glob of a table's files below results/<run>/."""
    return "/".join([table.name, *(f"{k}=*" for k in table.partition)]) + (
        f"/{table.name}.parquet" if table.partition else ".parquet"
    )


def _twin(table: Table) -> str:
    """Path of the empty twin, which the view's pattern matches as well."""
    return "." + _pattern(table).replace("*", "none")


def _files(run_dir: Path, table: Table) -> list[Path]:
    return sorted(run_dir.glob(_pattern(table)))


def _closed(run_dir: Path, table: Table) -> list[OSError]:
    """Why folders of a table cannot be listed; to a glob they would be empty."""
    errors: list[OSError] = []
    for _ in os.walk(run_dir / table.name, onerror=errors.append):
        pass
    return [e for e in errors if not isinstance(e, FileNotFoundError)]


def _readable(path: Path, table: Table) -> bool:
    try:
        check_file(path, table)
    except TableError:
        return False
    return True


def _quote(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _escape(path: Path) -> str:
    """A folder as a glob that matches nothing else."""
    return "".join(f"[{c}]" if c in "[*?" else c for c in str(path))


def _sources(run_dir: Path, table: Table, bad: list[Unreadable]) -> list[str]:
    left_out = {u.path for u in bad if u.table == table.name}
    if not left_out:
        return [f"{_escape(run_dir)}/*{_pattern(table)}"]
    good = [p for p in _files(run_dir, table) if p not in left_out]
    return [_escape(p) for p in (run_dir / _twin(table), *good)]


def _table_view(run_dir: Path, table: Table, bad: list[Unreadable]) -> str:
    """The SELECT of one table: its columns in declared order, then partition keys that the files lack."""
    declared = [c.name for c in table.columns]
    names = declared + [k for k in table.partition if k not in declared]
    # As text first: DuckDB's own guess would make 4 of 0004 and fail on `none`.
    columns = [_NUMBERS.get(n, f'"{n}"') if n in table.partition else f'"{n}"' for n in names]
    hive = "hive_partitioning = false"
    if table.partition:
        types = ", ".join(f"'{k}': VARCHAR" for k in table.partition)
        hive = f"hive_partitioning = true, hive_types = {{{types}}}"
    files = ", ".join(map(_quote, _sources(run_dir, table, bad)))
    return f"SELECT {', '.join(columns)} FROM read_parquet([{files}], {hive})"


def _views(run_dir: Path, bad: list[Unreadable]) -> dict[str, str]:
    views = {
        ("all_episodes" if t.name == "episodes" else t.name): _table_view(run_dir, t, bad) for t in TABLES.values()
    }
    views |= JOINED
    listed = ", ".join(f"({_quote(u.table)}, {_quote(str(u.path))}, {_quote(u.error)})" for u in bad)
    values = f"(VALUES {listed or '(NULL, NULL, NULL)'}) AS t(table_name, path, error)"
    views["unreadable_files"] = f"SELECT * FROM {values} WHERE path IS NOT NULL"
    return views


def _digest(views: dict[str, str]) -> str:
    return hashlib.sha256(repr((STORAGE_VERSION, views, MACROS)).encode()).hexdigest()


def _definition(store: Path) -> str | None:
    """Digest of the views that a store holds; None if there is no store, or one that cannot be read."""
    if not store.exists():
        return None
    try:
        with duckdb.connect(str(store), read_only=True) as c:
            row = c.execute("SELECT digest FROM store_definition").fetchone()
            return None if row is None else str(row[0])
    except duckdb.Error:
        return None


def _write(store: Path, views: dict[str, str]) -> None:
    beside = store.with_name(f".{store.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with duckdb.connect() as c:
            c.execute(f"ATTACH {_quote(str(beside))} AS store (STORAGE_VERSION '{STORAGE_VERSION}')")
            c.execute("USE store")
            for name, select in views.items():
                c.execute(f"CREATE VIEW {name} AS {select}")
            for head, select in MACROS.items():
                c.execute(f"CREATE MACRO {head} AS TABLE {select}")
            c.execute(f"CREATE VIEW store_definition AS SELECT {_quote(_digest(views))} AS digest")
            c.execute("USE memory")
            c.execute("DETACH store")
        os.replace(beside, store)
    except duckdb.IOException as e:
        raise StoreError(f"{store} cannot be written: {str(e).splitlines()[0]}") from e
    finally:
        beside.unlink(missing_ok=True)
        beside.with_name(beside.name + ".wal").unlink(missing_ok=True)
