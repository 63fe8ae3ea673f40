"""Which groups of a shard run: the planned ones, and a reserve group in the place of each that has no variance."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from openforge.environments import verdict
from openforge.rollout.status import ENDS
from openforge.samples.credit import degenerate, outcome

Row = Mapping[str, Any]
Metric = Literal["reward", "acc"]


def metric_of(episode: Row, metric: Metric, claw: verdict.Claw = "pass") -> float | None:
    """What an ended episode adds to its group's variance: its outcome, or whether it passed; None without a verdict, or
    with one that a judge has still to complete."""
    if episode["verifier_output"] is None or not ENDS[episode["status"]].verified:
        return None
    v = verdict.parse(episode["verifier_output"])
    if v.judge is not None and v.judge.asked(v.score):
        return None
    return float(v.passed) if metric == "acc" else outcome(verdict.reward(v, claw), v.components)


class Groups:
    """Dynamic sampling (DAPO, arXiv 2503.14476) over a shard's table.

    As many groups with variance are wanted as are planned. While fewer than that have it or may yet have it, the next
    reserve group is due. Reserve groups come in table order, and how many come in the end depends on which groups have
    no variance, not on when they ended: a rerun, which knows them from the partial record, starts the same ones.
    """

    def __init__(self, rows: Sequence[Row], begun: Collection[str]) -> None:
        """
        Args:
            rows: the shard's rollouts, in table order.
            begun: rollouts that have been started; a reserve group with one of them is run to its end.
        """
        self._rows: dict[str, list[Row]] = defaultdict(list)
        for r in rows:
            self._rows[r["group_id"]].append(r)
        self._quota = sum(not members[0]["reserve"] for members in self._rows.values())
        self._started = [g for g, members in self._rows.items() if _runs(members, begun)]
        self._reserve = deque(g for g in self._rows if g not in self._started)
        self._found: dict[str, list[float | None]] = defaultdict(list)
        self._flat = 0

    @property
    def due(self) -> list[Row]:
        """Rollouts of the groups that have been started, in table order."""
        return [r for g in self._started for r in self._rows[g]]

    def ended(self, row: Row, value: float | None) -> list[Row]:
        """Take note of a rollout's end; the rollouts of the reserve groups that are due now."""
        group, found = row["group_id"], self._found[row["group_id"]]
        found.append(value)
        known = [v for v in found if v is not None]
        if len(found) == len(self._rows[group]) and len(known) >= 2 and degenerate(known):
            self._flat += 1
        before = len(self._started)
        while self._reserve and len(self._started) - self._flat < self._quota:
            self._started.append(self._reserve.popleft())
        return [r for g in self._started[before:] for r in self._rows[g]]


def _runs(members: Sequence[Row], begun: Collection[str]) -> bool:
    return not members[0]["reserve"] or any(r["rollout_id"] in begun for r in members)


def running(rows: Sequence[Row], begun: Collection[str]) -> list[Row]:
    """A shard's rollouts without the reserve groups that never started."""
    return Groups(rows, begun).due
