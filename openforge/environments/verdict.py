"""What a verifier's JSON line says: {"score": 0..1, "passed": true|false, ...}.

A verifier that can judge only a part, or nothing, says what a model is to judge in the member `judge`; its own score is
then its part alone, and the stage score asks the judge (docs/judge.md):

    {"score": 1, "passed": true, "judge": {"rubric": TEXT, "evidence": TEXT, "weight": 1, "gate": 0, "threshold": 0.75}}

A line with ClawEval's dimensions (completion, robustness, safety) has its task_score as score; `reward` makes of it
what a run trains on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Claw = Literal["pass", "minus_floor", "score"]
# task_score of an agent that does nothing: 0.20 x robustness, which is 1 without a tool's error.
CLAW_FLOOR = 0.20
_CLAW = ("completion", "robustness", "safety")


class VerdictError(ValueError):
    """A verifier's line that is no verdict; the message says what is wrong with it."""


@dataclass(frozen=True)
class Rubric:
    """What a verifier leaves to the judge.

    Attributes:
        text: the rubric; None for the task's own (`judge_rubric` of its payload).
        evidence: what the verifier found in the work folder, for the judge to see.
        weight: share of the judge's score in the whole one; the rest is the verifier's.
        gate: verifier's score below which the judge is not asked and counts as 0.
        threshold: whole score from which on the task is passed.
        grader: the task's own grader asks the judge and gives the whole score (openforge/score/published.py); all
            else in the line says nothing.
    """

    text: str | None = None
    evidence: str = ""
    weight: float = 1.0
    gate: float = 0.0
    threshold: float = 0.75
    grader: bool = False

    def asked(self, score: float) -> bool:
        """Whether the judge has a say after this score of the verifier's."""
        return self.weight > 0 and score >= self.gate

    def whole(self, score: float, judged: float) -> float:
        """The whole score: (1 - weight) x the verifier's + weight x the judge's."""
        return (1 - self.weight) * score + self.weight * judged


class Verdict(NamedTuple):
    """score in [0, 1], passed, every further member of the line as components, and what is left to the judge."""

    score: float
    passed: bool
    components: dict[str, Any]
    judge: Rubric | None = None


def reward(v: Verdict, claw: Claw) -> float:
    """The reward of a verdict without a judge's part: its score, but for ClawEval's dimensions what `claw` says.

    pass: 1 if passed, else 0. minus_floor: what is above the score of doing nothing, max(0, (s - 0.2) / 0.8). score: s.
    """
    if not of_claw(v.components) or claw == "score":
        return v.score
    return float(v.passed) if claw == "pass" else max(0.0, (v.score - CLAW_FLOOR) / (1 - CLAW_FLOOR))


def of_claw(components: Mapping[str, Any]) -> bool:
    """Whether a verdict has ClawEval's dimensions."""
    return all(isinstance(components.get(k), (int, float)) for k in _CLAW)


def parse(line: str) -> Verdict:
    """Read a verdict.

    Raises:
        VerdictError: not JSON, not an object, or score, passed or judge missing, mistyped or out of range.
    """
    try:
        data = json.loads(line)
    except ValueError as e:
        raise VerdictError(f"the verifier's line is not JSON ({e}): {line[:200]!r}") from None
    if not isinstance(data, dict):
        raise VerdictError(f"the verifier's line is not a JSON object: {line[:200]!r}")
    score, passed = data.pop("score", None), data.pop("passed", None)
    if not _share(score):
        raise VerdictError(f"the verifier's score is {score!r}; it must be a number from 0 to 1")
    if not isinstance(passed, bool):
        raise VerdictError(f"the verifier's passed is {passed!r}; it must be true or false")
    judge = _rubric(data.pop("judge")) if "judge" in data else None
    return Verdict(float(score), passed, data, judge)


def _share(value: Any) -> bool:
    # NaN fails the comparison.
    return not isinstance(value, bool) and isinstance(value, (int, float)) and 0 <= value <= 1


def _rubric(data: Any) -> Rubric:
    if not isinstance(data, dict):
        raise VerdictError(f"the verifier's judge is {data!r}; it must be an object with rubric, evidence, weight, ...")
    texts, shares = ("rubric", "evidence"), ("weight", "gate", "threshold")
    unknown = set(data) - {*texts, *shares, "grader"}
    if unknown:
        raise VerdictError(
            f"the verifier's judge has {sorted(unknown)}; its members are {', '.join((*texts, *shares, 'grader'))}"
        )
    for key in data:
        if key in texts and not isinstance(data[key], str):
            raise VerdictError(f"the verifier's judge.{key} is {data[key]!r}; it must be text")
        if key in shares and not _share(data[key]):
            raise VerdictError(f"the verifier's judge.{key} is {data[key]!r}; it must be a number from 0 to 1")
    grader = data.get("grader", False)
    if not isinstance(grader, bool):
        raise VerdictError(f"the verifier's judge.grader is {grader!r}; it must be true or false")
    given = {k: float(data[k]) for k in shares if k in data}
    return Rubric(text=data.get("rubric"), evidence=data.get("evidence", ""), grader=grader, **given)
