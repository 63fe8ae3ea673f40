"""The suite's folders, their rows and agents, and what a verifier said."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from openforge.environments import EnvCallResult
from openforge.environments.claw_eval.folder import read_folder

SUITE = Path(__file__).resolve().parent.parent.parent / "suites" / "openforge_claw"
FOLDERS = sorted(p.parent for p in SUITE.glob("*/task.yaml"))


@cache
def row(folder: Path) -> Mapping[str, Any]:
    return read_folder(folder)


def script(folder: Path, agent: str) -> str:
    """One of a task's scripted agents."""
    return (folder / "agents" / f"{agent}.sh").read_text()


def verdict(result: EnvCallResult) -> dict[str, Any]:
    """What the verifier said of an episode that came to its end."""
    assert result.status == "completed", (result.status, result.message, result.harness_log.decode())
    assert result.verifier_output is not None
    found: dict[str, Any] = json.loads(result.verifier_output)
    return found
