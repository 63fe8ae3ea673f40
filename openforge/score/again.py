"""The scorer of a configuration, and scoring finished episodes once more with it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from openforge import tables
from openforge.config import EvalConfig, RunConfig
from openforge.environments.claw_eval.grading import Endpoint
from openforge.environments.verdict import Claw
from openforge.judge import Judge
from openforge.score.published import regrade
from openforge.score.scorer import Scorer, merged


@contextmanager
def scorer(config: RunConfig | EvalConfig, root: Path) -> Iterator[Scorer]:
    """The scorer that a configuration names. An evaluation's reward is binary for ClawEval's verdicts."""
    claw: Claw = config.reward.claw if isinstance(config, RunConfig) else "pass"
    if config.judge is None:
        yield Scorer(claw)
        return
    key = os.environ.get(config.judge.api_key_env, "") if config.judge.api_key_env else ""
    endpoint = Endpoint(config.judge.url, config.judge.model, key.strip())
    with Judge(config.judge, root, key.strip() or None) as judge:
        yield Scorer(claw, judge, lambda episode, task, calls: regrade(episode, task, calls, endpoint, root))


@dataclass(frozen=True)
class Part:
    """One iteration, or one evaluation of a cell, that has scores."""

    purpose: str
    cell: str
    iteration: int | None

    def __str__(self) -> str:
        return f"{self.purpose} {self.cell} {'none' if self.iteration is None else f'{self.iteration:04d}'}"

    def path(self, table: str) -> str:
        return tables.partition_path(table, self.purpose, self.cell, self.iteration)


@dataclass(frozen=True)
class Again:
    """What scoring a part once more came to: rows by status, and how many rewards differ from the latest before."""

    statuses: dict[str, int]
    changed: int


def parts(run_dir: Path) -> list[Part]:
    """Every part of a run that has scores, training first."""
    found = []
    for file in sorted(run_dir.glob("scores/purpose=*/cell=*/iteration=*/scores.parquet"), reverse=True):
        purpose, cell, k = (p.partition("=")[2] for p in file.parent.relative_to(run_dir / "scores").parts)
        found.append(Part(purpose, cell, None if k == "none" else int(k)))
    return sorted(found, key=lambda p: (p.purpose != "train", p.cell, -1 if p.iteration is None else p.iteration))


def again(run_dir: Path, part: Part, by: Scorer) -> Again:
    """Score a part's episodes by `by`; its rows stand beside those of other scorers and count, being the latest.

    Raises:
        TableError: a table cannot be read.
        ScoreError, VerdictError: see `Scorer.score_all`.
    """
    folder = (run_dir / part.path("episodes")).parent
    shards = sorted(folder.glob("shard=*"))
    episodes = tables.read_rows([s / "episodes.parquet" for s in shards], tables.EPISODES)
    calls = []
    if by.judge is not None:
        files = (run_dir / part.path("calls")).parent.glob("shard=*/calls.parquet")
        calls = tables.read_rows(sorted(files), tables.CALLS)
    rollouts = tables.read_rows(run_dir / part.path("rollouts"), tables.ROLLOUTS)
    before = tables.read_rows(run_dir / part.path("scores"), tables.SCORES)
    rows = by.score_all(episodes, rollouts, calls)
    latest = {s["episode_id"]: s["reward"] for s in sorted(before, key=lambda s: (s["scored_at"], s["scorer_version"]))}
    tables.write_table(run_dir / part.path("scores"), tables.SCORES, merged(before, rows))
    statuses: dict[str, int] = {}
    for r in rows:
        statuses[r["status"]] = statuses.get(r["status"], 0) + 1
    return Again(statuses, sum(latest.get(r["episode_id"]) != r["reward"] for r in rows))
