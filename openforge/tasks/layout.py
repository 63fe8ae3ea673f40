"""Which parquet files of a source are which split: one file, or a folder as the Hugging Face hub lays it out.

- README.md's front matter, where its `configs` name data_files;
- else a file's name: `train-00000-of-00002.parquet` and so on, all shards of which must be there;
- else the name of its folder, `data` aside;
- else a file's name where it is one of NAMES (`test.parquet`), and `train` for the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import yaml

from openforge.tasks.errors import TasksError

SPLIT = "train"  # of a file that names none
NAMES = ("train", "validation", "valid", "val", "dev", "test", "eval", "heldout", "unseen")
_SHARD = re.compile(r"(?P<split>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})(-[0-9a-f]+)?\.parquet")
_FRONT = re.compile(r"\A---\s*\n(.*?)\n---\s*(\n|\Z)", re.S)


def kind(source: Path) -> Literal["folders", "table"] | None:
    """What a source is: a folder with tasks (their format is `sources.kind`), a table in parquet files, or None."""
    if source.is_file():
        return "table" if source.suffix == ".parquet" else None
    if not source.is_dir():
        return None
    tasks = ("*/task.yaml", "tasks/*/task.yaml", "tasks/task_*.md")
    if any(next(source.glob(t), None) for t in tasks) or next(_parquet(source), None) is None:
        return "folders"
    return "table"


def files(source: Path) -> list[tuple[str, Path]]:
    """(split, file) of every parquet file of a table, ordered by split and name.

    Raises:
        TasksError: a shard is missing, the front matter names what does not exist, or it has several configurations.
    """
    if not source.is_dir():
        return [(_split(source.parent, source), source)]
    found = _configured(source) or [(_split(source, path), path) for path in sorted(_parquet(source))]
    _whole(source, found)
    return sorted(found)


def _parquet(source: Path) -> Iterator[Path]:
    for path in source.rglob("*.parquet"):
        if not any(part.startswith(".") for part in path.relative_to(source).parts):
            yield path


def _split(source: Path, path: Path) -> str:
    shard = _SHARD.fullmatch(path.name)
    if shard is not None:
        return shard["split"]
    above = path.relative_to(source).parts[:-1]
    if above and above != ("data",):
        return above[-1]
    return path.stem if path.stem in NAMES else SPLIT


def _whole(source: Path, found: list[tuple[str, Path]]) -> None:
    """A table whose download stopped lacks shards; what is there would look like all of it."""
    for _, path in found:
        shard = _SHARD.fullmatch(path.name)
        for i in range(int(shard["count"]) if shard else 0):
            assert shard is not None
            others = path.parent.glob(f"{shard['split']}-{i:05d}-of-{shard['count']}*.parquet")
            if next(others, None) is None:
                raise TasksError(f"{source}: shard {shard['split']}-{i:05d}-of-{shard['count']}.parquet is missing")


def _configured(source: Path) -> list[tuple[str, Path]]:
    """Files by the front matter of README.md; none where it names no data_files."""
    readme = source / "README.md"
    front = _FRONT.match(readme.read_text(encoding="utf-8", errors="replace")) if readme.is_file() else None
    try:
        data: Any = yaml.safe_load(front[1]) if front else None
    except yaml.YAMLError as e:
        raise TasksError(f"{readme}: the front matter is not readable YAML: {' '.join(str(e).split())}") from None
    listed = data.get("configs") if isinstance(data, dict) else None
    configs = [c for c in listed or () if isinstance(c, dict) and c.get("data_files")]
    if not configs:
        return []
    chosen = [c for c in configs if c.get("default") or c.get("config_name") == "default"] or configs
    if len(chosen) > 1:
        names = ", ".join(str(c.get("config_name")) for c in chosen)
        raise TasksError(f"{readme}: it has several configurations ({names}); name the folder or file of one as source")
    return [pair for entry in _entries(chosen[0]["data_files"]) for pair in _matched(source, *entry)]


def _entries(data_files: Any) -> Iterator[tuple[str, str]]:
    """(split, pattern) of `data_files`: a pattern, patterns, or mappings of split and path."""
    for item in data_files if isinstance(data_files, list) else [data_files]:
        split, path = (item.get("split", SPLIT), item.get("path")) if isinstance(item, dict) else (SPLIT, item)
        for pattern in path if isinstance(path, list) else [path]:
            yield str(split), str(pattern)


def _matched(source: Path, split: str, pattern: str) -> list[tuple[str, Path]]:
    where = f"{source / 'README.md'}: data_files {pattern!r} of split {split!r}"
    if Path(pattern).is_absolute() or ".." in Path(pattern).parts:
        raise TasksError(f"{where} must be a path inside the folder")
    found = sorted(p for p in source.glob(pattern) if p.is_file())
    if not found:
        raise TasksError(f"{where}: there is no such file")
    return [(split, p) for p in found]
