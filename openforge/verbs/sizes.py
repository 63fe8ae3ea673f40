"""Bytes on disk, and how they are said."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def size(paths: Iterable[Path]) -> int:
    """Bytes that files and folders take on disk; a file with several names (hard links) counts once."""
    seen: set[tuple[int, int]] = set()
    total = 0
    for path in paths:
        for stat in _stats(path):
            if (stat.st_dev, stat.st_ino) not in seen:
                seen.add((stat.st_dev, stat.st_ino))
                total += stat.st_blocks * 512
    return total


def _stats(path: Path) -> Iterable[os.stat_result]:
    try:
        yield path.lstat()
        entries = list(os.scandir(path)) if path.is_dir() else []
    except OSError:
        return  # gone meanwhile: a run may be at work
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _stats(Path(entry.path))
        else:
            try:
                yield entry.stat(follow_symlinks=False)
            except OSError:
                continue


def said(count: float) -> str:
    """E.g. 1.3 GB."""
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
