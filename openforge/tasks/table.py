"""Raw tasks from a table of one's own: parquet files (openforge/tasks/layout.py) and a map of columns.

A table that has our own schema (tables.TASKS) is taken as it is. Errors name file, column and row; rows count from 0.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from openforge import tables
from openforge.config_tasks import Columns, Tasks
from openforge.environments.claw_eval.folder import (
    FolderError,
    check_placeholders,
    doubled_id,
    make_verifier,
    once,
    safe_path,
)
from openforge.tasks import layout
from openforge.tasks.errors import TasksError

BATCH = 256
# In `columns.task_id`: the digest of the row.
HASH = "hash"
# A verifier for all rows is copied into each.
VERIFIER_BYTES = 16 * 2**20
SCRIPT = "verify.py"
FIELDS = "task.json"

Row = dict[str, Any]


class Cell:
    """One value of a row, with the words to say what is wrong with it."""

    def __init__(self, path: Path, column: str, row: int, value: Any) -> None:
        self.path, self.column, self.row, self.value = path, column, row, value

    def wrong(self, must: str) -> TasksError:
        shown = "NULL" if self.value is None else repr(self.value)
        shown = shown if len(shown) <= 80 else f"{shown[:80]}..."
        return TasksError(f"{self.path}, column {self.column!r}, row {self.row}: {shown}; it must be {must}")

    def text(self, must: str = "a text that is not empty") -> str:
        if not isinstance(self.value, str) or not self.value.strip():
            raise self.wrong(must)
        return self.value

    def identity(self) -> str:
        if isinstance(self.value, int) and not isinstance(self.value, bool):
            return str(self.value)
        return self.text("a text that is not empty, or a whole number")

    def tags(self) -> list[str]:
        if isinstance(self.value, str):
            return [self.value]
        if self.value is None:
            return []
        if not isinstance(self.value, list) or not all(isinstance(t, str) for t in self.value):
            raise self.wrong("a text or a list of texts")
        return self.value

    def files(self) -> list[Row]:
        """Files as FILE rows; a mapping, a list of pairs (arrow's map), a list of structs, or JSON of these."""
        must = "a list of {path, content}, a map from path to text, or JSON of one"
        value = self._json(must) if isinstance(self.value, str) else self.value
        if isinstance(value, Mapping):
            value = list(value.items())
        if not isinstance(value or [], list):
            raise self.wrong(must)
        found = []
        for f in value or []:
            entry = dict(zip(("path", "content"), f, strict=True)) if isinstance(f, tuple) else f
            if not isinstance(entry, Mapping) or not isinstance(entry.get("path"), str):
                raise self.wrong(must)
            content, mode = entry.get("content"), entry.get("mode")
            content = content.encode() if isinstance(content, str) else content
            if not isinstance(content, bytes) or not isinstance(0o644 if mode is None else mode, int):
                raise self.wrong(must)
            found.append({"path": entry["path"], "content": content, "mode": 0o644 if mode is None else mode})
        return checked(found, f"{self.path}, column {self.column!r}, row {self.row}")

    def verifier(self) -> Row:
        must = "a struct (or JSON) of command (texts), files ({path, content} each) and seconds (above 0)"
        value = self._json(must) if isinstance(self.value, str) else self.value
        if not isinstance(value, Mapping):
            raise self.wrong(must)
        command, seconds, name = value.get("command"), value.get("seconds"), value.get("name")
        if not (isinstance(command, list) and command and all(isinstance(w, str) for w in command)):
            raise self.wrong(must)
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < float("inf"):
            raise self.wrong(must)
        try:
            check_placeholders(command, f"{self.path}, column {self.column!r}, row {self.row}")
        except FolderError as e:
            raise TasksError(str(e)) from None
        files = Cell(self.path, f"{self.column}.files", self.row, value.get("files")).files()
        return make_verifier(name if isinstance(name, str) else "verifier", command, files, float(seconds))

    def _json(self, must: str) -> Any:
        try:
            return json.loads(self.value)
        except ValueError:
            raise self.wrong(must) from None


def checked(found: list[Row], where: str) -> list[Row]:
    """The files, if their paths are plain, relative and different."""
    try:
        for f in found:
            safe_path(f["path"], where)
        return once(found, where)
    except FolderError as e:
        raise TasksError(str(e)) from None


def read_table(source: Path, config: Tasks, environment: str, root: Path) -> list[Row]:
    """Rows of tables.TASKS.

    Args:
        source: a parquet file, or a folder of them.
        environment: what runs the tasks.
        root: what `tasks.verifier` starts from.

    Raises:
        TasksError: a file cannot be read, is empty, lacks a column or holds a value that no task can have; two rows
            have one task_id.
    """
    rows: list[Row] = []
    places: dict[str, str] = {}
    parts = layout.files(source)
    judge = None if config.verifier is None else constant(config.verifier, root, config.verifier_seconds)
    name = source.stem if source.is_file() else source.name
    about = {"environment": environment, "source": name, "source_revision": _digest(p for _, p in parts)}
    counts: dict[str, int] = {}
    for split, path in parts:
        schema = _schema(path)
        ours = (schema.metadata or {}).get(b"openforge_table") == b"tasks"
        read = (
            _ours(path, schema.names, config, environment)
            if ours
            else _theirs(path, schema, split, config.columns, judge, about)
        )
        counts[split] = counts.get(split, 0)
        for i, row in enumerate(read):
            rows.append(row)
            counts[split] += 1
            places[f"{path.name if path == source else path.relative_to(source)} row {i}"] = row["task_id"]
    for split, count in counts.items():
        if not count:
            names = ", ".join(p.name for s, p in parts if s == split)
            raise TasksError(f"{source}: split {split!r} is empty: {names} holds no row")
    if (doubled := doubled_id(places, "rows")) is not None:
        raise TasksError(f"{source}: {doubled}")
    return rows


def _schema(path: Path) -> pa.Schema:
    try:
        return pq.read_schema(path)
    except (OSError, pa.ArrowException) as e:
        raise _unreadable(path, e) from None


def _unreadable(path: Path, e: Exception) -> TasksError:
    told = " ".join(str(e).split())[:200]
    return TasksError(f"{path} cannot be read; it must be a whole parquet file (is the download cut off?): {told}")


def _batches(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, Row]]:
    """(number, row) of a file's rows with some of its columns."""
    try:
        with pq.ParquetFile(path) as f:
            start = 0
            for batch in f.iter_batches(batch_size=BATCH, columns=list(columns)):
                yield from enumerate(batch.to_pylist(), start)
                start += batch.num_rows
    except (OSError, pa.ArrowException) as e:
        raise _unreadable(path, e) from None


