"""Graders that ask a judge themselves, run once more where there is one, on the evidence in an episode's row.

In the episode such a grader is not run: its verifier's line is {"judge": {"grader": true}}, with a score that means
nothing. Here it is, and whatever befalls the judge leaves the reward NULL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openforge import software
from openforge.environments.claw_eval import setup
from openforge.environments.claw_eval.evidence import Evidence
from openforge.environments.claw_eval.grading import Endpoint, Graded, grade
from openforge.environments.claw_eval.traces import conversation


def regrade(
    episode: Mapping[str, Any],
    rollout: Mapping[str, Any],
    calls: Sequence[Mapping[str, Any]],
    judge: Endpoint,
    root: Path,
    python: Path | None = None,
) -> Graded:
    """Run the task's grader on what its episode left.

    Args:
        episode: a row of the episodes table that is verified.
        rollout: its row of the rollouts table.
        calls: its rows of the calls table.
        root: of the project, for the grader's software environment.
        python: instead of that environment's.

    Raises:
        SoftwareMissing: the environment is not built.
    """
    name = setup.of(rollout).software
    if python is None:
        python = software.python_of(name, root) if name is not None else Path("python3")
    chat = conversation(sorted(calls, key=lambda c: int(c["call"])), {})
    return grade(rollout, Evidence.of(episode, rollout["policy"], chat), python, judge=judge)
