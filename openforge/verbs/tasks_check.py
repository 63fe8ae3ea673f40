"""`openforge tasks check`: read task folders, a checkout or a table as a run would, and say what is wrong with each."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

from openforge import config
from openforge.environments.claw_eval import folder, setup
from openforge.environments.claw_eval.keys import FolderError, Unsupported
from openforge.tasks import TasksError, layout, sources
from openforge.tasks.table import read_table
from openforge.verbs import VerbError


def run(args: argparse.Namespace, root: Path) -> int:
    """Check `args.folder`; exit code 1 if a task is wrong."""
    top = Path(args.folder)
    if layout.kind(top) == "table" or top.suffix == ".parquet":
        return _table(top, args.run, root)
    if args.run is not None:
        raise VerbError(f"--run says how to read a table of tasks; {top} is none")
    if not top.is_dir():
        raise VerbError(f"{top} is no folder, so it holds no task.yaml")
    entries, others = sources.entries(top)
    if not entries:
        raise VerbError(f"{top} holds no task.yaml, and no folder below it does")
    rows, wrong, unsupported = _read(entries, warn=sources.kind(top) == "folder")
    doubled = folder.doubled_id({place: row["task_id"] for place, row in rows.items()})
    if doubled:
        print(f"{top}: {doubled}")
    if unsupported:
        left = f"tasks that are left: {len(rows)}"
        print(f"{top}: warning: unsupported tasks, which a run leaves out: {unsupported}; {left}")
    if others:
        names = ", ".join(p.name for p in others)
        print(f"{top}: warning: subfolders without task.yaml, which are no tasks: {len(others)} ({names})")
    return 1 if wrong or doubled else 0


def _read(entries: list[sources.Entry], warn: bool) -> tuple[dict[Path, dict[str, Any]], int, int]:
    """Rows by place, and how many are wrong and unsupported; a line each is printed."""
    rows: dict[Path, dict[str, Any]] = {}
    wrong = unsupported = 0
    for entry in entries:
        for line in folder.near_misses(entry.place) if warn else ():
            print(f"{entry.place}: warning: {line}")
        try:
            row = rows[entry.place] = entry.read()
            needs = setup.of(row).needs
            told = f" (a run needs {' and '.join(_WHAT[n] for n in needs)})" if needs else ""
            print(f"{entry.place}: ok, task {row['task_id']}{told}")
        except Unsupported as e:
            unsupported += 1
            print(f"{entry.place}: unsupported: {e}")
        except FolderError as e:
            wrong += 1
            print(f"{entry.place}: {e}")
    return rows, wrong, unsupported


_WHAT = {"judge": "a judge", "user": "a model for its simulated user"}


def _table(path: Path, run: str | None, root: Path) -> int:
    """A table of one's own, by the column map and verifier of a run's configuration."""
    given, environment = config.Tasks(source=str(path)), "claw_eval"
    if run is not None:
        loaded = config.load(run, root).config
        given, environment = loaded.tasks, loaded.environment
    try:
        rows = read_table(path.absolute(), given, environment, root)
    except TasksError as e:
        print(e)
        return 1
    counts = ", ".join(f"{n} {split}" for split, n in sorted(Counter(r["split"] for r in rows).items()))
    print(f"{path}: ok, {len(rows)} tasks ({counts})")
    return 0
