"""`openforge clean RUN`: the sizes of what a run keeps, by kind; and removal of what is asked for, and of nothing else.

What is removed is first renamed to a name that a run's start puts away, so that a kill leaves no half of anything.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import sys
import uuid
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from openforge import run_lock, store, tables
from openforge.train.checkpoint import prune_states
from openforge.verbs import VerbError
from openforge.verbs.figures import full_states
from openforge.verbs.sizes import said, size


@dataclass(frozen=True)
class Kind:
    """Files of one kind.

    Attributes:
        flag: whether --NAME removes them; checkpoints and results go with --everything only.
    """

    name: str
    what: str
    paths: tuple[Path, ...]
    flag: bool = True


def kinds(run: str, root: Path) -> list[Kind]:
    """What a run keeps, each file under one kind."""
    run_dir = root / "results" / run
    twins = [run_dir / f".{name}" for name in tables.TABLES] + [run_dir / ".tasks.parquet", run_dir / store.STORE]
    found = [
        Kind("partial", "progress of unfinished shards: their episodes would run again", _of(run_dir, "partial")),
        Kind("logs", "logs of jobs", _there(root / "logs" / run)),
        Kind("artifacts", "kept work folders and harness logs", _of(run_dir, "artifacts")),
        Kind("superseded", "iterations that were made anew", _of(run_dir, "superseded")),
        Kind("states", "optimizer states but the newest: tombstones stay", tuple(full_states(run_dir)[:-1])),
        Kind("caches", "views and what they need, made again by the next query", _there(*twins)),
    ]
    found.append(Kind("checkpoints", "weights", _of(run_dir, "checkpoints", "policies"), False))
    taken = {p for kind in found for p in kind.paths}
    rest = [p for p in _entries(run_dir) if p not in taken and p.name != "state"]
    rest += [p for p in _entries(run_dir / "state") if p not in taken]
    return [*found, Kind("results", "tables, evaluations, report and the newest state", tuple(rest), False)]


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


FLAGS = ("partial", "logs", "artifacts", "superseded", "states", "caches")


def run(name: str, root: Path, asked: Collection[str], everything: str | None, yes: bool) -> int:
    """Print the sizes, then remove what is asked for.

    Args:
        asked: names of kinds.
        everything: None, or the run's name as it was given with --everything; empty to have it typed.
        yes: remove without a question.

    Raises:
        VerbError: there is no such run, nobody can be asked, or the run's name is not repeated right.
        RunBusy: a live process works on the run.
    """
    # A name as it is listed, so that no path leads out of results/.
    known = store.runs(root / "results")
    if name not in known:
        raise VerbError(f"there is no run {name!r} in results/; runs there: {', '.join(known) or 'none'}")
    run_dir = root / "results" / name
    found = kinds(name, root)
    sizes = {k.name: size(k.paths) for k in found}
    for kind in found:
        flag = f"--{kind.name}" if kind.flag else ""
        print(f"{kind.name:12}{said(sizes[kind.name]):>10}  {flag:14}{kind.what}")
    if everything is None and not asked:
        return 0
    chosen = [k for k in found if k.name in asked]
    with _alone(run_dir, f"openforge clean {name}"):
        if everything is not None:
            _confirm_name(name, everything)
            _remove(run_dir)
            print(f"removed results/{name}")
            # Logs stand elsewhere; the other kinds have gone with the rest.
            chosen = [k for k in chosen if k.name == "logs"]
        words = f"{', '.join(k.name for k in chosen)} ({said(sum(sizes[k.name] for k in chosen))})"
        if not chosen:
            return 0
        if not yes and everything is None and not _confirmed(f"remove {words}?"):
            print("nothing is removed")
            return 0
        for kind in chosen:
            _remove_kind(kind, run_dir)
        print(f"removed {words}")
    return 0


def _of(run_dir: Path, *names: str) -> tuple[Path, ...]:
    return _there(*(run_dir / n for n in names))


def _there(*paths: Path) -> tuple[Path, ...]:
    return tuple(p for p in paths if p.exists())


def _remove_kind(kind: Kind, run_dir: Path) -> None:
    if kind.name == "states":
        newest = full_states(run_dir)[-1:]
        for state in newest:
            # Under the run's lock no job writes a state: the newest full one is the last.
            prune_states(run_dir / "state", int(state.name) + 1, 1)
        return
    for path in kind.paths:
        _remove(path)


def _remove(path: Path) -> None:
    """Remove a file or folder; a link to a folder elsewhere with what it leads to."""
    if path.is_symlink() and path.is_dir():
        target = path.resolve()
        path.unlink()
        path = target
    gone = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.old")
    try:
        os.rename(path, gone)
    except OSError:
        gone = path  # a mount point cannot be renamed
    if gone.is_dir():
        shutil.rmtree(gone)
    else:
        gone.unlink()


def _confirmed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise VerbError("nobody can be asked here: add --yes to remove it")
    return _answer(f"{question} [y/N] ").lower() in ("y", "yes")


def _confirm_name(name: str, given: str) -> None:
    if not given:
        if not sys.stdin.isatty():
            raise VerbError(f"nobody can be asked here: --everything={name} removes results/{name}")
        given = _answer(f"all of results/{name} goes; type the run's name: ")
    if given != name:
        raise VerbError(f"{given!r} is not {name!r}; nothing is removed")


def _answer(question: str) -> str:
    try:
        return input(question).strip()
    except EOFError:
        return ""


@contextlib.contextmanager
def _alone(run_dir: Path, command: str) -> Iterator[None]:
    """Hold the run's lock, as a command that runs jobs would, until the end."""
    if run_lock.held(run_dir):
        who = run_lock.read(run_dir) or "a process that has not said its name yet"
        raise run_lock.RunBusy(f"run {run_dir.name} is at work: {who}; nothing is removed while it lives")
    _check_shards(run_dir)
    file = run_lock.lock_file(run_dir)
    file.parent.mkdir(exist_ok=True)
    with open(file, "a+") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise run_lock.RunBusy(f"run {run_dir.name} has just begun to work; nothing is removed") from None
        f.truncate(0)
        f.write(json.dumps(asdict(run_lock.Holder.current(command))))
        f.flush()
        try:
            yield
        finally:
            f.truncate(0)


def _check_shards(run_dir: Path) -> None:
    """A shard's job can outlive the command that started it, for a moment."""
    for lock in sorted((run_dir / ".locks").glob("*-*")):
        with open(lock) as f:
            try:
                fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                pid = f.read(20) or "unknown"
                raise run_lock.RunBusy(
                    f"process {pid} still works on shard {lock.name} of run {run_dir.name}; nothing is removed while "
                    "it lives"
                ) from None
