"""Every column of every table, declared once.

A declaration is rendered to an arrow schema (`Table.schema`), to a DuckDB view (`openforge.store`) and to
docs/tables.md. Files carry the table's name and `SCHEMA_VERSION` in their parquet metadata; a file of another
version is refused with a sentence, never read by guess.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

SCHEMA_VERSION = 2


class TableError(ValueError):
    """A table file or row that does not fit its declaration; the message names the file, row and column."""


@dataclass(frozen=True)
class Column:
    """One column: its arrow type, whether it may be NULL, and the sentence that documents it."""

    name: str
    type: pa.DataType
    doc: str
    null: bool = False


@dataclass(frozen=True)
class Table:
    """A table: its columns and, for partitioned ones, the hive keys of its path below results/<run>/."""

    name: str
    doc: str
    columns: tuple[Column, ...]
    partition: tuple[str, ...] = ()

    @property
    def schema(self) -> pa.Schema:
        fields = [pa.field(c.name, c.type, nullable=c.null, metadata={"doc": c.doc}) for c in self.columns]
        return pa.schema(fields, metadata={"openforge_table": self.name, "openforge_schema": str(SCHEMA_VERSION)})

    def arrow(self, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
        """Rows (dicts with exactly this table's columns) as an arrow table.

        Raises:
            TableError: a row misses a column, has an unknown one, holds NULL where that is forbidden, or
                a value of another type.
        """
        names = [c.name for c in self.columns]
        for i, row in enumerate(rows):
            if row.keys() != set(names):
                missing, extra = [n for n in names if n not in row], [k for k in row if k not in names]
                raise TableError(f"table {self.name}, row {i}: missing columns {missing}, unknown columns {extra}")
        arrays = []
        for c in self.columns:
            values = [row[c.name] for row in rows]
            if not c.null:
                for i, v in enumerate(values):
                    if v is None:
                        raise TableError(f"table {self.name}, row {i}: column {c.name} must not be NULL")
            try:
                array = pa.array(values, type=c.type)
                arrays.append(array)
                if pa.types.is_list(c.type) and not c.type.value_field.nullable and array.flatten().null_count:
                    raise ValueError("NULL inside a list")
                # Arrow would cut 1.5 down to 1 without a word.
                if _whole_numbers(c.type) and _loses(c.type, pa.array(values).type):
                    raise ValueError("a fraction or truth value where the column holds whole numbers")
            except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, ValueError) as e:
                raise TableError(f"table {self.name}, column {c.name} ({c.type}): {e}") from e
        return pa.Table.from_arrays(arrays, schema=self.schema)


# ---- building blocks ----
_str, _i32, _i64, _f64, _bool = pa.string(), pa.int32(), pa.int64(), pa.float64(), pa.bool_()
_ids = pa.list_(pa.field("item", pa.int32(), nullable=False))
_floats = pa.list_(pa.field("item", pa.float32(), nullable=False))

FILE = pa.struct([("path", _str), ("content", pa.binary()), ("mode", _i32)])
VERIFIER = pa.struct(
    [
        ("name", _str),
        ("version", _str),
        ("command", pa.list_(_str)),
        ("files", pa.list_(FILE)),
        ("seconds", _f64),
    ]
)
LIMITS = pa.struct([("turns", _i32), ("tokens", _i64), ("seconds", _f64)])
SAMPLING = pa.struct(
    [
        ("temperature", _f64),
        ("top_p", _f64),
        ("top_k", _i32),
        ("min_p", _f64),
        ("repetition_penalty", _f64),
        ("presence_penalty", _f64),
        ("frequency_penalty", _f64),
        ("max_tokens", _i32),
    ]
)
DISPATCH = pa.struct(
    [
        ("tool", _str),
        ("endpoint", _str),
        ("arguments", _str),
        ("status", _i32),
        ("response", _str),
        ("latency", _f64),
        ("time", _str),
    ]
)
SECONDS = pa.struct([("queue", _f64), ("setup", _f64), ("agent", _f64), ("verify", _f64), ("total", _f64)])

_TASK_COLUMNS = (
    Column("task_id", _str, "Identity of the task within its source."),
    Column(
        "environment",
        _str,
        "Environment that runs it: a name below openforge/environments or an import path.",
    ),
    Column("split", _str, "Split it belongs to, e.g. train or heldout."),
    Column("instruction", _str, "What the agent is asked to do."),
    Column("payload", _str, "The source's own fields as JSON, kept unread for graders and analysis."),
    Column("files", pa.list_(FILE), "Files placed in the work folder before the agent starts (path relative)."),
    Column(
        "verifier",
        VERIFIER,
        "Program that judges the work folder after the agent is dead; its files enter then.",
    ),
    Column("task_limits", LIMITS, "The task's own limits; a NULL member sets none."),
    Column("tags", pa.list_(_str), "Tags of the source; the first is the task's kind."),
    Column("source", _str, "Where it came from: a generator's name or a folder's."),
    Column("source_revision", _str, "Digest of what produced the row."),
)

TASKS = Table("tasks", "Raw tasks, one row a task.", _TASK_COLUMNS)

_CELL = (
    Column("purpose", _str, "train or eval."),
    Column("cell", _str, "One (benchmark, policy, harness, template and window, sampling); `train` for training."),
    Column(
        "iteration",
        _i32,
        "Training iteration k, or the checkpoint evaluated; NULL for a foreign policy.",
        True,
    ),
)
_PARTITION = ("purpose", "cell", "iteration", "shard")

ROLLOUTS = Table(
    "rollouts",
    "The planned episodes of an iteration or evaluation; a row holds everything its episode needs.",
    (
        Column("rollout_id", _str, "h(group_id, sample)."),
        Column("group_id", _str, "h(run, purpose, cell, iteration, draw, task_id)."),
        *_TASK_COLUMNS,
        Column("sample", _i32, "Index of the rollout within its group, from 0."),
        *_CELL,
        Column("benchmark", _str, "Suite the task is counted under."),
        Column("draw", _i32, "Count of repeats of the task within one table, from 0."),
        Column("shard", _i32, "Shard that runs it, from 1; a group never spans shards."),
        Column("reserve", _bool, "Held back for dynamic sampling."),
        Column("orchestrator", _str, "Sandbox backend: local or orchard."),
        Column(
            "image",
            _str,
            "Root file system of the sandbox; host is the backend's default, e.g. this machine's own, read-only.",
        ),
        Column("network", _str, "Network mode of the sandbox: none, proxy or open."),
        Column("grading", _str, "Where its verifier runs: in the same sandbox, or in a second one."),
        Column("harness", _str, "Harness that drives the episode."),
        Column("harness_options", _str, "The harness's options as JSON."),
        Column("judge", _str, "Judge configuration as JSON; NULL without one.", True),
        Column("limits", LIMITS, "Limits in force: the task's, lowered by the config's."),
        Column("sampling", SAMPLING, "Sampling sent upstream with every call."),
        Column("seed", _i64, "Seed of the rollout; its calls' seeds are derived from it and sent to servers of ours."),
        Column("policy", _str, "Policy sampled from: a checkpoint's name (RUN@k), folder, or URL#MODEL."),
    ),
    ("purpose", "cell", "iteration"),
)

EPISODES = Table(
    "episodes",
    "One row an attempt: evidence and the verifier's result. No reward here (see scores).",
    (
        Column("episode_id", _str, "h(rollout_id, attempt)."),
        Column("rollout_id", _str, "The rollout it carries out."),
        Column("group_id", _str, "The rollout's group."),
        Column("task_id", _str, "The rollout's task."),
        *_CELL,
        Column("benchmark", _str, "Suite the task is counted under."),
        Column("split", _str, "The task's split."),
        Column("kind", _str, "The task's first tag, its kind; NULL without tags.", True),
        Column("sample", _i32, "Index within the group."),
        Column("attempt", _i32, "Attempt of the rollout, from 0."),
        Column("final", _bool, "True for exactly one attempt a rollout: the one that counts."),
        Column("staleness", _i32, "(k-1) - b(k) of a training episode; NULL in evaluation.", True),
        Column("harness", _str, "Harness that drove it."),
        Column("harness_version", _str, "Version the harness reported."),
        Column(
            "image_digest",
            _str,
            "Digest of the sandbox's root file system; host for the machine's own.",
            True,
        ),
        Column("verifier_version", _str, "Version of the verifier that ran."),
        Column("isolation", _str, "Isolation actually reached, of the commands and of the harness process."),
        Column("network", _str, "Network mode actually used."),
        Column("policy_version", _str, "iteration@sha256 of the weights sampled from; none@URL for an endpoint."),
        Column("status", _str, "How it ended; openforge/rollout/status.py has the table."),
        Column("message", _str, "One sentence on an end that is not `completed`.", True),
        Column("harness_exit", _i32, "Exit code of the harness; NULL if it was killed or never ran.", True),
        Column("verifier_output", _str, "The verifier's JSON line; NULL if it gave none.", True),
        Column("answer", _str, "The agent's last message; NULL if it gave none.", True),
        Column(
            "dispatches",
            pa.list_(DISPATCH),
            "Calls of the task's tools in the order in which they ended (see the view dispatches): arguments and "
            "response as JSON, the HTTP status, seconds, ISO 8601 time; NULL if the agent did not come to its end.",
            True,
        ),
        Column("audit", _str, "What each of the task's services says was done to it, as JSON; NULL without.", True),
        Column(
            "snapshot",
            _str,
            "What the task had looked at in the work folder after the agent, as JSON; NULL if nothing.",
            True,
        ),
        Column("user_rounds", _i32, "Messages of the simulated user after the first; 0 without one."),
        Column("turns", _i32, "Calls answered."),
        Column("prompt_tokens", _i64, "Prompt tokens over all calls; NULL where an endpoint did not tell them.", True),
        Column(
            "response_tokens", _i64, "Sampled tokens over all calls; NULL where an endpoint did not tell them.", True
        ),
        Column("seconds", SECONDS, "Seconds by phase; a phase not reached is NULL."),
        Column("started", pa.timestamp("us", tz="UTC"), "Start of the attempt."),
        Column(
            "artifacts",
            _str,
            "Kept log of the harness: `artifacts/.../shard=NNNN.zip/MEMBER` below results/<run>/, with the work folder "
            "beside it where that is kept; NULL if none.",
            True,
        ),
    ),
    _PARTITION,
)

CALLS = Table(
    "calls",
    "One row a model call that reached the policy, token-exact.",
    (
        Column("episode_id", _str, "The episode."),
        Column("call", _i32, "Index in order of arrival, from 0."),
        Column("thread", _i32, "Lineage thread: calls that extend one another share it; -1 when quarantined."),
        Column("dialect", _str, "Wire format: chat, responses or messages."),
        Column("model", _str, "Model name the harness asked for."),
        Column("prefix_of", _i32, "Storage: call whose prompt + response shares the longest prefix.", True),
        Column("prefix_len", _i32, "Storage: tokens of that prefix; 0 without prefix_of."),
        Column("prompt_suffix_ids", _ids, "Storage: prompt token ids after the prefix."),
        Column(
            "prompt_tokens", _i32, "Length of the whole prompt in tokens; NULL where an endpoint did not tell it.", True
        ),
        Column("parent", _i32, "Training: call whose prompt + response this prompt exactly extends.", True),
        Column("response_token_ids", _ids, "Sampled token ids, the stop token included."),
        Column("logprobs", _floats, "Log-probability of each sampled token under the sampling distribution."),
        Column("finish_reason", _str, "As upstream told it; trained are stop, length and tool_calls.", True),
        Column("sampling", SAMPLING, "Sampling that was sent."),
        Column("policy_version", _str, "Policy that answered."),
        Column("messages", _str, "Messages that are new since the prefix call, as JSON; images as sha256:HASH."),
        Column("response", _str, "The parsed assistant message as JSON.", True),
        Column("tools_sha256", _str, "Hash of the tools in blobs; NULL without tools.", True),
        Column("system_sha256", _str, "Hash of the system text in blobs; NULL without one.", True),
        Column("images", pa.list_(_str), "Hashes in blobs of all images of the prompt, in order."),
        Column("delivery", _str, "generated, sent or confirmed."),
        Column("trainable", _bool, "Trained under the task's reward."),
        Column("reason", _str, "Why not trainable (docs/statuses.md lists the reasons); NULL when trainable.", True),
        Column("arrived", pa.timestamp("us", tz="UTC"), "Arrival of the request."),
        Column("latency", _f64, "Seconds from arrival to the answer."),
    ),
    _PARTITION,
)

BLOBS = Table(
    "blobs",
    "Content addressed by hash: images, tool lists, system texts.",
    (
        Column("sha256", _str, "Hash of the bytes."),
        Column("mime", _str, "Media type."),
        Column("width", _i32, "Pixels; NULL for what is no PNG, JPEG or GIF.", True),
        Column("height", _i32, "Pixels; NULL for what is no PNG, JPEG or GIF.", True),
        Column("bytes", pa.binary(), "The content."),
    ),
    _PARTITION,
)

SCORES = Table(
    "scores",
    "Rewards by scorer version; the latest one counts.",
    (
        Column("episode_id", _str, "The episode."),
        Column("scorer_version", _str, "Scorer that judged it."),
        Column(
            "status",
            _str,
            "scored, judge_failed, unsupported, or not_scorable for an episode without evidence.",
        ),
        Column("reward", _f64, "Reward; NULL when it could not be judged.", True),
        Column("passed", _bool, "Whether the task counts as solved; NULL when it could not be judged.", True),
        Column("components", _str, "Components of the reward as JSON."),
        Column("judge", _str, "Record of the judgement as JSON; NULL without a judge.", True),
        Column("scored_at", pa.timestamp("us", tz="UTC"), "When; the latest score of an episode counts."),
    ),
    ("purpose", "cell", "iteration"),
)

SAMPLES = Table(
    "samples",
    "Training rows: merged calls of one lineage thread, with loss mask and credit.",
    (
        Column("sample_id", _str, "h(episode_id, index of the row within the episode)."),
        Column("episode_id", _str, "The episode."),
        Column("group_id", _str, "The group its advantage was computed in."),
        Column("calls", pa.list_(_i32), "Calls merged into the row, in order."),
        Column("token_ids", _ids, "Prompt and everything after it, length L."),
        Column("loss_mask", pa.list_(pa.int8()), "1 where a sampled token is trained, length L."),
        Column("logprobs", _floats, "Recorded log-probabilities where loss_mask is 1, else 0; length L."),
        Column("rewards", _floats, "Reward per token, length L: the episode's at its last trained token."),
        Column("advantages", _floats, "Advantage per token, length L; NULL where the epoch computes them.", True),
        Column("weight", _f64, "Weight of the row in the loss: rows of an episode add up to 1."),
        Column("policy_version", _str, "Policy that sampled the row."),
        Column("images", pa.list_(_str), "Hashes of the row's images in blobs, in order."),
    ),
    ("purpose", "cell", "iteration"),
)

METRICS = Table(
    "metrics",
    "Training metrics, one row an optimizer step and metric.",
    (
        Column("iteration", _i32, "Iteration k."),
        Column("step", _i32, "Optimizer step within the iteration, from 0; -1 for a figure of the whole epoch."),
        Column("name", _str, "Metric, with veRL's names where it has one."),
        Column("value", _f64, "Its value."),
    ),
    ("purpose", "cell", "iteration"),
)

TABLES: dict[str, Table] = {t.name: t for t in (TASKS, ROLLOUTS, EPISODES, CALLS, BLOBS, SCORES, SAMPLES, METRICS)}


# ---- identities ----
def h(*parts: str | int | None) -> str:
    """Identity of a row: 16 hex digits of SHA-256 over the parts as JSON (None stays distinct from "")."""
    return hashlib.sha256(json.dumps(parts, separators=(",", ":")).encode()).hexdigest()[:16]


def group_id(run: str, purpose: str, cell: str, iteration: int | None, draw: int, task_id: str) -> str:
    return h("group", run, purpose, cell, iteration, draw, task_id)


def rollout_id(group: str, sample: int) -> str:
    return h("rollout", group, sample)


def episode_id(rollout: str, attempt: int) -> str:
    return h("episode", rollout, attempt)


# ---- files ----
def partition_path(table: str, purpose: str, cell: str, iteration: int | None, shard: int | None = None) -> str:
    """Path of a partition's file below results/<run>/, e.g. scores/purpose=train/.../scores.parquet.

    A foreign policy's evaluation (iteration None) stands under iteration=none.
    """
    it = "none" if iteration is None else f"{iteration:04d}"
    tail = "" if shard is None else f"/shard={shard:04d}"
    return f"{table}/purpose={purpose}/cell={cell}/iteration={it}{tail}/{table}.parquet"


def write_table(path: str | os.PathLike[str], table: Table, rows: Sequence[Mapping[str, Any]] | pa.Table) -> None:
    """Write rows as a parquet file of `table`: written beside, flushed to disk, renamed."""
    data = rows if isinstance(rows, pa.Table) else table.arrow(rows)
    if data.schema.names != table.schema.names:
        raise TableError(f"table {table.name}: columns {data.schema.names} are not {table.schema.names}")
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with open(beside, "wb") as f:
            pq.write_table(data.cast(table.schema), f, compression="zstd")
            f.flush()
            os.fsync(f.fileno())
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)


def read_table(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], table: Table) -> pa.Table:
    """Read one or several files of `table`, in the order given.

    Raises:
        TableError: a file that cannot be read, is another table's, or has another schema version.
    """
    many = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    parts = []
    for p in many:
        try:
            # ParquetFile and not read_table: the latter would add the path's hive keys as columns.
            with pq.ParquetFile(p) as f:
                _check_schema(p, f.schema_arrow, table)
                parts.append(f.read().cast(table.schema))
        except (OSError, pa.ArrowInvalid) as e:
            raise _unreadable(p, table, e) from e
    return pa.concat_tables(parts) if parts else table.schema.empty_table()


def check_file(path: str | os.PathLike[str], table: Table) -> None:
    """Check by its footer alone that a file is whole and of `table`; the errors are those of `read_table`."""
    try:
        _check_schema(path, pq.read_schema(path), table)
    except (OSError, pa.ArrowInvalid) as e:
        raise _unreadable(path, table, e) from e


def _unreadable(path: str | os.PathLike[str], table: Table, error: Exception) -> TableError:
    """A file that is no parquet (any more): an interrupt never leaves one, a full disk or a copy may."""
    return TableError(
        f"{path} cannot be read as table {table.name} ({' '.join(str(error).split())}); where it is damaged, remove "
        "it, and the same command writes it again"
    )


def _check_schema(path: str | os.PathLike[str], schema: pa.Schema, table: Table) -> None:
    meta = schema.metadata or {}
    found = meta.get(b"openforge_table", b"").decode(), meta.get(b"openforge_schema", b"").decode()
    if found != (table.name, str(SCHEMA_VERSION)):
        raise TableError(
            f"{path} holds table {found[0] or 'unknown'!r} with schema {found[1] or 'none'}; "
            f"expected {table.name!r} with schema {SCHEMA_VERSION}; read it with the version of OpenForge that "
            "wrote it, or begin a run of another name"
        )


def read_rows(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], table: Table) -> list[dict[str, Any]]:
    """`read_table` as a list of dicts."""
    rows: list[dict[str, Any]] = read_table(paths, table).to_pylist()
    return rows


def write_beside(path: str | os.PathLike[str], text: str | bytes, mode: int = 0o666) -> None:
    """Write a small file beside its target, flush it to disk and rename it; `mode` is less the umask."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    data = text.encode() if isinstance(text, str) else text
    try:
        with open(beside, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)


def markdown() -> str:
    """docs/tables.md."""
    out = [
        "# Tables",
        "",
        "Rendered from `openforge/tables.py` by `make docs`; a test compares. Files are parquet, schema "
        f"version {SCHEMA_VERSION}, below `results/<run>/`.",
        "",
    ]
    for t in TABLES.values():
        where = "/".join(f"{p}=*" for p in t.partition)
        path = f"`{t.name}/{where}/{t.name}.parquet`" if where else f"`{t.name}.parquet`"
        out += [
            f"## {t.name}",
            "",
            f"{t.doc} {path}",
            "",
            "| column | type | NULL | meaning |",
            "|---|---|---|---|",
        ]
        out += [f"| {c.name} | `{_short(c.type)}` | {'yes' if c.null else ''} | {c.doc} |" for c in t.columns]
        out.append("")
    return "\n".join(out)


def _parts(t: pa.DataType) -> dict[str, pa.DataType]:
    """Types inside a list or struct by name."""
    if pa.types.is_struct(t):
        return {f.name: f.type for f in t}
    return {"item": t.value_type} if pa.types.is_list(t) else {}


def _whole_numbers(t: pa.DataType) -> bool:
    return pa.types.is_integer(t) or any(map(_whole_numbers, _parts(t).values()))


def _loses(declared: pa.DataType, given: pa.DataType) -> bool:
    """Whether values of type `given` would be cut down to the whole numbers of `declared`."""
    if pa.types.is_integer(declared):
        return bool(pa.types.is_floating(given) or pa.types.is_boolean(given))
    inside = _parts(given)
    return any(_loses(t, inside[name]) for name, t in _parts(declared).items() if name in inside)


def _short(t: pa.DataType) -> str:
    if t.equals(FILE):
        return "file"
    if t.equals(DISPATCH):
        return "dispatch"
    if pa.types.is_struct(t):
        return "struct<" + ", ".join(f"{f.name}: {_short(f.type)}" for f in t) + ">"
    if pa.types.is_list(t):
        return f"list<{_short(t.value_type)}>"
    return str(t)
