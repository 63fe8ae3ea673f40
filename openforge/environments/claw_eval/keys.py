"""Typed access to what a task's file says; errors are one sentence that names the file and the key."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from openforge.config import ConfigError, read_yaml
from openforge.tables import write_beside

Row = dict[str, Any]


class FolderError(ValueError):
    """A task that is not in its format; the message names the file and the key."""


class Unsupported(FolderError):
    """A task that needs what this installation lacks.

    Attributes:
        task_id: the task.
        what: what it needs, e.g. "the live web".
    """

    def __init__(self, task_id: str, what: str) -> None:
        super().__init__(f"task {task_id!r} needs {what}, which this installation cannot run")
        self.task_id, self.what = task_id, what


class Keys:
    """Typed access to a mapping of a task's file; errors name the file and the dotted key."""

    def __init__(self, file: Path, data: Mapping[str, Any], prefix: str = "") -> None:
        self.file, self.prefix, self._data = file, prefix, data

    @classmethod
    def of(cls, file: Path) -> Keys:
        """The keys of a YAML file."""
        if not file.is_file():
            raise FolderError(f"{file.parent} is no task folder: it holds no {file.name}")
        try:
            return cls(file, read_yaml(file))
        except ConfigError as e:
            raise FolderError(str(e)) from None

    def __contains__(self, key: str) -> bool:
        return key in self._data

    def wrong(self, key: str, must: str) -> FolderError:
        """The error for a key whose value is not what it must be."""
        return FolderError(f"{self.file}: key {self.prefix + key!r} is {self._data.get(key)!r}; it must be {must}")

    def _get(self, key: str, kind: type | tuple[type, ...], default: Any, what: str) -> Any:
        value = self._data.get(key, default)
        if value is None and key not in self._data:
            raise FolderError(f"{self.file}: key {self.prefix + key!r} is required ({what})")
        if not isinstance(value, kind) or isinstance(value, bool):
            raise FolderError(f"{self.file}: key {self.prefix + key!r} is {value!r}; it must be {what}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value: str = self._get(key, str, default, "a text")
        if not value:
            raise FolderError(f"{self.file}: key {self.prefix + key!r} must not be empty")
        return value

    def free_text(self, key: str) -> str:
        """A text that may be empty or left out."""
        value: str = self._get(key, str, "", "a text") if self._data.get(key) is not None else ""
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._data.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def mapping(self, key: str, default: Row | None = None) -> Row:
        value: Row = self._get(key, dict, default, "a mapping")
        return value

    def inside(self, key: str) -> Keys:
        """The keys of a mapping below; none where it is left out or null."""
        data = self.mapping(key) if self._data.get(key) is not None else {}
        return Keys(self.file, data, f"{self.prefix}{key}.")

    def each(self, key: str) -> list[Keys]:
        """The keys of each mapping of a list; none where it is left out or null."""
        value = self._data.get(key) or []
        if not isinstance(value, list) or not all(isinstance(v, dict) for v in value):
            raise self.wrong(key, "a list of mappings")
        return [Keys(self.file, v, f"{self.prefix}{key}[{i}].") for i, v in enumerate(value)]

    def strings(self, key: str, default: list[str] | None = None) -> list[str]:
        value: list[str] = self._get(key, list, default, "a list of texts")
        if not all(isinstance(v, str) for v in value):
            raise FolderError(f"{self.file}: key {self.prefix + key!r} is {value!r}; it must be a list of texts")
        return value

    def whole(self, key: str, default: int | None, most: int) -> int | None:
        """A whole number from 1 to `most`, or None for an explicit null."""
        value = self._data.get(key, default)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
            raise self.wrong(key, f"a whole number above 0 and at most {most}")
        return value

    def seconds(self, key: str, default: float | None) -> float | None:
        """A positive number of seconds, or None for an explicit null."""
        value = self._data.get(key, default)
        if value is None:
            return None
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        # No .inf and no .nan, of which every comparison is false, and no whole number that no float can hold.
        if not (number and 0 < value <= sys.float_info.max):
            raise self.wrong(key, "a finite number above 0")
        return float(value)

    def known(self, names: Sequence[str]) -> None:
        """Refuse a key of the mapping that is none of `names`."""
        for key in self._data:
            if key not in names:
                close = difflib.get_close_matches(str(key), names, n=1, cutoff=0.5)
                hint = f"did you mean {self.prefix + close[0]!r}?" if close else f"known: {', '.join(names)}"
                raise FolderError(f"{self.file}: unknown key {self.prefix + key!r}; {hint}")

    def rest(self, without: Sequence[str]) -> Row:
        """What the file says beside some keys."""
        return {k: v for k, v in self._data.items() if k not in without}


# ---- files ---------------------------------------------------------------------------------------
def safe_path(path: str, where: str) -> str:
    """The path if it is relative and stays inside its folder; `FolderError` otherwise."""
    pure = PurePosixPath(path)
    if not path or pure.is_absolute() or ".." in pure.parts or str(pure) != path or path == ".":
        raise FolderError(f"{where}: {path!r} must be a plain path relative to the folder")
    return path


def file_row(base: Path, folder: Path, name: str, where: str) -> Row:
    """The file `name` below `base` as a FILE of the tables; it may not lie outside `folder`, not even by a link."""
    path = base / safe_path(name, where)
    if not path.is_file():
        raise FolderError(f"{where}: {path} does not exist")
    if not path.resolve().is_relative_to(folder.resolve()):
        raise FolderError(f"{where}: {path} is a link out of the task's folder")
    return {"path": name, "content": path.read_bytes(), "mode": path.stat().st_mode & 0o777}


def once(files: list[Row], where: str) -> list[Row]:
    """The files, if no two have one path; `FolderError` otherwise."""
    paths = [f["path"] for f in files]
    for path in paths:
        if paths.count(path) > 1:
            raise FolderError(f"{where}: {path!r} is listed twice")
    return files


def write_file(base: Path, file: Mapping[str, Any]) -> None:
    """Write a FILE below `base`."""
    path = base / safe_path(file["path"], str(base))
    write_beside(path, file["content"])
    os.chmod(path, file["mode"])


def digest_of(value: Any) -> str:
    """Digest of plain data with bytes in it; 16 hex digits."""
    body = json.dumps(value, sort_keys=True, default=lambda b: b.hex())
    return hashlib.sha256(body.encode()).hexdigest()[:16]
