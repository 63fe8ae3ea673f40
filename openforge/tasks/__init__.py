"""tasks: raw tasks of a run, one row a task.

Generated tasks are written as folders in ClawEval's format and read back by the importer that reads anyone's: what is
trained on is what stands in results/<run>/tasks/.
"""

from __future__ import annotations

import fnmatch
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from openforge.config import EvalConfig, RunConfig, Tasks
from openforge.environments.claw_eval.folder import make_verifier, write_folder
from openforge.tasks import demo, layout, tiny
from openforge.tasks.errors import TasksError
from openforge.tasks.sources import NEEDS, read_all
from openforge.tasks.table import read_table

__all__ = ["GENERATED", "SOURCES", "TasksError", "check_splits", "configured", "raw_tasks"]

VERIFIER_SECONDS = 30.0
GENERATED = {"demo": demo.generate, "tiny": tiny.generate}
SOURCES = (
    "demo, tiny, a folder of task folders, a checkout of ClawEval or QwenClawBench, a .parquet file, or a folder of "
    "parquet files"
)


def raw_tasks(
    config: Tasks, environment: str, folder: Path, root: Path, has: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Rows of tables.TASKS.

    Args:
        config: the `tasks` section of a run.
        environment: what runs them.
        folder: where generated task folders are written.
        root: what a relative `tasks.source` starts from.
        has: what the configuration has of what tasks can need (`sources.NEEDS`): judge, user.

    Raises:
        TasksError: the source does not exist, holds no task or a wrong one; two tasks have one id.
        FolderError: a task folder is not in the format.
    """
    if config.source in GENERATED:
        make = GENERATED[config.source]
        beside = folder.with_name(f".{folder.name}.new")
        shutil.rmtree(beside, ignore_errors=True)
        for task in make(config.train, config.heldout, config.unseen, config.seed):
            write_folder(beside / task["task_id"], row(task, config.source))
        shutil.rmtree(folder, ignore_errors=True)
        beside.rename(folder)
        rows = read_all(folder, config.source)
    else:
        source, kind = root / config.source, layout.kind(root / config.source)
        if kind is None:
            raise TasksError(f"tasks.source {config.source!r}: {source} is no folder; it must be {SOURCES}")
        table = kind == "table"
        rows = read_table(source, config, environment, root) if table else read_all(source, source.name, has)
    if not rows:
        raise TasksError(f"tasks.source {config.source!r} holds no task that can be run")
    return [r | {"environment": environment} for r in _tagged(rows, config)]


def _tagged(rows: list[dict[str, Any]], config: Tasks) -> list[dict[str, Any]]:
    """The tasks with a tag of `tasks.tags`.

    Raises:
        TasksError: one of these is no task's tag.
    """
    if config.tags is None:
        return rows
    there = sorted({t for r in rows for t in r["tags"]})
    for pattern in config.tags:
        if not fnmatch.filter(there, pattern):
            raise TasksError(
                f"tasks.tags: no task of {config.source!r} has the tag {pattern!r}; its tags are {', '.join(there)}"
            )
    return [r for r in rows if any(fnmatch.filter(r["tags"], p) for p in config.tags)]


def configured(config: RunConfig | EvalConfig) -> frozenset[str]:
    """What a configuration has of what tasks can need (`sources.NEEDS`); the judge's endpoint plays users too."""
    return frozenset(NEEDS) if config.judge is not None else frozenset()


def check_splits(rows: Iterable[Mapping[str, Any]], config: RunConfig | EvalConfig) -> None:
    """Refuse tasks without a split that the run will draw from, before it has done anything.

    Raises:
        TasksError: names the key, the split, and the splits there are.
    """
    counts = Counter(r["split"] for r in rows)
    there = ", ".join(f"{s} ({n})" for s, n in sorted(counts.items()))
    asked = [(f"cells[{i}] ({c.name})", c.split, c.tasks or 1) for i, c in enumerate(config.cells)]
    if isinstance(config, RunConfig) and config.iterations:
        asked.append(("data.train_split", config.data.train_split, 1))
    for key, split, least in asked:
        if counts[split] < least:
            raise TasksError(
                f"{key} draws {least if least > 1 else 'tasks'} from split {split!r}, which has {counts[split]} tasks; "
                f"the splits of {config.tasks.source!r} are {there}"
            )


def row(task: Mapping[str, Any], source: str) -> dict[str, Any]:
    """A generated task (plain data: see demo.py) as a row."""
    return {
        "task_id": task["task_id"],
        "environment": "claw_eval",
        "split": task["split"],
        "instruction": task["instruction"],
        "payload": task["payload"],
        "files": list(_files(task["files"])),
        "verifier": make_verifier(
            task["kind"],
            ["python3", "-I", "verify.py", *task["arguments"]],
            list(_files(task["verifier"])),
            VERIFIER_SECONDS,
        ),
        "task_limits": {"turns": task["turns"], "tokens": None, "seconds": 60.0},
        "tags": [task["kind"]],
        "source": source,
        "source_revision": "",
    }


def _files(files: Mapping[str, str]) -> Iterable[dict[str, Any]]:
    for path, text in files.items():
        yield {"path": path, "content": text.encode(), "mode": 0o644}
