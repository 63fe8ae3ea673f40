"""The tasks of a folder, whatever format they are in: one way to read each, so that a run and `tasks check` agree."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openforge.environments.claw_eval import checkout, folder, qwenclaw, setup
from openforge.environments.claw_eval.keys import Unsupported
from openforge.tasks.errors import TasksError

Row = dict[str, Any]
# What a task can need of a configuration (`setup.Setup.needs`), in words.
NEEDS = {
    "judge": "a judge, and none is configured",
    "user": "a model for its simulated user, and no judge is configured",
}
SPLIT = "train"  # of a folder of one's own that names none


@dataclass(frozen=True)
class Entry:
    """A task that has not been read.

    Attributes:
        place: its folder or file.
        read: gives its row; raises FolderError, or Unsupported.
    """

    place: Path
    read: Callable[[], Row]


def kind(base: Path) -> str:
    """The format of a folder's tasks: claweval or qwenclaw for a checkout, else folder."""
    if checkout.is_checkout(base):
        return "claweval"
    return "qwenclaw" if qwenclaw.is_checkout(base) else "folder"


def entries(base: Path, source: str | None = None) -> tuple[list[Entry], list[Path]]:
    """The tasks of a folder, sorted by name, and folders in it that are none.

    Args:
        base: a checkout, a folder of task folders, or one task's folder.
        source: the rows' source; the folder's name without it.

    Raises:
        OSError: `base` cannot be listed.
    """
    name = source or base.resolve().name
    match kind(base):
        case "claweval":
            paths = checkout.task_folders(base)
            return [Entry(p, functools.partial(checkout.read_task, p, name)) for p in paths], []
        case "qwenclaw":
            paths = qwenclaw.task_files(base)
            return [Entry(p, functools.partial(qwenclaw.read_task, p, name)) for p in paths], []
    found, others = ([base], []) if (base / "task.yaml").is_file() else folder.task_folders(base)
    one = source if found != [base] else None
    return [Entry(p, functools.partial(folder.read_folder, p, SPLIT, one)) for p in found], others


def read_all(base: Path, source: str, has: Collection[str] = ()) -> list[Row]:
    """Every task of a folder that can be run and scored; those that cannot are named by what they need, and counted.

    Args:
        has: what the configuration has of NEEDS.

    Raises:
        FolderError: a task is not in its format.
        TasksError: two tasks have one id.
    """
    rows: list[Row] = []
    left_out: Counter[str] = Counter()
    ids: dict[Path, str] = {}
    for entry in entries(base, source)[0]:
        try:
            row = entry.read()
        except Unsupported as e:
            left_out[e.what] += 1
            continue
        ids[entry.place] = row["task_id"]
        lacking = [n for n in setup.of(row).needs if n not in has]
        if lacking:
            left_out[NEEDS[lacking[0]]] += 1
        else:
            rows.append(row)
    for what, count in left_out.most_common():
        print(f"warning: {base}: {count} tasks are left out: they need {what}", file=sys.stderr)
    doubled = folder.doubled_id(ids)
    if doubled:
        raise TasksError(f"{base}: {doubled}")
    return rows
