"""What a verifier's JSON line says: {"score": 0..1, "passed": true|false, ...}."""

from __future__ import annotations

import json
from typing import Any, NamedTuple


class VerdictError(ValueError):
    """A verifier's line that is no verdict; the message says what is wrong with it."""


class Verdict(NamedTuple):
    """score in [0, 1], passed, and every further member of the line as components."""

    score: float
    passed: bool
    components: dict[str, Any]


def parse(line: str) -> Verdict:
    """Read a verdict.

    Raises:
        VerdictError: not JSON, not an object, or score or passed missing, mistyped or out of range.
    """
    try:
        data = json.loads(line)
    except ValueError as e:
        raise VerdictError(f"the verifier's line is not JSON ({e}): {line[:200]!r}") from None
    if not isinstance(data, dict):
        raise VerdictError(f"the verifier's line is not a JSON object: {line[:200]!r}")
    score, passed = data.pop("score", None), data.pop("passed", None)
    if isinstance(score, bool) or not isinstance(score, (int, float)) or not 0 <= score <= 1:
        raise VerdictError(f"the verifier's score is {score!r}; it must be a number from 0 to 1")
    if not isinstance(passed, bool):
        raise VerdictError(f"the verifier's passed is {passed!r}; it must be true or false")
    return Verdict(float(score), passed, data)
