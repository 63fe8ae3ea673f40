"""`openforge score RUN`: score finished episodes once more, with the judge that the configuration names now."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from openforge import run_lock
from openforge.config import EvalConfig, RunConfig
from openforge.environments.verdict import VerdictError
from openforge.eval import evaluate_run, headline
from openforge.score import ScoreError
from openforge.score.again import Again, Part, again, parts, scorer
from openforge.verbs import VerbError


def run(
    name: str, config: RunConfig | EvalConfig, root: Path, purpose: str | None, cell: str | None, iteration: str | None
) -> int:
    """Score the parts that are asked for, all without a word; exit code 1 where a judgement failed.

    A finished iteration's training stays as it is: its samples were made of the scores of then.
    """
    run_dir = root / "results" / name
    there = parts(run_dir)
    asked = [p for p in there if _asked(p, purpose, cell, iteration)]
    if not asked:
        known = "; ".join(map(str, there)) or "none"
        raise VerbError(f"run {name!r} has no such scores; what has been scored: {known}")
    run_lock.take(run_dir, shlex.join(sys.argv))
    return _score(run_dir, asked, config, root)


def _asked(part: Part, purpose: str | None, cell: str | None, iteration: str | None) -> bool:
    k = "none" if part.iteration is None else str(part.iteration)
    return purpose in (None, part.purpose) and cell in (None, part.cell) and iteration in (None, k)


def _score(run_dir: Path, asked: Sequence[Part], config: RunConfig | EvalConfig, root: Path) -> int:
    failed = 0
    for part in asked:
        # A judge a part: its budget is a scoring job's.
        with scorer(config, root) as by:
            try:
                done = again(run_dir, part, by)
            except (ScoreError, VerdictError) as e:
                raise VerbError(f"{part}: {e}") from None
        print(f"{part}: {_told(done)}")
        failed += done.statuses.get("judge_failed", 0)
        if part.purpose == "eval":
            print(f"  {headline(evaluate_run(run_dir, part.cell, part.iteration))}")
    return 1 if failed else 0


def _told(done: Again) -> str:
    counts = ", ".join(f"{n} {status}" for status, n in sorted(done.statuses.items()))
    return f"{counts}; {done.changed} rewards changed"
