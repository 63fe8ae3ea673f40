"""A clock that was set back: files dated in the future are dated anew, in their order.

Snakemake compares dates. After such a jump it finds every new output older than its inputs, fails the job and deletes
the output, be it a checkpoint.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path


def date_anew(run_dir: Path) -> int:
    """Give the files of a run that are dated in the future a date of now, keeping their order; returns how many."""
    now = time.time_ns()
    future = sorted((m, f) for f in _files(run_dir) if (m := os.lstat(f).st_mtime_ns) > now)
    for i, (_, file) in enumerate(future):
        # A microsecond apart and all of them past when the next output is written.
        when = now - (len(future) - i) * 1000
        os.utime(file, ns=(when, when), follow_symlinks=False)
    return len(future)


def check_inputs(files: Iterable[str], results: Path) -> None:
    """Date anew the runs below `results` of which a job's input is dated in the future."""
    now = time.time_ns()
    late = {Path(f).resolve() for f in files if os.stat(f).st_mtime_ns > now}
    for run in {f.relative_to(results).parts[0] for f in late if f.is_relative_to(results)}:
        date_anew(results / run)


def _files(run_dir: Path) -> Iterable[Path]:
    for folder, folders, names in os.walk(run_dir):
        folders[:] = [d for d in folders if d not in ("partial", "tasks")]
        yield from (Path(folder, n) for n in names)