# ---- a table of ours -----------------------------------------------------------------------------
def _ours(path: Path, names: Sequence[str], config: Tasks, environment: str) -> Iterator[Row]:
    if "columns" in config.model_fields_set or config.verifier is not None:
        raise TasksError(
            f"{path} has the schema of our own tasks table already; remove tasks.columns and tasks.verifier"
        )
    try:
        tables.check_file(path, tables.TASKS)
    except tables.TableError as e:
        raise TasksError(str(e)) from None
    if missing := [n for n in tables.TASKS.schema.names if n not in names]:
        raise TasksError(f"{path} says to be our own tasks table, but lacks the columns {', '.join(missing)}")
    for i, row in _batches(path, tables.TASKS.schema.names):
        for c in tables.TASKS.columns:
            if row[c.name] is None:
                raise Cell(path, c.name, i, None).wrong("a value: our own schema has no NULL here")
        if row["environment"] != environment:
            raise Cell(path, "environment", i, row["environment"]).wrong(f"{environment!r}, the run's `environment`")
        Cell(path, "verifier", i, row["verifier"]).verifier()
        Cell(path, "files", i, row["files"]).files()
        yield row


# ---- a table of theirs ---------------------------------------------------------------------------
def _theirs(
    path: Path,
    schema: pa.Schema,
    split: str,
    columns: Columns,
    judge: Callable[[Row], Row] | None,
    about: Mapping[str, str],
) -> Iterator[Row]:
    used = _used(path, schema.names, columns, judge is not None)
    payload = _payload(path, schema.names, columns, used)
    for i, given in _batches(path, sorted({*used.values(), *payload})):

        def cell(ours: str, i: int = i, given: Row = given) -> Cell:
            return Cell(path, used[ours], i, given[used[ours]])

        row: Row = {
            "task_id": cell("task_id").identity() if "task_id" in used else None,
            "split": cell("split").text() if "split" in used else split,
            "instruction": cell("instruction").text(),
            "payload": json.dumps({c: given[c] for c in payload}, ensure_ascii=False, sort_keys=True, default=_plain),
            "files": cell("files").files() if "files" in used else [],
            "tags": cell("tags").tags() if "tags" in used else [],
            # The table sets no limits: the run's hold.
            "task_limits": {"turns": None, "tokens": None, "seconds": None},
            **about,
        }
        if row["task_id"] is None:
            own = cell("verifier").verifier()["version"] if "verifier" in used else ""
            content = [row["split"], row["instruction"], row["payload"], own]
            row["task_id"] = tables.h("task", *content, *(f"{f['path']}:{_sha(f['content'])}" for f in row["files"]))
        row["verifier"] = cell("verifier").verifier() if judge is None else judge(row)
        yield row


