"""`openforge export claweval`: a run's episodes as ClawEval's traces and batch result files."""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openforge import store
from openforge.environments.claw_eval import traces
from openforge.tables import write_beside
from openforge.verbs import VerbError

Row = dict[str, Any]

_BATCHES = """
    SELECT e.purpose, e.cell, e.iteration, e.harness, r.policy, min(e.started) AS started, count(*) AS episodes
    FROM episodes e JOIN rollouts r USING (rollout_id)
    WHERE r.environment = 'claw_eval' AND ($1 IS NULL OR e.cell = $1)
    GROUP BY ALL ORDER BY ALL
"""
_EPISODES = """
    SELECT e.*, (SELECT sum(latency) FROM calls c WHERE c.episode_id = e.episode_id) AS model_seconds
    FROM episodes e JOIN rollouts r USING (rollout_id)
    WHERE e.purpose = $1 AND e.cell = $2 AND e.iteration IS NOT DISTINCT FROM $3 AND e.harness = $4 AND r.policy = $5
      AND r.environment = 'claw_eval'
    ORDER BY e.task_id, e.sample, e.episode_id
"""


def run(args: argparse.Namespace, root: Path) -> int:
    """Write the traces of `args.run` below `args.folder`, a folder for each policy, harness and evaluation."""
    with store.reader(root / "results" / args.run) as tables:
        batches = tables.rows(_BATCHES, [args.cell])
        if not batches:
            cells = [r["cell"] for r in tables.rows("SELECT DISTINCT cell FROM episodes ORDER BY cell")]
            of = f"of cell {args.cell!r} " if args.cell else ""
            there = ", ".join(cells) or "none"
            raise VerbError(f"run {args.run} has no episodes {of}of environment claw_eval; its cells: {there}")
        folders = [Path(args.folder) / name for name in _names(batches)]
        for folder in folders:
            if folder.exists():
                raise VerbError(f"{folder} exists already; name another folder, or remove it")
        for batch, folder in zip(batches, folders, strict=True):
            _write(tables, batch, folder)
            print(f"{folder}: {batch['episodes']} traces")
    return 0


def _names(batches: Sequence[Mapping[str, Any]]) -> list[str]:
    """<policy>_<harness>_<stamp>, ClawEval's <model>_<stamp>; with the evaluation where that is not enough."""
    names = [f"{b['policy']}_{b['harness']}_{b['started']:%y-%m-%d-%H-%M}" for b in batches]
    seen = Counter(names)
    told = [
        n if seen[n] == 1 else f"{n}_{b['purpose']}_{b['cell']}_{b['iteration']}"
        for n, b in zip(names, batches, strict=True)
    ]
    return [re.sub(r"[^A-Za-z0-9@._-]+", "_", n) for n in told]


def _write(tables: store.Reader, batch: Mapping[str, Any], folder: Path) -> None:
    tasks: dict[str, list[Row]] = {}
    payloads: dict[str, Row] = {}
    keys = [batch[k] for k in ("purpose", "cell", "iteration", "harness", "policy")]
    for episode in tables.rows(_EPISODES, keys):
        (rollout,) = tables.rows("SELECT policy, payload FROM rollouts WHERE rollout_id = ?", [episode["rollout_id"]])
        path = folder / traces.trace_name(episode)
        found = traces.events(episode, rollout, _chat(tables, episode["episode_id"]))
        write_beside(path, "".join(json.dumps(event) + "\n" for event in found))
        trials = tasks.setdefault(episode["task_id"], [])
        trials.append(traces.trial(episode, rollout, str(path), len(trials)))
        payload = json.loads(rollout["payload"])
        payloads[episode["task_id"]] = payload if isinstance(payload, dict) else {}
    results = [traces.result(task, payloads[task], trials) for task, trials in tasks.items()]
    write_beside(folder / "batch_results.json", json.dumps(results, indent=2) + "\n")


def _chat(tables: store.Reader, episode_id: str) -> list[Row]:
    sql = """
        SELECT call, prefix_of, messages, response, tools_sha256, system_sha256
        FROM calls WHERE episode_id = ? ORDER BY call
    """
    calls = tables.rows(sql, [episode_id])
    hashes = sorted({c["system_sha256"] for c in calls if c["system_sha256"] is not None})
    sql = "SELECT sha256, any_value(bytes) AS bytes FROM blobs WHERE list_contains(?, sha256) GROUP BY sha256"
    texts = {b["sha256"]: b["bytes"].decode(errors="replace") for b in tables.rows(sql, [hashes])} if hashes else {}
    return traces.conversation(calls, texts)
