"""plan(k): the rollout table of an iteration, or of an evaluation cell.

Training draws without replacement over epochs: position p of the whole run is task perm_e[p mod T] of epoch
e = p div T, perm_e a permutation seeded by (seed, e). The state is k and the seed; there is no cursor to lose.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from openforge import tables
from openforge.config import Cell, EvalConfig, Harness, Limits, RunConfig, Sampling, Sandbox
from openforge.config_sandbox import DEFAULT_IMAGE
from openforge.environments.claw_eval.agents import AgentError, script

# numpy and torch take 32-bit seeds; staying below 2**31 fits every consumer.
SEED_BITS = 31


class PlanError(ValueError):
    """A table that cannot be planned, in one sentence."""


def draw(task_ids: Sequence[str], seed: int, start: int, count: int) -> list[str]:
    """Task ids at positions start .. start+count-1 of the seeded sequence of epochs."""
    order: list[str] = []
    epoch = start // len(task_ids)
    while len(order) < start % len(task_ids) + count:
        perm = sorted(task_ids)
        random.Random(f"{seed}/{epoch}").shuffle(perm)
        order += perm
        epoch += 1
    first = start % len(task_ids)
    return order[first : first + count]


def _split(tasks: Sequence[Mapping[str, Any]], split: str) -> dict[str, Mapping[str, Any]]:
    chosen = {t["task_id"]: t for t in tasks if t["split"] == split}
    if not chosen:
        known = sorted({t["split"] for t in tasks})
        raise PlanError(f"no task has split {split!r}; the table's splits are {', '.join(known) or 'none'}")
    return chosen


def _lower(a: float | None, b: float | None) -> Any:
    return b if a is None else a if b is None else min(a, b)


def _rows(
    run: str,
    purpose: str,
    cell: str,
    iteration: int | None,
    drawn: Sequence[Mapping[str, Any]],
    *,
    planned: int,
    config: RunConfig | EvalConfig,
    n: int,
    harnesses: Sequence[Harness],
    sampling: Sampling,
    limits: Limits,
    policy: str,
) -> list[dict[str, Any]]:
    shards = min(config.rollout.shards, planned)
    options = [harness_options(h, config.sandbox) for h in harnesses]
    seen: Counter[str] = Counter()
    judge = None if config.judge is None else json.dumps(config.judge.model_dump(), sort_keys=True)
    rows = []
    for g, task in enumerate(drawn):
        repeat = seen[task["task_id"]]
        seen[task["task_id"]] += 1
        group = tables.group_id(run, purpose, cell, iteration, repeat, task["task_id"])
        own = task["task_limits"]
        # Contiguous blocks of groups, the reserve's cut up by themselves: a group never spans shards.
        place, among = (g, planned) if g < planned else (g - planned, len(drawn) - planned)
        shard = place * shards // among
        harness = harnesses[shard % len(harnesses)]
        for sample in range(n):
            rollout = tables.rollout_id(group, sample)
            rows.append(
                dict(
                    task,
                    rollout_id=rollout,
                    group_id=group,
                    sample=sample,
                    purpose=purpose,
                    cell=cell,
                    iteration=iteration,
                    benchmark=task["source"],
                    draw=repeat,
                    shard=shard + 1,
                    reserve=g >= planned,
                    orchestrator=config.sandbox.backend,
                    image=config.sandbox.image or DEFAULT_IMAGE,
                    network=config.sandbox.network,
                    grading=config.sandbox.grading,
                    harness=harness.name,
                    harness_options=_scripted(task, harness, options[shard % len(harnesses)]),
                    judge=judge,
                    limits={
                        "turns": _lower(own["turns"], limits.turns),
                        "tokens": _lower(own["tokens"], limits.tokens),
                        "seconds": _lower(own["seconds"], limits.seconds),
                    },
                    sampling=sampling.model_dump(),
                    seed=int(tables.h("seed", config.seed, rollout), 16) % 2**SEED_BITS,
                    policy=policy,
                )
            )
    return rows


def harness_options(harness: Harness, sandbox: Sandbox) -> str:
    """The options of a harness as JSON, with the launch that its sandboxes allow where none is asked for."""
    options = harness.model_dump(exclude={"name", "weight"})
    if options["launch"] is None and harness.name == "mini_swe_agent":
        options["launch"] = "fork" if sandbox.can_fork() else "command"
    return json.dumps(options, sort_keys=True)


def _scripted(task: Mapping[str, Any], harness: Harness, options: str) -> str:
    """A harness's options, with the task's own script where that is the agent.

    Raises:
        PlanError: the task has no such script.
    """
    if harness.name != "scripted":
        return options
    try:
        return json.dumps(json.loads(options) | {"script": script(task, harness.agent)}, sort_keys=True)
    except AgentError as e:
        raise PlanError(str(e)) from None


def harness_of(config: RunConfig, iteration: int, shard: int) -> Harness:
    """The harness of a training shard (from 1): `harness`, or one of `harness_mix`.

    A shard has one harness, which is started once, and a group never spans shards. The shards of all iterations, in
    their order, are dealt by smooth weighted round robin: of any n in a row each harness has its share to less than the
    number of harnesses. The state is the position, as in `draw`.
    """
    mix = config.harness_mix
    if not mix:
        return config.harness
    total, credit, chosen = sum(h.weight for h in mix), [0.0] * len(mix), 0
    for _ in range((iteration - 1) * shards(config, None) + shard):
        credit = [c + h.weight for c, h in zip(credit, mix, strict=True)]
        # The first of equals, whatever rounding makes of them.
        chosen = max(range(len(mix)), key=lambda i: (round(credit[i], 9), -i))
        credit[chosen] -= total
    return mix[chosen]


def shards(config: RunConfig | EvalConfig, cell: Cell | None) -> int:
    """Number of shards of a table, known before it is drawn (the DAG needs it)."""
    if cell is None and isinstance(config, RunConfig):
        return min(config.rollout.shards, config.data.train_batch_size)
    return 1


def train_table(
    run: str, config: RunConfig, tasks: Sequence[Mapping[str, Any]], iteration: int
) -> list[dict[str, Any]]:
    """The rollout table of training iteration k >= 1: `data.train_batch_size` groups of `rollout.n` rollouts.

    With dynamic sampling `max_num_gen_batches` such batches: the first is planned, the others are its reserve. What of
    it does not run is drawn all the same, so that k and the seed alone say what an iteration draws.
    """
    by_id = _split(tasks, config.data.train_split)
    batch, groups = config.data.train_batch_size, config.algorithm.filter_groups
    count = batch * (groups.max_num_gen_batches if groups.enable else 1)
    ids = draw(list(by_id), config.seed, (iteration - 1) * count, count)
    return _rows(
        run,
        "train",
        "train",
        iteration,
        [by_id[i] for i in ids],
        planned=batch,
        config=config,
        n=config.rollout.n,
        harnesses=[harness_of(config, iteration, s) for s in range(1, shards(config, None) + 1)],
        sampling=config.sampling,
        limits=config.limits,
        policy=f"{run}@{config.sampled(iteration)}",
    )


def eval_table(
    run: str,
    config: RunConfig | EvalConfig,
    tasks: Sequence[Mapping[str, Any]],
    cell: Cell,
    iteration: int | None,
    policy: str,
    cell_id: str | None = None,
) -> list[dict[str, Any]]:
    """The rollout table of an evaluation cell: the first tasks of its split's seeded order, `cell.n` samples each."""
    by_id = _split(tasks, cell.split)
    count = len(by_id) if cell.tasks is None else cell.tasks
    if count > len(by_id):
        raise PlanError(f"cell {cell.name!r} asks for {count} tasks; split {cell.split!r} has {len(by_id)}")
    ids = draw(list(by_id), config.seed, 0, count)
    one_shard = config.model_copy(update={"rollout": config.rollout.model_copy(update={"shards": 1})})
    return _rows(
        run,
        "eval",
        cell_id or cell.name,
        iteration,
        [by_id[i] for i in ids],
        planned=count,
        config=one_shard,
        n=cell.n,
        harnesses=[cell.harness],
        sampling=cell.sampling,
        limits=cell.limits or config.limits,
        policy=policy,
    )
