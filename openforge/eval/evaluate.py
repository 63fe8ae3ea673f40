"""The result of one evaluation: a cell at a checkpoint.

A rollout without a verdict counts as failed in the headline and is shown apart, so that infrastructure
that loses hard episodes cannot raise a score.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from openforge.eval.estimate import Estimate, clustered, pass_all_k, pass_at_k, pass_draw_k, pass_rate_power_k
from openforge.tables import EPISODES, ROLLOUTS, SCORES, partition_path, read_rows, write_beside

Row = Mapping[str, Any]
# Trials of a task in ClawEval's headline.
TRIALS = 3
NO_EPISODE = "no_episode"
NO_POLICY = "none"  # of scripted agents


class EvalError(ValueError):
    """Rows that are no single evaluation; one sentence."""


def evaluate(episodes: Sequence[Row], scores: Sequence[Row], rollouts: Sequence[Row]) -> dict[str, Any]:
    """Judge one evaluation from its rows of the three tables.

    Returns:
        p, low, high, n: pass@1 over n tasks with its interval;
        pass_at: the same by k, for 1, 2, 3, 4, 8, ... and the smallest number of samples of a task;
        pass_hat: pass^k by the same k, each in three kinds: all_k (the first k trials all pass), power ((c/n)^k) and
            draw (C(c,k)/C(n,k));
        claw: ClawEval's headline pass^3 and pass@3 over the first three trials, with tasks, trials (3 a task) and
            missing of those; NULL where a task has fewer than three;
        episodes: planned rollouts; missing: those of them without a verdict, and missing_by_status;
        reward: mean reward of the judged episodes, NULL without any;
        by_kind: p, low, high, n, episodes, missing by the task's kind; statuses: final episodes by status;
        cell, iteration, benchmark, policy, policy_versions, harness, harness_versions.

    Raises:
        EvalError: no planned rollout, or rows of several cells or iterations.
    """
    planned = [r for r in rollouts if not r["reserve"]]
    if not planned:
        raise EvalError("an evaluation needs at least one planned rollout")
    cell, iteration = _one(planned, "cell"), _one(planned, "iteration")
    final = {e["rollout_id"]: e for e in episodes if e["final"]}
    latest = _latest(scores)
    passed: dict[str, bool | None] = {}
    for r in planned:
        episode = final.get(r["rollout_id"])
        score = latest.get(episode["episode_id"]) if episode else None
        passed[r["rollout_id"]] = score["passed"] if score else None
    rewards = [s["reward"] for e in final.values() if (s := latest.get(e["episode_id"])) and s["reward"] is not None]
    lost = [r for r in planned if passed[r["rollout_id"]] is None]
    by_kind: dict[str, list[Row]] = defaultdict(list)
    for r in planned:
        by_kind[r["tags"][0] if r["tags"] else "none"].append(r)
    return {
        "cell": cell,
        "iteration": iteration,
        "benchmark": _one(planned, "benchmark"),
        "policy": NO_POLICY if _one(planned, "harness") == "scripted" else _one(planned, "policy"),
        "policy_versions": sorted({e["policy_version"] for e in final.values()}),
        "harness": _harness(planned),
        "harness_versions": sorted({e["harness_version"] for e in final.values()}),
        **_headline(planned, passed),
        "pass_at": {str(k): _pass_at(planned, passed, k)._asdict() for k in _ks(planned)},
        "pass_hat": {str(k): _pass_hat(planned, passed, k) for k in _ks(planned)},
        "claw": _claw(planned, passed),
        "reward": sum(rewards) / len(rewards) if rewards else None,
        "missing_by_status": dict(
            sorted(Counter(final[i]["status"] if (i := r["rollout_id"]) in final else NO_EPISODE for r in lost).items())
        ),
        "by_kind": {kind: _headline(rows, passed) for kind, rows in sorted(by_kind.items())},
        "statuses": dict(sorted(Counter(e["status"] for e in final.values()).items())),
    }


def eval_path(cell: str, iteration: int | None) -> str:
    """Path of an evaluation's result below results/<run>/."""
    it = "none" if iteration is None else f"{iteration:04d}"
    return f"eval/cell={cell}/iteration={it}/eval.json"


def evaluate_run(run_dir: Path, cell: str, iteration: int | None) -> dict[str, Any]:
    """Evaluate a cell at a checkpoint from the run's files and write its eval.json.

    Raises:
        TableError: a file is missing or cannot be read.
        EvalError: see `evaluate`.
    """
    rollouts = read_rows(run_dir / partition_path("rollouts", "eval", cell, iteration), ROLLOUTS)
    folder = (run_dir / partition_path("episodes", "eval", cell, iteration)).parent
    episodes = read_rows(sorted(folder.glob("shard=*/episodes.parquet")), EPISODES)
    scores = read_rows(run_dir / partition_path("scores", "eval", cell, iteration), SCORES)
    result = evaluate(episodes, scores, rollouts)
    write_beside(run_dir / eval_path(cell, iteration), json.dumps(result, indent=1) + "\n")
    return result


