"""score: rewards from the verifier's evidence and the judge's, and the quorum that an iteration must reach."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from openforge.rollout.status import ENDS
from openforge.score.scorer import SCORER_VERSION, ScoreError, Scorer, merged

__all__ = ["SCORER_VERSION", "QuorumError", "ScoreError", "Scorer", "check_quorum", "merged"]


class QuorumError(RuntimeError):
    """Too few rollouts ended with a reward; the message counts why."""


def check_quorum(episodes: Sequence[Mapping[str, Any]], scores: Sequence[Mapping[str, Any]], quorum: float) -> str:
    """One line on how the rollouts ended.

    Raises:
        QuorumError: the share of final episodes with a reward is below `quorum`.
    """
    final = [e for e in episodes if e["final"]]
    rewarded = sum(s["reward"] is not None for s in scores)
    ends = Counter(e["status"] for e in final)
    # A judge that failed is no end of an episode.
    ends.update(s["status"] for s in scores if s["status"] == "judge_failed")
    told = ", ".join(f"{n} {s}" for s, n in ends.most_common())
    line = f"{rewarded} of {len(final)} rollouts have a reward ({told})"
    if not final or rewarded < quorum * len(final):
        raise QuorumError(f"{line}; the quorum is {quorum:.0%}. First message: {_first(final, scores) or 'none'}")
    return line


def _first(final: Sequence[Mapping[str, Any]], scores: Sequence[Mapping[str, Any]]) -> str | None:
    """The first sentence on an episode without a reward: its own, or its judgement's."""
    own = (e["message"] for e in final if e["message"] and not ENDS[e["status"]].verified)
    return next(own, None) or next((m for s in scores if (m := Scorer.message(s)) is not None), None)
