"""`openforge tasks check`: read task folders, a checkout or a table as a run would, and say what is wrong with each.

A folder of one's own may bring agents (agents/reference.sh, nothing.sh, cheat.sh): each is run in a sandbox, with the
task's services, and must score 1, 0 and 0. A task with agents is held against doing nothing in any case.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openforge import config
from openforge.environments.claw_eval import folder, scripted, setup
from openforge.environments.claw_eval.keys import FolderError, Unsupported
from openforge.environments.verdict import parse
from openforge.harnesses import HarnessError
from openforge.sandboxes import LocalBackend, Owner
from openforge.sandboxes.protocol import SandboxError
from openforge.software import SoftwareMissing
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
    if not args.no_agents:
        wrong += asyncio.run(_agents(rows, root))
    doubled = folder.doubled_id({place: row["task_id"] for place, row in rows.items()})
    if doubled:
        print(f"{top}: {doubled}")
    if unsupported:
        left = f"tasks that are left: {len(rows)}"
        print(f"{top}: warning: unsupported tasks, which a run leaves out: {unsupported}; {left}")
    forgotten = [p.name for p in others if not _programs(p)]
    if forgotten:
        names = ", ".join(forgotten)
        print(f"{top}: warning: subfolders without task.yaml, which are no tasks: {len(forgotten)} ({names})")
    return 1 if wrong or doubled else 0


def _programs(path: Path) -> bool:
    """Whether a folder holds programs that tasks share, and is no task whose task.yaml was forgotten."""
    parts = ("agents", "fixtures", "grader.py", "verifier")
    return any(path.glob("*.py")) and not any((path / name).exists() for name in parts)


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


async def _agents(rows: Mapping[Path, dict[str, Any]], root: Path) -> int:
    """Run the agents that tasks bring, as many tasks at once as there are cores; how many tasks are wrong."""
    with_agents = {place: row for place, row in rows.items() if (place / "agents").is_dir()}
    if not with_agents:
        return 0
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="openforge-check-") as scratch:
        async with LocalBackend(Path(scratch), "tasks-check", Owner.current()) as backend:
            gate = asyncio.Semaphore(os.cpu_count() or 1)
            for told in asyncio.as_completed([_task(backend, gate, p, r) for p, r in with_agents.items()]):
                line, right = await told
                wrong += not right
                print(line, flush=True)
    return wrong


async def _task(backend: LocalBackend, gate: asyncio.Semaphore, place: Path, row: dict[str, Any]) -> tuple[str, bool]:
    """What a task's agents scored, as a line, and whether each scored what it must."""
    found: dict[str, str] = {}
    wrong: list[str] = []
    async with gate:
        for name, right in scripted.AGENTS.items():
            script = place / "agents" / f"{name}.sh"
            if not script.is_file() and name != "nothing":
                continue
            text = script.read_text() if script.is_file() else scripted.NOTHING
            score, why = await _score(backend, row, text, f"check-{row['task_id']}-{name}")
            found[name] = why if score is None else f"{score:g}"
            if score != right:
                wrong.append(f"agent {name} must score {right:g}: {why}")
    if wrong:
        return f"{place}: {'; '.join(wrong)}", False
    return f"{place}: agents score as they must ({', '.join(f'{n} {s}' for n, s in found.items())})", True


async def _score(backend: LocalBackend, row: dict[str, Any], script: str, episode: str) -> tuple[float | None, str]:
    """The score of an agent, and what was said of it; None where it has none."""
    try:
        result = await scripted.play(backend, row, script, episode)
    except (SandboxError, HarnessError, SoftwareMissing) as e:
        return None, str(e)
    if result.verifier_output is None:
        return None, f"it ended as {result.status} ({result.message})"
    return parse(result.verifier_output).score, f"the verifier said {result.verifier_output}"


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
