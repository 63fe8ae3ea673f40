"""`openforge watch RUN`: what a run does, read from its files alone; safe beside a live run and a killed one."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from openforge import run_lock
from openforge.config import EvalConfig, RunConfig
from openforge.tables import EPISODES, ROLLOUTS, SCORES, TableError, check_file
from openforge.verbs.figures import job_name
from openforge.verbs.jobs import Job, Jobs

EVERY = 2.0  # seconds
LOG_LINES, LOG_BYTES, WIDTH = 4, 4096, 160


@dataclass
class Episodes:
    """Episodes of one iteration or evaluation: planned, ended by status, and at work."""

    planned: int = 0
    running: int = 0
    retried: int = 0
    statuses: Counter[str] = field(default_factory=Counter)

    @property
    def done(self) -> int:
        return self.statuses.total()

    def __str__(self) -> str:
        ends = ", ".join(f"{n} {s}" for s, n in self.statuses.most_common()) or "none ended"
        more = f", {self.running} running" if self.running else ""
        more += f", {self.retried} attempts before the last" if self.retried else ""
        return f"{self.done}/{self.planned} episodes ({ends}{more})"


@dataclass
class Snapshot:
    """A run at one moment.

    Attributes:
        holder: who works on it; empty if nobody does.
        jobs: running (or, with nobody at work, interrupted) jobs by name, and seconds since each began.
        current: episodes of tables whose shards are not all finished, by "purpose cell iteration".
        rewards: mean reward of finished training iterations.
        finished: every file that the run asks for stands.
    """

    run: str
    holder: str
    finished: bool
    iterations: tuple[int, int] | None
    jobs: dict[str, float]
    current: dict[str, Episodes]
    rewards: dict[int, float | None]
    evaluations: tuple[int, int]
    log: tuple[str, list[str]] | None
    unreadable: list[str]

    def lines(self) -> Iterator[str]:
        """The snapshot as text."""
        yield f"{self.run}: {self.summary()}"
        yield self.holder or "no process works on it"
        if self.jobs:
            word = "running" if self.holder else "interrupted"
            yield f"{word}: " + ", ".join(f"{n} ({_clock(s)})" if self.holder else n for n, s in self.jobs.items())
        for name, episodes in self.current.items():
            yield f"{name}: {episodes}"
        if self.rewards:
            means = (f"{k}: {'-' if r is None else f'{r:.3f}'}" for k, r in self.rewards.items())
            yield "mean reward by iteration  " + "  ".join(means)
        yield from (f"unreadable: {u}" for u in self.unreadable)
        if self.log is not None:
            yield f"last lines of {self.log[0]}"
            yield from (f"  {line}" for line in self.log[1])

    def summary(self) -> str:
        """One line on how far it is."""
        done, of = self.evaluations
        parts = [f"{done} of {of} evaluations"] if of else []
        if self.iterations is not None:
            parts.insert(0, f"{self.iterations[0]} of {self.iterations[1]} iterations")
        return ", ".join([*parts, "finished" if self.finished else "unfinished"])


def run(name: str, config: RunConfig | EvalConfig, root: Path, once: bool) -> int:
    """Print snapshots until the run is finished or Ctrl-C; exit code 0."""
    terminal = sys.stdout.isatty()
    last: list[str] = []
    try:
        while True:
            shot = snapshot(name, config, root)
            lines = list(shot.lines())
            if once or not terminal:
                if lines != last:
                    print("\n".join(lines), flush=True)
            else:
                # Home, the lines each cleared to their end, and the rest of the screen: no flicker.
                print("\x1b[H" + "".join(f"{line[:WIDTH]}\x1b[K\n" for line in lines) + "\x1b[J", end="", flush=True)
            if once:
                return 0
            if shot.finished and not shot.holder:
                print(f"run {name} is finished: {shot.summary()}")
                return 0
            last = lines
            time.sleep(EVERY)
    except KeyboardInterrupt:
        print()
        return 0


def snapshot(name: str, config: RunConfig | EvalConfig, root: Path) -> Snapshot:
    """Read a run's files; what cannot be read is named in it."""
    jobs = Jobs(name, config, root)
    unreadable: list[str] = []
    trained = sum(j.done for j in jobs.all if j.rule == "train")
    evaluations = [j.done for j in jobs.all if j.rule == "eval"]
    logs = root / "logs" / name
    return Snapshot(
        run=name,
        holder=_holder(jobs.run_dir),
        finished=not jobs.left(),
        iterations=(trained, config.iterations) if isinstance(config, RunConfig) else None,
        jobs=_begun(jobs, logs),
        current=_current(jobs, unreadable),
        rewards=_rewards(jobs, unreadable),
        evaluations=(sum(evaluations), len(evaluations)),
        log=_last_lines(logs),
        unreadable=unreadable,
    )


def _holder(run_dir: Path) -> str:
    """Who works on the run. The lock is read and not tried: trying would keep a command that starts now out."""
    holder = run_lock.read(run_dir)
    if holder is None or not holder.owner.alive():
        return ""
    return str(holder)


def _begun(jobs: Jobs, logs: Path) -> dict[str, float]:
    """Jobs whose log is younger than their timing: they have begun and not ended."""
    found = {}
    for job in jobs.all:
        log, timing = logs / f"{job_name(job)}.log", jobs.run_dir / "timings" / f"{job_name(job)}.json"
        written, ended = _mtime(log), _mtime(timing)
        if written is not None and not job.done and (ended is None or ended < written):
            found[job_name(job)] = max(0.0, time.time() - _born(log, written))
    return found


