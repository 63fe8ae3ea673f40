"""Scripted agents of a task folder: `agents/NAME.sh`, run in the agent's place to check the task and its verifier.

They stand in the row's payload, so that an evaluation can show them beside a policy: `reference` solves the task and
scores 1, `nothing` does nothing and `cheat` tries to be paid for nothing, and both score 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

KEY = "openforge_agents"  # of the payload
NAMES = ("reference", "nothing", "cheat")
# What an agent does whose task has no script for it; a task must bring the others itself.
_DEFAULT = {"nothing": "true\n"}


class AgentError(ValueError):
    """A task without the scripted agent that is asked for; one sentence."""


def with_agents(payload: str, path: Path) -> str:
    """A payload with the agents of the task folder at `path`; the same where it has none."""
    found = {f.stem: f.read_text() for f in sorted((path / "agents").glob("*.sh")) if f.stem in NAMES}
    if not found:
        return payload
    return json.dumps({**json.loads(payload), KEY: found}, ensure_ascii=False, sort_keys=True)


def script(task: Mapping[str, Any], agent: str) -> str:
    """The shell script of a task's agent.

    Raises:
        AgentError: the task has none.
    """
    data = json.loads(task["payload"])
    own = data.get(KEY, {}) if isinstance(data, dict) else {}
    found = own.get(agent, _DEFAULT.get(agent))
    if found is None:
        raise AgentError(
            f"task {task['task_id']!r} has no scripted agent {agent!r}; its folder must hold agents/{agent}.sh"
        )
    return str(found)
