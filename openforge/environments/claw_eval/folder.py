"""Task folders in ClawEval's format: read one as a row of the tasks table, write a row as one.

    <folder>/task.yaml     the format's own keys, plus `split` and `verifier`
    <folder>/<path>        what `sandbox_files` lists; it stands at /workspace/<path> when the agent starts
    <folder>/verifier/...  what `verifier.files` lists; it enters the sandbox after the agent is dead

`verifier: {command, files, timeout_seconds, name}` is an extra key: a program that prints one JSON line
(`openforge.environments.verdict`). Unknown keys elsewhere are kept in the row's payload and written back.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from openforge.config import ConfigError, read_yaml
from openforge.tables import write_beside

# Limits that the format sets where task.yaml is silent; an explicit null sets none.
DEFAULT_TURNS, DEFAULT_SECONDS = 20, 300.0
_OWN = ("task_id", "split", "tags", "sandbox_files", "sandbox_grader_files", "verifier")
_RESERVED = ("task.yaml", "grader.py", "verifier")
_VERIFIER_KEYS = ("name", "command", "files", "timeout_seconds")
# Words of verifier.command that the environment fills in.
PLACEHOLDERS = ("{answer}", "{workspace}", "{evidence}", "{python}")
# Keys that the format documents, by the mapping they stand in. Others occur, so that they are no errors.
_KNOWN = {
    "": (
        *("task_id", "task_name", "version", "category", "difficulty", "tags", "split", "prompt", "environment"),
        *("tools", "tool_endpoints", "services", "user_agent", "scoring_components", "safety_checks", "verifier"),
        *("expected_actions", "judge_rubric", "reference_solution", "primary_dimensions", "sandbox_files"),
        *("sandbox_grader_files", "local_grader_files", "env_snapshot_files", "env_snapshot_commands"),
    ),
    "prompt": ("text", "language", "attachments"),
    "environment": (
        *("timeout_seconds", "max_turns", "max_tokens", "fixtures", "env_snapshot_timeout"),
        *("enable_todo", "enable_compact"),
    ),
}
# The widths of the table's columns.
_INT32, _INT64 = 2**31 - 1, 2**63 - 1


class FolderError(ValueError):
    """A task folder that is not in the format; the message names the file and the key."""


class Unsupported(FolderError):
    """A task that needs what this installation lacks.

    Attributes:
        task_id: the task.
        what: what it needs, e.g. "mock services".
    """

    def __init__(self, task_id: str, what: str) -> None:
        super().__init__(f"task {task_id!r} needs {what}, which this installation cannot run")
        self.task_id, self.what = task_id, what


def task_folders(base: Path) -> tuple[list[Path], list[Path]]:
    """Folders below `base`, sorted: those with a task.yaml, and the others that are not hidden.

    Raises:
        OSError: `base` cannot be listed.
    """
    tasks, others = [], []
    for path in sorted(base.iterdir()):
        try:
            is_task = (path / "task.yaml").exists()
            is_other = path.is_dir() and not path.name.startswith(".")
        except OSError:
            # Reading it says why it cannot be read; nothing is left out in silence.
            is_task, is_other = True, False
        if is_task:
            tasks.append(path)
        elif is_other:
            others.append(path)
    return tasks, others


def doubled_id(ids: Mapping[Any, str], what: str = "folders") -> str | None:
    """The sentence on a task_id that several places (paths, or texts) have; None if all differ."""
    by_id: dict[str, list[str]] = {}
    for place, task_id in ids.items():
        by_id.setdefault(task_id, []).append(place.name if isinstance(place, Path) else str(place))
    for task_id, names in by_id.items():
        if len(names) > 1:
            return f"task_id {task_id!r} stands in several {what} ({', '.join(names)}); ids must differ"
    return None


def near_misses(path: Path) -> list[str]:
    """Unknown keys of a task.yaml that look like a known one's misspelling, a sentence each.

    They are no errors: the format's own tasks have unknown keys. A task.yaml that cannot be read has none.
    """
    try:
        data = read_yaml(path / "task.yaml")
    except ConfigError:
        return []
    found = []
    for where, known in _KNOWN.items():
        keys = data.get(where) if where else data
        for key in keys if isinstance(keys, dict) else ():
            close = [] if key in known else difflib.get_close_matches(str(key), known, n=1, cutoff=0.8)
            prefix = f"{where}." if where else ""
            found += [f"key {prefix + key!r} has no effect here; did you mean {prefix + c!r}?" for c in close]
    return found


def read_folder(path: Path, split: str | None = None, source: str | None = None) -> dict[str, Any]:
    """A row of the tasks table.

    Args:
        path: the task's folder.
        split: split of a task whose task.yaml names none.
        source: the row's source; the name of the folder that holds the task folders without it.

    Raises:
        FolderError: a file or key is missing, mistyped or unreadable.
        Unsupported: the task needs services, tools, a simulated user, attachments or ClawEval's own grader.
    """
    try:
        return _row(path, split, source)
    except OSError as e:
        raise FolderError(f"{e.filename or path} cannot be read: {e.strerror}") from None


def _row(path: Path, split: str | None, source: str | None) -> dict[str, Any]:
    if not (path / "task.yaml").is_file():
        raise FolderError(f"{path} is no task folder: it holds no task.yaml")
    try:
        data = read_yaml(path / "task.yaml")
    except ConfigError as e:
        raise FolderError(str(e)) from None
    keys = _Keys(path / "task.yaml", data)
    task_id = keys.text("task_id")
    _supported(task_id, data, path)
    environment = keys.mapping("environment", {})
    limits = _Keys(keys.file, environment, "environment.")
    row = {
        "task_id": task_id,
        "environment": "claw_eval",
        "split": keys.text("split", split),
        "instruction": _Keys(keys.file, keys.mapping("prompt"), "prompt.").text("text"),
        "payload": json.dumps(_rest(data), ensure_ascii=False, sort_keys=True, default=str),
        "files": _agent_files(path, keys, limits),
        "verifier": _read_verifier(path, _Keys(keys.file, keys.mapping("verifier"), "verifier."), data),
        "task_limits": {
            "turns": limits.whole("max_turns", DEFAULT_TURNS, _INT32),
            "tokens": limits.whole("max_tokens", None, _INT64),
            "seconds": limits.seconds("timeout_seconds", DEFAULT_SECONDS),
        },
        "tags": keys.strings("tags", []),
        "source": source or path.resolve().parent.name,
    }
    return row | {"source_revision": _digest(row)}


def write_folder(path: Path, row: Mapping[str, Any]) -> None:
    """Write a row of the tasks table as a folder; `read_folder` gives the same row back.

    Raises:
        FolderError: a file of the row cannot stand in a task folder.
    """
    limits, verifier = row["task_limits"], row["verifier"]
    rest = json.loads(row["payload"])
    if not isinstance(rest, dict):
        raise FolderError(f"task {row['task_id']!r}: the payload must be a JSON object to be written as task.yaml")
    environment: dict[str, Any] = {
        **rest.pop("environment", {}),
        "timeout_seconds": limits["seconds"],
        "max_turns": limits["turns"],
    }
    if limits["tokens"] is not None:
        environment["max_tokens"] = limits["tokens"]
    data = {
        "task_id": row["task_id"],
        "split": row["split"],
        "tags": list(row["tags"]),
        "prompt": {"text": row["instruction"], **rest.pop("prompt", {})},
        "environment": environment,
        "sandbox_files": [f["path"] for f in row["files"]],
        "verifier": {
            "name": verifier["name"],
            "command": list(verifier["command"]),
            "files": [f["path"] for f in verifier["files"]],
            "timeout_seconds": verifier["seconds"],
        },
        **rest,
    }
    for f in row["files"]:
        if PurePosixPath(f["path"]).parts[0] in _RESERVED:
            raise FolderError(f"task {row['task_id']!r}: a task's file cannot be named {f['path']!r} in a task folder")
        _write(path, f)
    for f in verifier["files"]:
        _write(path / "verifier", f)
    write_beside(path / "task.yaml", yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=100))


def make_verifier(
    name: str, command: Sequence[str], files: Sequence[Mapping[str, Any]], seconds: float
) -> dict[str, Any]:
    """The `verifier` column; its version is the digest of what it runs."""
    body = {"command": list(command), "files": [dict(f) for f in files]}
    return {"name": name, "version": _digest(body), **body, "seconds": float(seconds)}


def check_placeholders(command: Sequence[str], where: str) -> None:
    """Raises `FolderError` for a word in braces that the environment does not fill in."""
    for word in command:
        if re.fullmatch(r"\{\w+\}", word) and word not in PLACEHOLDERS:
            raise FolderError(f"{where}: unknown placeholder {word}; known: {', '.join(PLACEHOLDERS)}")


def safe_path(path: str, where: str) -> str:
    """The path if it is relative and stays inside its folder; `FolderError` otherwise."""
    pure = PurePosixPath(path)
    if not path or pure.is_absolute() or ".." in pure.parts or str(pure) != path or path == ".":
        raise FolderError(f"{where}: {path!r} must be a plain path relative to the folder")
    return path


class _Keys:
    """Typed access to a mapping of task.yaml; errors name the file and the dotted key."""

    def __init__(self, file: Path, data: Mapping[str, Any], prefix: str = "") -> None:
        self.file, self._data, self._prefix = file, data, prefix

    def _get(self, key: str, kind: type | tuple[type, ...], default: Any, what: str) -> Any:
        value = self._data.get(key, default)
        if value is None and key not in self._data:
            raise FolderError(f"{self.file}: key {self._prefix + key!r} is required ({what})")
        if not isinstance(value, kind) or isinstance(value, bool):
            raise FolderError(f"{self.file}: key {self._prefix + key!r} is {value!r}; it must be {what}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value: str = self._get(key, str, default, "a text")
        if not value:
            raise FolderError(f"{self.file}: key {self._prefix + key!r} must not be empty")
        return value

    def mapping(self, key: str, default: dict[str, Any] | None = None) -> dict[str, Any]:
        value: dict[str, Any] = self._get(key, dict, default, "a mapping")
        return value

    def strings(self, key: str, default: list[str] | None = None) -> list[str]:
        value: list[str] = self._get(key, list, default, "a list of texts")
        if not all(isinstance(v, str) for v in value):
            raise FolderError(f"{self.file}: key {self._prefix + key!r} is {value!r}; it must be a list of texts")
        return value

    def whole(self, key: str, default: int | None, most: int) -> int | None:
        """A whole number from 1 to `most`, or None for an explicit null."""
        value = self._data.get(key, default)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
            what = f"a whole number above 0 and at most {most}"
            raise FolderError(f"{self.file}: key {self._prefix + key!r} is {value!r}; it must be {what}")
        return value

    def seconds(self, key: str, default: float | None) -> float | None:
        """A positive number of seconds, or None for an explicit null."""
        value = self._data.get(key, default)
        if value is None:
            return None
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        # No .inf and no .nan, of which every comparison is false, and no whole number that no float can hold.
        if not (number and 0 < value <= sys.float_info.max):
            what = "a finite number above 0"
            raise FolderError(f"{self.file}: key {self._prefix + key!r} is {value!r}; it must be {what}")
        return float(value)

    def known(self, names: Sequence[str]) -> None:
        """Refuse a key of the mapping that is none of `names`."""
        for key in self._data:
            if key not in names:
                close = difflib.get_close_matches(str(key), names, n=1, cutoff=0.5)
                hint = f"did you mean {self._prefix + close[0]!r}?" if close else f"known: {', '.join(names)}"
                raise FolderError(f"{self.file}: unknown key {self._prefix + key!r}; {hint}")


def _supported(task_id: str, data: Mapping[str, Any], path: Path) -> None:
    user = data.get("user_agent") or {}
    prompt = data.get("prompt") or {}
    needs = {
        "mock services": data.get("services"),
        "tools with HTTP endpoints": data.get("tools") or data.get("tool_endpoints"),
        "a simulated user": isinstance(user, dict) and user.get("enabled"),
        "attachments in the prompt": isinstance(prompt, dict) and prompt.get("attachments"),
    }
    for what, value in needs.items():
        if value:
            raise Unsupported(task_id, what)
    if "verifier" not in data and ((path / "grader.py").exists() or "scoring_components" in data):
        raise Unsupported(task_id, "a grader of ClawEval's own library")


def _agent_files(path: Path, keys: _Keys, environment: _Keys) -> list[dict[str, Any]]:
    """What the agent finds in its work folder."""
    key, names = "sandbox_files", keys.strings("sandbox_files", [])
    if not names:
        key, names = "environment.fixtures", environment.strings("fixtures", [])
    where = f"{keys.file}: {key}"
    files = [_file(path, path, f, where) for f in names]
    for name in names:
        if (path / name).resolve().is_relative_to((path / "verifier").resolve()):
            raise FolderError(f"{where}: {name!r} lies in verifier/; the agent would see what judges it")
    return once(files, where)


def _read_verifier(path: Path, keys: _Keys, data: Mapping[str, Any]) -> dict[str, Any]:
    keys.known(_VERIFIER_KEYS)
    where = f"{keys.file}: verifier.files"
    files = [_file(path / "verifier", path, f, where) for f in keys.strings("files", [])]
    # The format's own grader-only files come in with the verifier's, at the same time and place.
    grader = _Keys(keys.file, data).strings("sandbox_grader_files", [])
    files += [_file(path, path, f, f"{keys.file}: sandbox_grader_files") for f in grader]
    once(files, f"{where} and sandbox_grader_files" if grader else where)
    command = keys.strings("command")
    if not command:
        raise FolderError(f"{keys.file}: key 'verifier.command' must not be empty")
    check_placeholders(command, f"{keys.file}: verifier.command")
    seconds = keys.seconds("timeout_seconds", None)
    if seconds is None:
        raise FolderError(f"{keys.file}: key 'verifier.timeout_seconds' is required (seconds the verifier may run)")
    return make_verifier(keys.text("name", "verifier"), command, files, seconds)


def _rest(data: Mapping[str, Any]) -> dict[str, Any]:
    """What no column holds: kept as the payload."""
    rest = {k: v for k, v in data.items() if k not in (*_OWN, "prompt", "environment")}
    prompt = {k: v for k, v in data["prompt"].items() if k != "text"}
    limits = ("timeout_seconds", "max_turns", "max_tokens")
    environment = {k: v for k, v in data.get("environment", {}).items() if k not in limits}
    return rest | ({"prompt": prompt} if prompt else {}) | ({"environment": environment} if environment else {})


def _file(base: Path, folder: Path, name: str, where: str) -> dict[str, Any]:
    path = base / safe_path(name, where)
    if not path.is_file():
        raise FolderError(f"{where}: {path} does not exist")
    if not path.resolve().is_relative_to(folder.resolve()):
        raise FolderError(f"{where}: {path} is a link out of the task's folder")
    return {"path": name, "content": path.read_bytes(), "mode": path.stat().st_mode & 0o777}


def once(files: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """The files, if no two have one path; `FolderError` otherwise."""
    paths = [f["path"] for f in files]
    for path in paths:
        if paths.count(path) > 1:
            raise FolderError(f"{where}: {path!r} is listed twice")
    return files


def _write(base: Path, file: Mapping[str, Any]) -> None:
    path = base / safe_path(file["path"], str(base))
    write_beside(path, file["content"])
    os.chmod(path, file["mode"])


def _digest(value: Any) -> str:
    body = json.dumps(value, sort_keys=True, default=lambda b: b.hex())
    return hashlib.sha256(body.encode()).hexdigest()[:16]
