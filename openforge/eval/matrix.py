"""The harness matrix: harness x checkpoint x suite, one row an evaluation, from the eval.json files that stand.

Rows of two suites stand in one table and are never merged: a suite is a part of what a row is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from openforge.eval.evaluate import NO_POLICY, EvalError, interval

Result = Mapping[str, Any]


def read(results: Path, runs: Iterable[str]) -> list[dict[str, Any]]:
    """The evaluations of these runs below results/, each with its `run`, in the order of the table.

    Raises:
        EvalError: an eval.json that cannot be read; one sentence.
    """
    found = []
    for run in runs:
        for path in sorted((results / run).glob("eval/cell=*/iteration=*/eval.json")):
            try:
                found.append({"run": run} | json.loads(path.read_text()))
            except (OSError, ValueError) as e:
                raise EvalError(f"{path} cannot be read: {e}") from None
    return sorted(found, key=_order)


def _order(r: Result) -> tuple[Any, ...]:
    """By suite, scripted agents first, then policy, checkpoint and harness."""
    k = -1 if r["iteration"] is None else r["iteration"]
    return r["benchmark"], r["policy"] != NO_POLICY, r["policy"], k, r["harness"], r["run"], r["cell"]


HEAD = ("suite", "policy", "harness", "cell", "pass@1", "pass^3", "pass@3", "tasks", "trials", "missing")


def rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """The cells of the table as text; a figure that cannot be had (fewer than three trials a task) is a dash."""
    out = []
    for r in results:
        claw = r.get("claw")
        figures = [interval(claw[name]) if claw else "-" for name in ("pass^3", "pass@3")]
        counts = [str(r[key]) for key in ("n", "episodes", "missing")]
        cell = str(r["cell"]).partition(".")[0]
        out.append((r["benchmark"], r["policy"], r["harness"], cell, interval(r), *figures, *counts))
    return out


def text(results: Sequence[Result]) -> str:
    """The table in columns, with what its figures are."""
    if not results:
        return "no evaluation stands\n"
    lines = [HEAD, *rows(results)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines]
    note = (
        "95 % intervals, bootstrapped over tasks. pass^3: all of a task's first three trials pass; pass@3: any. "
        "A missing trial is a failed one."
    )
    return "\n".join([*table, note, ""])
