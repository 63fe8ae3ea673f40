"""What every rule's script does around its stage: configuration, log, timing, and one sentence on an error."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from openforge import clock, interrupts
from openforge import config as typed
from openforge.tables import write_beside


@dataclass(frozen=True)
class Job:
    """One job of a run.

    Attributes:
        run_dir: results/<run>, absolute.
        part: purpose, cell, iteration and shard of the job's wildcards, where it has them.
        attempt: the executor's count of this job, from 1; not an episode's.
        retries: how often the executor may start it again (`retries` of a profile).
    """

    stage: str
    run: str
    root: Path
    run_dir: Path
    config: typed.RunConfig | typed.EvalConfig
    part: dict[str, str]
    log: TextIO
    attempt: int = 1
    retries: int = 0

    @property
    def last_attempt(self) -> bool:
        """Whether the executor will not start this job again."""
        return self.attempt > self.retries

    @property
    def iteration(self) -> int | None:
        return None if self.part.get("k", "none") == "none" else int(self.part["k"])

    @property
    def train_config(self) -> typed.RunConfig:
        if not isinstance(self.config, typed.RunConfig):
            raise typed.ConfigError(f"config/{self.run}.yaml is an evaluation's and cannot train")
        return self.config

    def cell(self) -> typed.Cell:
        """The configured cell of an evaluation job."""
        name = self.part["cell"].split(".")[0]
        return next(c for c in self.config.cells if c.name == name)

    def say(self, line: str) -> None:
        """A line of progress, to the terminal and the log."""
        stamp = f"{datetime.now():%H:%M:%S} {self.stage}"
        where = " ".join(v for k, v in self.part.items() if k != "purpose")
        text = f"{stamp} {self.run} {where}: {line}\n"
        for stream in (sys.stderr, self.log):
            stream.write(text)
            stream.flush()


class DiskFull(RuntimeError):
    """A job's file could not be written for want of room."""

    def __init__(self, error: OSError, folder: Path) -> None:
        where = error.filename2 or error.filename or folder
        super().__init__(
            f"the file system of {os.fsdecode(where)} is full ({error.strerror}); nothing half written is kept: free "
            "space and type the same command"
        )


@contextmanager
def job(stage: str, snakemake: Any) -> Iterator[Job]:
    """Run a stage's script; its seconds go to results/<run>/timings/, an error becomes a sentence and exit code 1."""
    wildcards = {k: str(v) for k, v in snakemake.wildcards.items()}
    # Rules of one purpose spell it out in their paths instead of carrying it as a wildcard.
    run = wildcards.pop("run", "")
    root = Path(os.environ.get("OPENFORGE_ROOT", ".")).resolve()
    # A user's environment is named by its import path from the project's root.
    sys.path.append(str(root))
    interrupts.end_with_owner()
    log_path = Path(snakemake.log[0])
    log_path.parent.mkdir(parents=True, exist_ok=True)
    started, begun = datetime.now(UTC), time.monotonic()
    one: Job | None = None
    with open(log_path, "w") as log:
        try:
            config = typed.load(run, root, snakemake.config).config
            attempt = int(snakemake.resources.get("attempt", 1))
            retries = int(os.environ.get("OPENFORGE_RETRIES", "0"))
            one = Job(stage, run, root, root / "results" / run, config, wildcards, log, attempt, retries)
            yield one
            clock.check_inputs(snakemake.input, one.run_dir.parent)
        except (KeyboardInterrupt, asyncio.CancelledError):
            for stream in (sys.stderr, log):
                print(f"interrupted: {stage} of {run}; what it had finished is kept", file=stream)
            sys.exit(130)
        except Exception as error:
            e = error
            while isinstance(e, ExceptionGroup):
                e = e.exceptions[0]
            if isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT):
                e = DiskFull(e, one.run_dir if one is not None else root)
            if not type(e).__module__.startswith("openforge."):
                traceback.print_exc(file=log)
            told = _sentence(stage, run, e)
            for stream in (sys.stderr, log):
                print(f"error: {told}", file=stream)
            remember(told)
            sys.exit(1)
        name = "-".join([stage, *wildcards.values()])
        took = {"stage": stage, "seconds": round(time.monotonic() - begun, 3), "started": started.isoformat()}
        write_beside(one.run_dir / "timings" / f"{name}.json", json.dumps(took | wildcards) + "\n")


def _sentence(stage: str, run: str, e: Exception) -> str:
    kind = "" if type(e).__module__.startswith("openforge.") else f"{type(e).__name__}: "
    return f"{stage} of {run}: {kind}{e}"


def remember(sentence: str) -> None:
    """Leave why a job failed to the Snakemake that started it, which says so last: see `said`."""
    if (path := os.environ.get("OPENFORGE_SAID")) is not None:
        # It stands in the log and on the terminal already; a full disk is what it may tell of.
        with suppress(OSError), open(path, "a") as f:
            f.write(json.dumps(sentence) + "\n")


def said(path: Path) -> list[str]:
    """Why the jobs of a command failed, in the order they did, each once; the file is removed.

    Snakemake prints a page of its own after a job's sentence, which would leave the reason far up the terminal.
    """
    try:
        lines = path.read_text().splitlines()
        path.unlink()
    except FileNotFoundError:
        return []
    return list(dict.fromkeys(json.loads(line) for line in lines))
