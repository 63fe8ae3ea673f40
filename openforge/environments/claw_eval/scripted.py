"""Episodes whose agent is a script: what a task's own reference, do-nothing and cheating agents score."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from openforge.environments import EnvCallResult, create_env, llm_args
from openforge.harnesses.scripted import Scripted
from openforge.sandboxes.protocol import Backend

# Scores that a right task gives its agents, by the agents' names: files agents/<name>.sh of its folder.
AGENTS = {"reference": 1.0, "nothing": 0.0, "cheat": 0.0}
NOTHING = "true\n"
SECONDS = 120.0  # of an agent at most, whatever the task allows a model


class Silent:
    """The close of a session that nobody called: a script asks no policy."""

    budget_exhausted = False
    policy_failed: str | None = None

    def conversation(self) -> list[dict[str, Any]]:
        return []


async def play(backend: Backend, task: Mapping[str, Any], script: str, episode_id: str) -> EnvCallResult:
    """One episode of a row of the tasks table in a sandbox of its own; nothing of it is recorded."""
    harness = Scripted()
    sandbox = await backend.create(episode_id, binds=harness.binds())
    limits = {**task["task_limits"], "seconds": min(task["task_limits"]["seconds"] or math.inf, SECONDS)}

    async def close(harness_exited: bool) -> Silent:
        return Silent()

    try:
        return await create_env("claw_eval", sandbox).run(
            task={**task, "sampling": {"max_tokens": 1}},
            llm_args=llm_args(f"http://127.0.0.1:8080/s/{episode_id}", "none", "scripted", 1),
            harness=harness,
            harness_options={"script": script},
            limits=limits,
            session=close,
        )
    finally:
        await sandbox.delete()