def _harness(planned: Sequence[Row]) -> str:
    """Its name; a scripted agent's with which one it is."""
    name = _one(planned, "harness")
    agents = {json.loads(r["harness_options"]).get("agent") for r in planned}
    return f"{name} {agents.pop()}" if name == "scripted" and len(agents) == 1 else str(name)


def headline(result: Mapping[str, Any]) -> str:
    """One line on an evaluation: pass@1, ClawEval's pass^3 and pass@3 where they can be had, and the denominators."""
    claw = result["claw"]
    parts = [f"pass@1 {interval(result)}"]
    if claw is not None:
        parts += [f"{name} {interval(claw[name])}" for name in ("pass^3", "pass@3")]
    counts = f"over {result['n']} tasks, {result['episodes']} episodes, {result['missing']} missing (counted as failed)"
    return f"{', '.join(parts)} {counts}"


def interval(figure: Mapping[str, Any]) -> str:
    """An estimate as text."""
    return f"{figure['p']:.3f} [{figure['low']:.3f}, {figure['high']:.3f}]"


def _one(rows: Iterable[Row], column: str) -> Any:
    values = {r[column] for r in rows}
    if len(values) != 1:
        raise EvalError(f"one evaluation has one {column}, these rollouts have {sorted(map(str, values))}")
    return values.pop()


def _latest(scores: Iterable[Row]) -> dict[str, Row]:
    """The score that counts by episode_id: the last one, as in the store's view."""
    latest: dict[str, Row] = {}
    for s in sorted(scores, key=lambda s: (s["scored_at"], s["scorer_version"])):
        latest[s["episode_id"]] = s
    return latest


def _trials(rows: Sequence[Row], passed: Mapping[str, bool | None]) -> list[list[bool | None]]:
    """What became of the samples of each task, in their order: passed, failed, or missing (None)."""
    tasks: dict[str, list[Row]] = defaultdict(list)
    for r in rows:
        tasks[r["task_id"]].append(r)
    order = [sorted(v, key=lambda r: (r["draw"], r["sample"])) for v in tasks.values()]
    return [[passed[r["rollout_id"]] for r in v] for v in order]


def _judged(trials: Sequence[bool | None]) -> list[bool]:
    """Missing is failed."""
    return [t is True for t in trials]


def _pass_at(rows: Sequence[Row], passed: Mapping[str, bool | None], k: int) -> Estimate:
    tasks = map(_judged, _trials(rows, passed))
    return clustered([(pass_at_k(len(t), sum(t), k), 1.0) for t in tasks])


def _pass_hat(rows: Sequence[Row], passed: Mapping[str, bool | None], k: int) -> dict[str, Any]:
    tasks = list(map(_judged, _trials(rows, passed)))
    values = {
        "all_k": [pass_all_k(t, k) for t in tasks],
        "power": [pass_rate_power_k(len(t), sum(t), k) for t in tasks],
        "draw": [pass_draw_k(len(t), sum(t), k) for t in tasks],
    }
    return {kind: clustered([(v, 1.0) for v in found])._asdict() for kind, found in values.items()}


def _claw(rows: Sequence[Row], passed: Mapping[str, bool | None]) -> dict[str, Any] | None:
    """ClawEval's headline: of its first three trials a task passes all (pass^3) or any (pass@3); missing is failed."""
    tasks = [t[:TRIALS] for t in _trials(rows, passed)]
    if min(map(len, tasks)) < TRIALS:
        return None
    return {
        "pass^3": clustered([(pass_all_k(_judged(t), TRIALS), 1.0) for t in tasks])._asdict(),
        "pass@3": clustered([(float(any(t)), 1.0) for t in tasks])._asdict(),
        "tasks": len(tasks),
        "trials": TRIALS * len(tasks),
        "missing": sum(t is None for trials in tasks for t in trials),
    }


def _headline(rows: Sequence[Row], passed: Mapping[str, bool | None]) -> dict[str, Any]:
    missing = sum(passed[r["rollout_id"]] is None for r in rows)
    return {**_pass_at(rows, passed, 1)._asdict(), "episodes": len(rows), "missing": missing}


def _ks(rows: Sequence[Row]) -> list[int]:
    fewest = min(Counter(r["task_id"] for r in rows).values())
    return sorted({fewest, min(TRIALS, fewest)} | {2**i for i in range(fewest.bit_length())})
