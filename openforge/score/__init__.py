"""score: rewards from the verifier's evidence, and the quorum that an iteration must reach."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from openforge.environments import verdict
from openforge.rollout.status import ENDS

SCORER_VERSION = "verifier-1"


class QuorumError(RuntimeError):
    """Too few rollouts ended with a reward; the message counts why."""


def score(episode: Mapping[str, Any], now: datetime) -> dict[str, Any]:
    """The score row of one episode (tables.SCORES).

    An end without verification has no reward: infrastructure failures are NULL, never 0.
    """
    row: dict[str, Any] = {
        "episode_id": episode["episode_id"],
        "scorer_version": SCORER_VERSION,
        "status": "not_scorable",
        "reward": None,
        "passed": None,
        "components": "{}",
        "judge": None,
        "scored_at": now,
    }
    if episode["status"] == "unsupported":
        row["status"] = "unsupported"
    elif ENDS[episode["status"]].verified:
        if episode["verifier_output"] is None:
            raise verdict.VerdictError(
                f"episode {episode['episode_id']} is {episode['status']} but holds no verifier output"
            )
        v = verdict.parse(episode["verifier_output"])
        row |= {
            "status": "scored",
            "reward": v.score,
            "passed": v.passed,
            "components": json.dumps(v.components, sort_keys=True),
        }
    return row


def score_all(episodes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Score rows of the final episodes, in their order."""
    now = datetime.now(UTC)
    return [score(e, now) for e in episodes if e["final"]]


def check_quorum(episodes: Sequence[Mapping[str, Any]], scores: Sequence[Mapping[str, Any]], quorum: float) -> str:
    """One line on how the rollouts ended.

    Raises:
        QuorumError: the share of final episodes with a reward is below `quorum`.
    """
    final = [e for e in episodes if e["final"]]
    rewarded = sum(s["reward"] is not None for s in scores)
    ends = ", ".join(f"{n} {s}" for s, n in Counter(e["status"] for e in final).most_common())
    line = f"{rewarded} of {len(final)} rollouts have a reward ({ends})"
    if not final or rewarded < quorum * len(final):
        first = next((e["message"] for e in final if e["message"] and not ENDS[e["status"]].verified), "none")
        raise QuorumError(f"{line}; the quorum is {quorum:.0%}. First message: {first}")
    return line
