"""plan(k): every (task, sample) exactly once an epoch, whatever k is asked first."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openforge import plan, tables
from openforge.config import Cell, Harness, RunConfig
from openforge.plan.standing import standing


def task(i: int, split: str = "train", **limits: Any) -> dict[str, Any]:
    return {
        "task_id": f"t{i}",
        "environment": "claw_eval",
        "split": split,
        "instruction": "do it",
        "payload": "{}",
        "files": [],
        "verifier": {"name": "v", "version": "1", "command": ["true"], "files": [], "seconds": 10.0},
        "task_limits": {"turns": None, "tokens": None, "seconds": None} | limits,
        "tags": ["kind"],
        "source": "demo",
        "source_revision": "r",
    }


def config(**over: Any) -> RunConfig:
    base: dict[str, Any] = {"model": "m", "iterations": 4, "tasks": {"source": "demo"}}
    return RunConfig.model_validate(base | over)


@given(tasks=st.integers(1, 12), batch=st.integers(1, 30), seed=st.integers(0, 5))
def test_epochs_are_permutations_whatever_the_batch(tasks: int, batch: int, seed: int) -> None:
    ids = [f"t{i}" for i in range(tasks)]
    whole = plan.draw(ids, seed, 0, 5 * tasks)
    for e in range(5):
        assert sorted(whole[e * tasks : (e + 1) * tasks]) == sorted(ids)
    pieces = [i for start in range(0, 5 * tasks, batch) for i in plan.draw(ids, seed, start, batch)]
    assert pieces[: 5 * tasks] == whole


def test_the_draw_does_not_depend_on_the_order_of_the_raw_tasks() -> None:
    ids = [f"t{i}" for i in range(9)]
    assert plan.draw(ids, 0, 3, 7) == plan.draw(ids[::-1], 0, 3, 7)


def test_seeds_differ() -> None:
    ids = [f"t{i}" for i in range(9)]
    assert plan.draw(ids, 0, 0, 9) != plan.draw(ids, 1, 0, 9)


def test_a_training_table_is_whole_groups_in_whole_shards() -> None:
    c = config(data={"train_batch_size": 5}, rollout={"n": 4, "shards": 2})
    rows = plan.train_table("r", c, [task(i) for i in range(3)], 1)
    assert len(rows) == 20 and len({r["rollout_id"] for r in rows}) == 20
    groups = Counter(r["group_id"] for r in rows)
    # Three tasks drawn five times: two of them twice, told apart by their draw.
    assert sorted(groups.values()) == [4, 4, 4, 4, 4]
    assert Counter(r["draw"] for r in rows) == {0: 12, 1: 8}
    for g in groups:
        assert len({r["shard"] for r in rows if r["group_id"] == g}) == 1
    assert {r["shard"] for r in rows} == {1, 2}
    assert {r["policy"] for r in rows} == {"r@0"}


@pytest.mark.parametrize(
    ("lag", "k", "policy"), [(0, 3, "r@2"), (1, 3, "r@1"), (2, 3, "r@0"), (2, 1, "r@0"), (2, 6, "r@3")]
)
def test_lag_samples_from_an_older_checkpoint(lag: int, k: int, policy: str) -> None:
    rows = plan.train_table("r", config(lag=lag), [task(0)], k)
    assert {r["policy"] for r in rows} == {policy}


def test_the_lower_limit_holds() -> None:
    c = config(limits={"turns": 4, "seconds": 60.0})
    by_task = {
        r["task_id"]: r["limits"]
        for r in plan.train_table("r", c, [task(0, turns=2, seconds=90.0), task(1, turns=9)], 1)
    }
    assert by_task["t0"] == {"turns": 2, "tokens": None, "seconds": 60.0}
    assert by_task["t1"] == {"turns": 4, "tokens": None, "seconds": 60.0}


def test_an_evaluation_takes_its_split_and_its_samples() -> None:
    cell = Cell.model_validate({"name": "heldout", "n": 3, "tasks": 2})
    tasks = [task(0), *[task(i, "heldout") for i in range(1, 5)]]
    rows = plan.eval_table("r", config(), tasks, cell, 7, "r@7")
    assert len(rows) == 6 and all(r["split"] == "heldout" and r["iteration"] == 7 for r in rows)
    again = plan.eval_table("r", config(), tasks, cell, 8, "r@8")
    # The same tasks at every checkpoint, under other identities.
    assert [r["task_id"] for r in rows] == [r["task_id"] for r in again]
    assert not {r["rollout_id"] for r in rows} & {r["rollout_id"] for r in again}


def test_an_empty_split_and_too_many_tasks_are_sentences() -> None:
    with pytest.raises(plan.PlanError, match=r"'nosuch'.*train"):
        plan.eval_table("r", config(), [task(0)], Cell(name="a", split="nosuch"), 0, "p")
    with pytest.raises(plan.PlanError, match="asks for 3 tasks; split 'train' has 1"):
        plan.eval_table("r", config(), [task(0)], Cell(name="a", split="train", tasks=3), 0, "p")


@given(
    tasks=st.integers(1, 7),
    batch=st.integers(1, 9),
    n=st.integers(2, 3),
    lag=st.integers(0, 2),
    planned=st.lists(st.integers(1, 6), min_size=1, max_size=12),
)
@settings(max_examples=40, deadline=None)
def test_no_prompt_is_skipped_or_repeated_however_often_a_run_is_interrupted(
    tasks: int, batch: int, n: int, lag: int, planned: list[int]
) -> None:
    """Fault 25: a plan is a function of k alone. Iterations are planned in any order and again, as after kills at any
    stage; laid one after another they are whole epochs, every (task, sample) once in each."""
    raw = [task(i) for i in range(tasks)]
    c = config(data={"train_batch_size": batch}, rollout={"n": n}, lag=lag)
    tables_: dict[int, list[dict[str, Any]]] = {}
    for k in [*planned, *range(1, 7)]:
        again = plan.train_table("r", c, raw if k % 2 else raw[::-1], k)
        assert tables_.setdefault(k, again) == again
    order = [r for k in range(1, 7) for r in tables_[k]]
    assert len({r["rollout_id"] for r in order}) == len(order) == 6 * batch * n
    drawn = [(r["task_id"], r["sample"]) for r in order]
    for e in range(0, len(drawn), tasks * n):
        epoch = drawn[e : e + tasks * n]
        assert len(set(epoch)) == len(epoch)
    assert set(drawn[: tasks * n]) <= {(f"t{i}", s) for i in range(tasks) for s in range(n)}


def test_a_table_planned_twice_is_the_same_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        rows = plan.train_table("r", config(), [task(i) for i in range(9)], 2)
        tables.write_table(tmp_path / name, tables.ROLLOUTS, rows)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


# ---- sandboxes -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("sandbox", "launch"),
    [
        ({}, "fork"),
        ({"image": "x.tar"}, "command"),
        ({"backend": "orchard", "network": "open", "grading": "second"}, "command"),
    ],
)
def test_a_row_names_its_sandbox_and_a_launch_that_it_allows(sandbox: dict[str, Any], launch: str) -> None:
    (row,) = plan.eval_table("r", config(sandbox=sandbox), [task(0)], Cell(name="a", split="train"), None, "p")
    assert row["orchestrator"] == sandbox.get("backend", "local") and row["image"] == sandbox.get("image", "host")
    assert (row["network"], row["grading"]) == (sandbox.get("network", "proxy"), sandbox.get("grading", "same"))
    assert json.loads(row["harness_options"])["launch"] == launch
    asked = Cell(name="a", split="train", harness=Harness(launch="command"))
    (row,) = plan.eval_table("r", config(sandbox=sandbox), [task(0)], asked, None, "p")
    assert json.loads(row["harness_options"])["launch"] == "command"
    pi = Cell(name="a", split="train", harness=Harness(name="pi"))
    (row,) = plan.eval_table("r", config(sandbox=sandbox), [task(0)], pi, None, "p")
    assert json.loads(row["harness_options"])["launch"] is None


# ---- reserve groups ------------------------------------------------------------------------------
def dynamic(batch: int, batches: int, shards: int = 1, n: int = 2) -> RunConfig:
    groups = {"enable": True, "max_num_gen_batches": batches}
    return config(
        data={"train_batch_size": batch}, rollout={"n": n, "shards": shards}, algorithm={"filter_groups": groups}
    )


def test_reserve_groups_follow_the_planned_ones_and_spread_over_the_shards() -> None:
    rows = plan.train_table("r", dynamic(5, 3, shards=2), [task(i) for i in range(20)], 1)
    groups = list(dict.fromkeys(r["group_id"] for r in rows))
    of = {r["group_id"]: (r["reserve"], r["shard"]) for r in rows}
    assert [of[g] for g in groups] == ([(False, 1)] * 3 + [(False, 2)] * 2 + [(True, 1)] * 5 + [(True, 2)] * 5)
    assert len(rows) == 30 and len({r["task_id"] for r in rows}) == 15


def test_without_dynamic_sampling_there_is_no_reserve() -> None:
    rows = plan.train_table("r", config(), [task(i) for i in range(20)], 2)
    assert {r["reserve"] for r in rows} == {False} and len(rows) == 64


@given(tasks=st.integers(1, 12), batch=st.integers(1, 4), batches=st.integers(2, 4))
def test_iterations_draw_on_and_on_whatever_ran_of_the_reserve(tasks: int, batch: int, batches: int) -> None:
    c, raw = dynamic(batch, batches, n=2), [task(i) for i in range(tasks)]
    drawn = [r["task_id"] for k in range(1, 5) for r in plan.train_table("r", c, raw, k) if r["sample"] == 0]
    assert drawn == plan.draw([t["task_id"] for t in raw], 0, 0, 4 * batch * batches)


MIX = [{"name": "codex", "weight": 2.0}, {"name": "claude_code", "bare": True}, {"name": "pi", "weight": 1.0}]


def mixed(**over: Any) -> RunConfig:
    base = {"harness_mix": MIX, "rollout": {"n": 2, "shards": 4}, "data": {"train_batch_size": 8}}
    return config(**base | over)


def test_each_group_of_a_mix_has_one_harness_and_each_shard_too() -> None:
    tasks = [task(i) for i in range(8)]
    rows = plan.train_table("r", mixed(), tasks, 1)
    for key in ("group_id", "shard"):
        by_key: dict[Any, set[str]] = {}
        for r in rows:
            by_key.setdefault(r[key], set()).add(r["harness"])
        assert all(len(h) == 1 for h in by_key.values())
    assert Counter(r["harness"] for r in rows) == {"codex": 8, "claude_code": 4, "pi": 4}
    options = {r["harness"]: r["harness_options"] for r in rows}
    assert '"bare": true' in options["claude_code"] and '"bare": false' in options["codex"]
    assert "weight" not in options["codex"]


@given(weights=st.lists(st.integers(1, 7), min_size=1, max_size=4), shards=st.integers(1, 5), k=st.integers(1, 8))
def test_a_mix_has_its_shares_over_the_iterations(weights: list[int], shards: int, k: int) -> None:
    names = ["codex", "claude_code", "pi", "openclaw"]
    mix = [{"name": n, "weight": float(w)} for n, w in zip(names, weights, strict=False)]
    c = mixed(harness_mix=mix, rollout={"shards": shards})
    dealt = [plan.harness_of(c, i, s).name for i in range(1, k + 1) for s in range(1, shards + 1)]
    for name, w in zip(names, weights, strict=False):
        share = len(dealt) * w / sum(weights)
        assert abs(dealt.count(name) - share) < len(weights)
    # A whole round has it to the shard.
    n = sum(weights)
    assert Counter(dealt[:n]) == Counter(dict(zip(names, weights, strict=False))) or len(dealt) < n


def test_a_reserve_group_has_its_shards_harness() -> None:
    c = mixed(algorithm={"filter_groups": {"enable": True, "max_num_gen_batches": 2}})
    rows = plan.train_table("r", c, [task(i) for i in range(16)], 1)
    shards = {(r["shard"], r["harness"]) for r in rows}
    assert len(shards) == 4
    assert {r["shard"] for r in rows if r["reserve"]} == {1, 2, 3, 4}


def test_a_mix_stands_by_shard(tmp_path: Path) -> None:
    rows = plan.train_table("r", mixed(), [task(i) for i in range(8)], 1)
    tables.write_table(tmp_path / "rollouts.parquet", tables.ROLLOUTS, rows)
    found = standing(tmp_path / "rollouts.parquet")
    assert found is not None
    assert found.harnesses == tuple(plan.harness_of(mixed(), 1, s).name for s in (1, 2, 3, 4))


def test_a_scripted_agent_is_in_its_rows() -> None:
    cell = Cell.model_validate({"name": "c", "harness": {"name": "scripted", "agent": "reference"}})
    raw = task(0, "heldout") | {"payload": '{"openforge_agents": {"reference": "echo 1"}}'}
    (row,) = plan.eval_table("r", config(), [raw], cell, 0, "r@0")
    assert '"script": "echo 1"' in row["harness_options"]
    nothing = Cell.model_validate({"name": "c", "harness": {"name": "scripted", "agent": "nothing"}})
    (row,) = plan.eval_table("r", config(), [task(0, "heldout")], nothing, 0, "r@0")
    assert '"script": "true\\n"' in row["harness_options"]
    with pytest.raises(plan.PlanError, match=r"task 't0' has no scripted agent 'reference'.*agents/reference\.sh"):
        plan.eval_table("r", config(), [task(0, "heldout")], cell, 0, "r@0")


def test_the_judge_of_the_configuration_is_in_the_rows() -> None:
    c = config(judge={"url": "http://127.0.0.1:1/v1", "model": "m", "api_key_env": "KEY"})
    (row, *_) = plan.train_table("r", c, [task(0)], 1)
    assert '"model": "m"' in row["judge"] and '"api_key_env": "KEY"' in row["judge"]
