"""A small results/<run>/ made by hand, for tests of what reads the tables. Its figures are worked out here.

Training (2 iterations, 2 groups of 4):
    iteration 1: rewards 1 0 0 1 | 0 0 0 0               mean 2/8
    iteration 2: rewards 1 1 1 0 | 1 0 missing 1         mean 5/7
    The first rollout of iteration 1 lost its first attempt (sandbox_lost); its second has two scores, 0 by
    scorer v1 and later 1 by v2. The missing one ended as policy_failed.
Held-out evaluation (`heldout`, 3 tasks, 2 samples; a and b of kind copy, c of kind count):
    checkpoint 0: a 1 0 | b 0 0 | c 0 missing            pass@1 (1/2 + 0 + 0) / 3 = 1/6     pass@2 1/3
    checkpoint 2: a 1 1 | b 1 0 | c 1 1                  pass@1 (1 + 1/2 + 1) / 3 = 5/6     pass@2 1
Greedy (`greedy`, 3 tasks, 1 sample): checkpoint 0: 1 0 0 = 1/3; checkpoint 2: 1 1 1 = 1.
pi (`pi`, 2 tasks, 1 sample, checkpoint 2 only): 1 0 = 1/2.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from openforge import tables as t

RUN = "made"
START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
LIMITS = {"turns": None, "tokens": None, "seconds": 60.0}
SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "max_tokens": 16,
}
HOSTILE = "<script>alert(1)</script>"

Reward = float | None


def task(task_id: str, kind: str, split: str) -> dict[str, Any]:
    return {
        "task_id": task_id,
        "environment": "claw_eval",
        "split": split,
        "instruction": f"do {task_id} {HOSTILE}",
        "payload": "{}",
        "files": [],
        "verifier": {"name": "v", "version": "1", "command": ["true"], "files": [], "seconds": 5.0},
        "task_limits": LIMITS,
        "tags": [kind],
        "source": "made",
        "source_revision": "r1",
    }


def rollout(raw: dict[str, Any], purpose: str, cell: str, iteration: int | None, sample: int) -> dict[str, Any]:
    group = t.group_id(RUN, purpose, cell, iteration, 0, raw["task_id"])
    return {
        **raw,
        "rollout_id": t.rollout_id(group, sample),
        "group_id": group,
        "sample": sample,
        "purpose": purpose,
        "cell": cell,
        "iteration": iteration,
        "benchmark": "made",
        "draw": 0,
        "shard": 1,
        "reserve": False,
        "orchestrator": "local",
        "image": "host",
        "grading": "same",
        "network": "proxy",
        "harness": "pi" if cell == "pi" else "mini_swe_agent",
        "harness_options": "{}",
        "judge": None,
        "limits": LIMITS,
        "sampling": SAMPLING,
        "seed": sample,
        # With lag 0, iteration k samples from checkpoint k-1.
        "policy": f"{RUN}@{iteration if purpose == 'eval' or iteration is None else iteration - 1}",
    }


def episode(r: dict[str, Any], status: str, attempt: int = 0, final: bool = True, turns: int = 1) -> dict[str, Any]:
    same = (
        "rollout_id",
        "group_id",
        "task_id",
        "purpose",
        "cell",
        "iteration",
        "benchmark",
        "split",
        "sample",
    )
    return {
        **{k: r[k] for k in same},
        "episode_id": t.episode_id(r["rollout_id"], attempt),
        "kind": r["tags"][0],
        "attempt": attempt,
        "final": final,
        "staleness": 0 if r["purpose"] == "train" else None,
        "harness": r["harness"],
        "harness_version": "0.73.1" if r["harness"] == "pi" else "2.4.6",
        "image_digest": "host",
        "verifier_version": "1",
        "isolation": "bwrap",
        "network": "proxy",
        "policy_version": f"{r['iteration']}@abc",
        "status": status,
        "message": None if status == "completed" else f"it ended {HOSTILE}",
        "harness_exit": 0,
        "verifier_output": json.dumps({"note": HOSTILE}) if status == "completed" else None,
        "answer": None,
        "dispatches": None,
        "audit": None,
        "snapshot": None,
        "user_rounds": 0,
        "turns": turns,
        "prompt_tokens": 10 * turns,
        "response_tokens": 3 * turns,
        "seconds": {"queue": 0.0, "setup": 0.5, "agent": 2.0, "verify": 0.5, "total": 3.0},
        "started": START,
        "artifacts": None,
    }


def score(e: dict[str, Any], reward: Reward, version: str = "v1", later: int = 0) -> dict[str, Any]:
    return {
        "episode_id": e["episode_id"],
        "scorer_version": version,
        "status": "not_scorable" if reward is None else "scored",
        "reward": reward,
        "passed": None if reward is None else reward >= 1.0,
        "components": "{}",
        "judge": None,
        "scored_at": START + timedelta(seconds=later),
    }


def call(e: dict[str, Any], index: int) -> dict[str, Any]:
    return {
        "episode_id": e["episode_id"],
        "call": index,
        "thread": 0,
        "dialect": "chat",
        "model": "policy",
        "prefix_of": index - 1 if index else None,
        "prefix_len": 13 * index,
        "prompt_suffix_ids": [1, 2],
        "prompt_tokens": 13 * index + 2,
        "parent": index - 1 if index else None,
        "response_token_ids": [7, 8, 9],
        "logprobs": [-0.1, -0.2, -0.3],
        "finish_reason": "stop",
        "sampling": SAMPLING,
        "policy_version": e["policy_version"],
        "messages": json.dumps([{"role": "user", "content": f"message {index} {HOSTILE}"}]),
        "response": json.dumps({"role": "assistant", "content": f"answer {index} {HOSTILE}"}),
        "tools_sha256": None,
        "system_sha256": None,
        "images": [],
        "delivery": "confirmed",
        "trainable": True,
        "reason": None,
        "arrived": START + timedelta(seconds=index),
        "latency": 0.25,
    }


def sample(e: dict[str, Any], index: int, calls: list[int]) -> dict[str, Any]:
    return {
        "sample_id": t.h(e["episode_id"], index),
        "episode_id": e["episode_id"],
        "group_id": e["group_id"],
        "calls": calls,
        "token_ids": [1, 2, 7],
        "loss_mask": [0, 0, 1],
        "logprobs": [0.0, 0.0, -0.1],
        "rewards": [0.0, 0.0, 1.0],
        "advantages": [0.0, 0.0, 0.5],
        "weight": 1.0,
        "policy_version": e["policy_version"],
        "images": [],
    }


def write_cell(
    run_dir: Path,
    purpose: str,
    cell: str,
    iteration: int | None,
    planned: list[tuple[dict[str, Any], Reward]],
) -> list[dict[str, Any]]:
    """Write the files of one cell, an episode a planned rollout (None: it failed); returns the episodes."""
    rollouts = [r for r, _ in planned]
    # Every second sample takes two calls.
    episodes = [
        episode(r, "policy_failed" if reward is None else "completed", turns=1 + r["sample"] % 2)
        for r, reward in planned
    ]
    scores = [score(e, reward) for e, (_, reward) in zip(episodes, planned, strict=True)]
    calls = [call(e, i) for e in episodes for i in range(e["turns"])]

    def path(table: str, shard: int | None = None) -> Path:
        return run_dir / t.partition_path(table, purpose, cell, iteration, shard)

    t.write_table(path("rollouts"), t.ROLLOUTS, rollouts)
    t.write_table(path("episodes", 1), t.EPISODES, episodes)
    t.write_table(path("calls", 1), t.CALLS, calls)
    t.write_table(path("blobs", 1), t.BLOBS, [])
    t.write_table(path("scores"), t.SCORES, scores)
    return episodes


def _plan(raws: Sequence[dict[str, Any]], purpose: str, cell: str, k: int, rewards: Sequence[Sequence[Reward]]):
    return [
        (rollout(raw, purpose, cell, k, i), reward)
        for raw, group in zip(raws, rewards, strict=True)
        for i, reward in enumerate(group)
    ]


def _train(run_dir: Path, raws: Sequence[dict[str, Any]]) -> None:
    for k, rewards in ((1, [[0, 0, 0, 1], [0, 0, 0, 0]]), (2, [[1, 1, 1, 0], [1, 0, None, 1]])):
        episodes = write_cell(run_dir, "train", "train", k, _plan(raws, "train", "train", k, rewards))
        # Groups with spread are trained: an episode of two calls merges into one row.
        trained = [e for e in episodes if e["group_id"] == episodes[0]["group_id"]]
        rows = [sample(e, 0, list(range(e["turns"]))) for e in trained]
        part = f"purpose=train/cell=train/iteration={k:04d}"
        t.write_table(run_dir / f"samples/{part}/samples.parquet", t.SAMPLES, rows)
        lost = {"zero_variance": 4} if k == 1 else {"zero_variance": 3, "status: policy_failed": 1}
        counts = {"episodes": {"total": 8, "trained": 4, "dropped": lost}, "calls_per_row": 1.5}
        t.write_beside(run_dir / f"samples/{part}/report.json", json.dumps(counts))
        metrics = [{"iteration": k, "step": -1, "name": "actor/pg_loss", "value": 0.5 * k}]
        t.write_table(run_dir / f"metrics/{part}/metrics.parquet", t.METRICS, metrics)


def _retry_and_rescore(run_dir: Path) -> None:
    """Give the first rollout of iteration 1 a lost attempt, and its second attempt two scores."""
    path = run_dir / t.partition_path("episodes", "train", "train", 1, 1)
    scores = run_dir / t.partition_path("scores", "train", "train", 1)
    calls = run_dir / t.partition_path("calls", "train", "train", 1, 1)
    samples = run_dir / t.partition_path("samples", "train", "train", 1)
    (r, *_) = t.read_rows(run_dir / t.partition_path("rollouts", "train", "train", 1), t.ROLLOUTS)
    lost, again = episode(r, "sandbox_lost", 0, False), episode(r, "completed", 1)

    def moved(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**x, "episode_id": again["episode_id"]} if x["episode_id"] == lost["episode_id"] else x for x in rows]

    rest = t.read_rows(path, t.EPISODES)[1:]
    t.write_table(path, t.EPISODES, [lost, again, *rest])
    kept = t.read_rows(scores, t.SCORES)[1:]
    t.write_table(scores, t.SCORES, [score(again, 1.0, "v2", later=60), score(again, 0.0, "v1"), *kept])
    t.write_table(calls, t.CALLS, moved(t.read_rows(calls, t.CALLS)))
    t.write_table(samples, t.SAMPLES, moved(t.read_rows(samples, t.SAMPLES)))


def make(results: Path) -> Path:
    """Write the run below `results`; returns its folder."""
    run_dir = results / RUN
    held = [task("a", "copy", "heldout"), task("b", "copy", "heldout"), task("c", "count", "heldout")]
    train = [task("t1", "copy", "train"), task("t2", "copy", "train")]
    t.write_table(run_dir / "tasks.parquet", t.TASKS, [*train, *held])
    _train(run_dir, train)
    _retry_and_rescore(run_dir)
    for cell, k, raws, rewards in (
        ("heldout", 0, held, [[1, 0], [0, 0], [0, None]]),
        ("heldout", 2, held, [[1, 1], [1, 0], [1, 1]]),
        ("greedy", 0, held, [[1], [0], [0]]),
        ("greedy", 2, held, [[1], [1], [1]]),
        ("pi", 2, held[:2], [[1], [0]]),
    ):
        write_cell(run_dir, "eval", cell, k, _plan(raws, "eval", cell, k, rewards))
    timings = [
        ("rollout-train-train-0001-0001", "rollout", 4.0),
        ("rollout-train-train-0002-0001", "rollout", 6.5),
    ]
    for name, stage, seconds in [*timings, ("train-0001", "train", 3.0)]:
        line = {"stage": stage, "seconds": seconds, "started": START.isoformat()}
        t.write_beside(run_dir / "timings" / f"{name}.json", json.dumps(line))
    return run_dir