def _mtime(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _born(log: Path, otherwise: float) -> float:
    """When a log was begun, by the clock of its first line; the file system does not tell."""
    try:
        with open(log, errors="replace") as f:
            stamp = f.readline()[:8]
        clock = time.strptime(stamp, "%H:%M:%S")
    except (OSError, ValueError):
        return otherwise
    today = time.localtime(otherwise)
    began = time.mktime((*today[:3], *clock[3:6], 0, 0, -1))
    return began if began <= otherwise + 1 else began - 86400


def _current(jobs: Jobs, unreadable: list[str]) -> dict[str, Episodes]:
    """Episodes of the tables that are planned and have an unfinished shard."""
    found: dict[str, Episodes] = {}
    groups: dict[tuple[str, str, int | None], list[Job]] = {}
    for job in jobs.all:
        if job.rule == "rollout":
            groups.setdefault((job.purpose, job.cell, job.iteration), []).append(job)
    for (purpose, cell, k), shards in groups.items():
        folder = shards[0].output.parent.parent.relative_to(jobs.run_dir / "episodes")
        table = jobs.run_dir / "rollouts" / folder / "rollouts.parquet"
        part = f"{purpose}-{cell}-{'none' if k is None else f'{k:04d}'}"
        partial = jobs.run_dir / "partial" / part
        begun = partial.is_dir() or any(s.done for s in shards)
        if all(s.done for s in shards) or not begun or not table.exists():
            continue
        reserve = [r["reserve"] for r in _column(table, ROLLOUTS, ["reserve"], unreadable)]
        episodes = Episodes(planned=reserve.count(False))
        for shard in shards:
            if shard.done:
                _count_finished(shard.output, episodes, unreadable)
            else:
                for records in sorted(partial.glob(f"{shard.shard:04d}/*/episodes.jsonl")):
                    _count_partial(records, episodes)
        # Of the reserve, what has begun so far.
        episodes.planned = max(episodes.planned, episodes.done + episodes.running)
        found[f"{purpose} {cell} {'none' if k is None else k}"] = episodes
    return found


def _count_finished(path: Path, episodes: Episodes, unreadable: list[str]) -> None:
    for row in _column(path, EPISODES, ["final", "status"], unreadable):
        episodes.retried += not row["final"]
        if row["final"]:
            episodes.statuses[row["status"]] += 1


def _count_partial(records: Path, episodes: Episodes) -> None:
    """Count the records of an unfinished shard: its last ended attempt a rollout, and attempts that have not ended."""
    last: dict[str, str] = {}
    running: set[str] = set()
    try:
        data = records.read_bytes()
    except OSError:
        return  # the shard has just finished
    # A line without its end is still being written.
    for line in data[: data.rfind(b"\n") + 1].splitlines():
        try:
            record = json.loads(line)
            event, rollout = record["event"], record.get("rollout_id", "")
            if event == "start":
                episodes.retried += rollout in last or rollout in running
                running.add(rollout)
                last.pop(rollout, None)
            elif event == "end":
                last[rollout] = record["row"]["status"]
                running.discard(rollout)
        except (ValueError, KeyError, TypeError):
            continue
    episodes.statuses.update(last.values())
    episodes.running += len(running)


# Files of finished iterations never change: means by path, size and time of the files they are of.
_means: dict[tuple[Any, ...], float | None] = {}


def _rewards(jobs: Jobs, unreadable: list[str]) -> dict[int, float | None]:
    """Mean reward of the final training episodes of every scored iteration, each by its latest score."""
    found = {}
    for job in jobs.all:
        if job.rule == "score" and job.purpose == "train" and job.done and job.iteration is not None:
            shards = [
                j.output for j in jobs.all if (j.rule, j.purpose, j.iteration) == ("rollout", "train", job.iteration)
            ]
            key = tuple((str(p), _mtime(p)) for p in (job.output, *shards))
            if key not in _means:
                before = len(unreadable)
                mean = _mean(job.output, shards, unreadable)
                if len(unreadable) > before:
                    continue
                _means[key] = mean
            found[job.iteration] = _means[key]
    return found


def _mean(scores: Path, shards: list[Path], unreadable: list[str]) -> float | None:
    final = {
        row["episode_id"]
        for path in shards
        if path.exists()
        for row in _column(path, EPISODES, ["episode_id", "final"], unreadable)
        if row["final"]
    }
    columns = ["episode_id", "scored_at", "scorer_version", "reward"]
    latest: dict[str, dict[str, Any]] = {}
    for row in sorted(
        _column(scores, SCORES, columns, unreadable), key=lambda r: (r["scored_at"], r["scorer_version"])
    ):
        latest[row["episode_id"]] = row
    rewards = [r["reward"] for e, r in latest.items() if e in final and r["reward"] is not None]
    return sum(rewards) / len(rewards) if rewards else None


def _column(path: Path, table: Any, columns: list[str], unreadable: list[str]) -> list[dict[str, Any]]:
    try:
        check_file(path, table)
        rows: list[dict[str, Any]] = pq.read_table(path, columns=columns, partitioning=None).to_pylist()
        return rows
    except (TableError, OSError, ValueError) as e:
        unreadable.append(" ".join(str(e).split()))
        return []


def _last_lines(logs: Path) -> tuple[str, list[str]] | None:
    """The name and the last lines of the youngest log that says anything."""
    dated = [(m, p) for p in logs.glob("*.log") if (m := _mtime(p)) is not None and p.stat().st_size]
    if not dated:
        return None
    path = max(dated)[1]
    with open(path, "rb") as f:
        f.seek(max(0, path.stat().st_size - LOG_BYTES))
        lines = f.read().decode(errors="replace").splitlines()
    # What another program printed may move the cursor.
    clean = ["".join(c for c in line if c.isprintable()) for line in lines if line.strip()]
    return f"logs/{logs.name}/{path.name}", clean[-LOG_LINES:]


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