def _used(path: Path, names: Sequence[str], columns: Columns, judged: bool) -> dict[str, str]:
    """Column of the table by column of ours, as far as the table has it."""
    there = f"its columns are {', '.join(names)}"
    used: dict[str, str] = {}
    for ours in ("task_id", "instruction", "split", "files", "verifier", "tags"):
        theirs = getattr(columns, ours)
        asked = ours in columns.model_fields_set and theirs is not None
        if ours == "task_id" and theirs == HASH:
            continue
        if ours == "verifier" and judged:
            if asked:
                raise TasksError(f"tasks.columns.verifier {theirs!r} has no effect beside tasks.verifier; remove one")
            continue
        if theirs in names:
            used[ours] = theirs
        elif asked:
            raise TasksError(f"{path} has no column {theirs!r}, which tasks.columns.{ours} names; {there}")
        elif ours in ("task_id", "instruction"):
            right = f"name the one that holds it in tasks.columns.{ours}"
            right += f", or set that to {HASH}" if ours == "task_id" else ""
            raise TasksError(f"{path} has no column {ours!r}; {right}; {there}")
        elif ours == "verifier":
            raise TasksError(
                f"{path} has no column 'verifier'; set tasks.verifier to a script that judges every row, or name the "
                f"column in tasks.columns.verifier; {there}"
            )
    return used


def _payload(path: Path, names: Sequence[str], columns: Columns, used: Mapping[str, str]) -> list[str]:
    if columns.payload is None:
        return [n for n in names if n not in used.values()]
    for name in columns.payload:
        if name not in names:
            raise TasksError(
                f"{path} has no column {name!r}, which tasks.columns.payload names; its columns are {', '.join(names)}"
            )
    return list(columns.payload)


# ---- one verifier for all rows -------------------------------------------------------------------
def constant(verifier: str, root: Path, seconds: float) -> Callable[[Row], Row]:
    """What makes a row's verifier of the script or folder at `tasks.verifier`.

    The command is `verify.py WORKSPACE ANSWER`; it finds `task.json` beside it: task_id, split, instruction, tags and
    payload of the row.

    Raises:
        TasksError: it does not exist, is too large, or holds no verify.py.
    """
    files = verifier_files(verifier, root)
    first = files[0]["path"]
    start = ["python3", "-I", first] if first.endswith(".py") else [f"./{first}"]
    command = [*start, "{workspace}", "{answer}"]

    def made(row: Row) -> Row:
        told = {k: row[k] for k in ("task_id", "split", "instruction", "tags")} | {
            "payload": json.loads(row["payload"])
        }
        fields = {"path": FIELDS, "content": json.dumps(told, ensure_ascii=False).encode(), "mode": 0o644}
        return make_verifier(Path(verifier).stem, command, [*files, fields], seconds)

    return made


def verifier_files(verifier: str, root: Path) -> list[Row]:
    """The files of `tasks.verifier`, the program first."""
    top, where = root / verifier, f"tasks.verifier {verifier!r}"
    if top.is_file():
        found = [(top.name, top)]
        if top.suffix != ".py" and not top.stat().st_mode & 0o100:
            raise TasksError(f"{where}: {top} must be a Python script (.py) or executable (chmod +x)")
    elif (top / SCRIPT).is_file():
        hidden = ("__pycache__", ".git")
        inside = [p for p in sorted(top.rglob("*")) if p.is_file() and not set(p.relative_to(top).parts) & set(hidden)]
        found = sorted(((str(p.relative_to(top)), p) for p in inside), key=lambda f: (f[0] != SCRIPT, f[0]))
    else:
        raise TasksError(f"{where}: {top} must be a script, or a folder with {SCRIPT}")
    if any(name == FIELDS for name, _ in found):
        raise TasksError(f"{where}: {top} holds a {FIELDS}, which is the name of the row's own fields")
    size = sum(p.stat().st_size for _, p in found)
    if size > VERIFIER_BYTES:
        raise TasksError(f"{where}: {top} holds {size} bytes; at most {VERIFIER_BYTES} are copied into every row")
    return [{"path": n, "content": p.read_bytes(), "mode": p.stat().st_mode & 0o777} for n, p in found]


# ---- digests -------------------------------------------------------------------------------------
def _digest(paths: Iterable[Path]) -> str:
    """Digest of the table's files in their order."""
    total = hashlib.sha256()
    for path in paths:
        with path.open("rb") as f:
            total.update(hashlib.file_digest(f, "sha256").digest())
    return total.hexdigest()[:16]


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _plain(value: Any) -> Any:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)
