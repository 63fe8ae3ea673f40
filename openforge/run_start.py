"""What happens before the first job of a command: its runs are locked, and what a killed command left is put away.

A killed Snakemake leaves its own locks, marks of incomplete files, orphaned jobs, sandboxes and half-written files. All
of them are put away here, under the run's lock, so that the same command simply goes on.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Collection, Iterable
from pathlib import Path

from snakemake.cli import get_argument_parser

from openforge import clock, run_lock
from openforge.policy import process
from openforge.sandboxes import reap

# Seconds that an orphaned job has to put its work away before it is killed.
GRACE = 20.0
# What write_beside, write_table and folder_beside leave when they are killed.
_BESIDE = re.compile(r"\..+\.[0-9a-f]{8}\.(tmp|old|job\.json)")
_RUN = re.compile(r"(?:^|/)results/([a-z0-9_]+)/")
_clone: list[int] = []  # the descriptor that tells other commands of this clone that we live


# Commands that look, draw or repair: they run no job, and work beside a live run.
_LOOKS = (
    *("dryrun", "touch", "unlock", "lint", "list_rules", "list_target_rules", "print_compilation", "containerize"),
    *("report", "generate_unit_tests", "dag", "rulegraph", "filegraph", "d3dag", "cleanup_metadata", "cleanup_shadow"),
    *("list_conda_envs", "conda_cleanup_envs", "list_changes", "list_input_changes", "list_params_changes"),
    *("list_untracked", "summary", "detailed_summary", "archive", "delete_all_output", "delete_temp_output"),
)


def targets(argv: list[str]) -> list[str] | None:
    """The targets of a Snakemake command line that runs jobs; None for one that does not, or is none of Snakemake's."""
    try:
        args = get_argument_parser().parse_args(argv[1:])
    except (SystemExit, Exception):
        return None
    if any(getattr(args, name, None) for name in _LOOKS):
        return None
    return sorted(args.targets or ())


def begin(root: Path, runs: Collection[str], command: str) -> None:
    """Lock the runs that a command works on and put away what a killed one left of them.

    Other runs' processes, locks and files are left alone.

    Args:
        root: the project.
        runs: names below results/.
        command: the command line, for whoever finds the runs locked.

    Raises:
        RunBusy: a live process works on one of them.
    """
    alone = _only_command(root)
    for run in sorted(runs):
        run_lock.take(root / "results" / run, command)
    ended = end_orphans(root, runs, alone)
    if ended:
        print(f"ended {ended} processes that outlived a killed command", file=sys.stderr)
    clear_locks(root, runs, alone)
    clear_incomplete(root, runs)
    for run in runs:
        put_away(root / "results" / run)
        clock.date_anew(root / "results" / run)


def _only_command(root: Path) -> bool:
    """Whether no other command of this clone lives; from now on, others see that we do."""
    (root / ".snakemake").mkdir(exist_ok=True)
    fd = os.open(root / ".snakemake" / "openforge.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        alone = True
    except BlockingIOError:
        alone = False
    fcntl.flock(fd, fcntl.LOCK_SH)
    _clone.append(fd)
    return alone


def orphans(root: Path, runs: Collection[str], alone: bool) -> list[process.Identity]:
    """Live processes of these runs whose Snakemake is dead; with `alone` also those that belong to no run."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdecimal() or int(entry) == os.getpid():
            continue
        with contextlib.suppress(OSError, ValueError):
            env = _environ(int(entry))
            theirs = env.get("OPENFORGE_RUNS")
            if theirs is None or env.get("OPENFORGE_ROOT") != str(root) or "OPENFORGE_OWNER" not in env:
                continue
            mine = bool(set(theirs.split()) & set(runs)) or (alone and not theirs)
            who = process.identity(int(entry))
            if mine and who is not None and not process.alive(process.parse(env["OPENFORGE_OWNER"])):
                found.append(who)
    return found


def _environ(pid: int) -> dict[str, str]:
    words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(os.fsdecode(w).split("=", 1) for w in words if b"=" in w)


def end_orphans(root: Path, runs: Collection[str], alone: bool) -> int:
    """End them, first politely; returns how many there were."""
    seen: set[process.Identity] = set()
    deadline = time.monotonic() + GRACE
    while left := orphans(root, runs, alone):
        late = time.monotonic() > deadline
        for who in left:
            if late or who not in seen:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(who.pid, signal.SIGKILL if late else signal.SIGTERM)
        seen |= set(left)
        time.sleep(0.05)
    return len(seen)


def clear_locks(root: Path, runs: Collection[str], alone: bool) -> None:
    """Remove Snakemake's locks of commands that are dead.

    A lock lists files and no owner. One that names only our runs, which we hold, or runs that nobody holds is of a dead
    command; one that names no run (software environments) is so if no other command lives.
    """
    for lock in (root / ".snakemake" / "locks").glob("*.lock"):
        named = {m[1] for line in lock.read_text().splitlines() if (m := _RUN.search(line))}
        others = named - set(runs)
        if alone or (named and not any(run_lock.held(root / "results" / r) for r in others)):
            lock.unlink(missing_ok=True)


def clear_incomplete(root: Path, runs: Collection[str]) -> None:
    """Remove Snakemake's marks of incomplete outputs from the files of these runs that stand.

    Every output is renamed into its place whole. A file that stands is complete, even where Snakemake was killed before
    it took notice, and running its job again would throw its episodes away.
    """
    marks = root / ".snakemake" / "incomplete"
    for mark in [p for p in marks.rglob("*") if p.is_file()]:
        # A long name is cut into folders that begin with @.
        name = "".join(part.removeprefix("@") for part in mark.relative_to(marks).parts)
        try:
            output = Path(base64.urlsafe_b64decode(name).decode())
        except ValueError:
            continue
        m = _RUN.search(str(output))
        if m and m[1] in runs and (root / output).exists():
            mark.unlink(missing_ok=True)


def put_away(run_dir: Path) -> None:
    """Remove what a killed job left of a run: sandboxes, half-written files, progress of shards that are finished."""
    for folder in run_dir.glob("partial/*/*/*/sandboxes"):
        reap(folder, run_dir.name)
    for path in _half_written(run_dir):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _half_written(run_dir: Path) -> Iterable[Path]:
    found = []
    for folder, folders, files in os.walk(run_dir):
        # Sandboxes are the reaper's, and tasks hold a user's own files.
        folders[:] = [d for d in folders if d not in ("sandboxes", "tasks")]
        found += [Path(folder, n) for n in folders + files if _BESIDE.fullmatch(n)]
        folders[:] = [d for d in folders if not _BESIDE.fullmatch(d)]
    return found
