"""Task folders in ClawEval's format: read one as a row of the tasks table, write a row as one.

    <folder>/task.yaml     the format's own keys, plus `split` and `verifier`
    <folder>/<path>        what `sandbox_files` lists; it stands at /workspace/<path> when the agent starts
    <folder>/verifier/...  what `verifier.files` lists; it enters /grader after the agent is dead

`verifier: {command, files, timeout_seconds, name}` is an extra key: a program that prints one JSON line
(`openforge.environments.verdict`). Unknown keys are kept in the row's payload and written back.
"""

from __future__ import annotations

import hashlib
import json
import os
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


def read_folder(path: Path, split: str | None = None, source: str | None = None) -> dict[str, Any]:
    """A row of the tasks table.

    Args:
        path: the task's folder.
        split: split of a task whose task.yaml names none.
        source: the row's source; the name of the folder that holds the task folders without it.

    Raises:
        FolderError: a file or key is missing or mistyped.
        Unsupported: the task needs services, tools, a simulated user, attachments or ClawEval's own grader.
    """
    if not (path / "task.yaml").is_file():
        raise FolderError(f"{path} is no task folder: it holds no task.yaml")
    try:
        data = read_yaml(path / "task.yaml")
    except (ConfigError, OSError) as e:
        raise FolderError(str(e)) from None
    keys = _Keys(path / "task.yaml", data)
    task_id = keys.text("task_id")
    _supported(task_id, data, path)
    environment = keys.mapping("environment", {})
    limits = _Keys(keys.file, environment, "environment.")
    files = keys.strings("sandbox_files", []) or limits.strings("fixtures", [])
    row = {
        "task_id": task_id,
        "environment": "claw_eval",
        "split": keys.text("split", split),
        "instruction": _Keys(keys.file, keys.mapping("prompt"), "prompt.").text("text"),
        "payload": json.dumps(_rest(data), ensure_ascii=False, sort_keys=True, default=str),
        "files": [_file(path, path, f, f"{keys.file}: sandbox_files") for f in files],
        "verifier": _read_verifier(path, _Keys(keys.file, keys.mapping("verifier"), "verifier."), data),
        "task_limits": {
            "turns": limits.number("max_turns", int, DEFAULT_TURNS),
            "tokens": limits.number("max_tokens", int, None),
            "seconds": limits.number("timeout_seconds", float, DEFAULT_SECONDS),
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

    def number(self, key: str, kind: type, default: float | None) -> Any:
        """A positive number, or None for an explicit null."""
        value = self._data.get(key, default)
        if value is None:
            return None
        allowed = (int,) if kind is int else (int, float)
        if not isinstance(value, allowed) or isinstance(value, bool) or value <= 0:
            what = "a whole number" if kind is int else "a number"
            raise FolderError(f"{self.file}: key {self._prefix + key!r} is {value!r}; it must be {what} above 0")
        return kind(value)


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


def _read_verifier(path: Path, keys: _Keys, data: Mapping[str, Any]) -> dict[str, Any]:
    where = f"{keys.file}: verifier.files"
    files = [_file(path / "verifier", path, f, where) for f in keys.strings("files", [])]
    # The format's own grader-only files come in with the verifier's, at the same time and place.
    grader = _Keys(keys.file, data).strings("sandbox_grader_files", [])
    files += [_file(path, path, f, f"{keys.file}: sandbox_grader_files") for f in grader]
    command = keys.strings("command")
    if not command:
        raise FolderError(f"{keys.file}: key 'verifier.command' must not be empty")
    seconds = keys.number("timeout_seconds", float, None)
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


def _write(base: Path, file: Mapping[str, Any]) -> None:
    path = base / safe_path(file["path"], str(base))
    write_beside(path, file["content"])
    os.chmod(path, file["mode"])


def _digest(value: Any) -> str:
    body = json.dumps(value, sort_keys=True, default=lambda b: b.hex())
    return hashlib.sha256(body.encode()).hexdigest()[:16]
