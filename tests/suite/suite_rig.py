"""The suite's agents as a harness, and one episode of a task with one of them."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from stub_harness import End, StubHarness

from openforge.environments import EnvCallResult, create_env, llm_args
from openforge.environments.claw_eval.folder import read_folder
from openforge.harnesses import Context
from openforge.sandboxes import LocalBackend, Sandbox

ROOT = Path(__file__).resolve().parent.parent.parent
SUITE = ROOT / "suites" / "openforge_claw"
FOLDERS = sorted(p.parent for p in SUITE.glob("*/task.yaml"))
SCORES = {"reference": 1.0, "nothing": 0.0, "cheat": 0.0}


class ScriptHarness(StubHarness):
    """A stub: its agent is the shell script of its options, whatever it is asked."""

    def files(self, ctx: Context) -> dict[str, bytes]:
        return {"task.sh": ctx.options["script"].encode()}


@cache
def row(folder: Path) -> Mapping[str, Any]:
    return read_folder(folder)


async def play(
    backend: LocalBackend,
    folder: Path,
    script: str,
    episode: str,
    look: Callable[[Sandbox], Awaitable[None]] | None = None,
) -> EnvCallResult:
    """One episode of a task whose agent is a shell script; `look` sees the sandbox once it is over."""
    harness = ScriptHarness()
    sandbox = await backend.create(episode, binds=harness.binds())
    task = row(folder)

    async def close(harness_exited: bool) -> End:
        return End()

    try:
        result = await create_env("claw_eval", sandbox).run(
            task={**task, "sampling": {"max_tokens": 16}},
            llm_args=llm_args(f"http://127.0.0.1:8080/s/{episode}", "key", "policy", 2048),
            harness=harness,
            harness_options={"script": script},
            limits=task["task_limits"],
            session=close,
        )
        if look is not None:
            await look(sandbox)
        return result
    finally:
        await sandbox.delete()


def verdict(result: EnvCallResult) -> dict[str, Any]:
    """What the verifier said of an episode that came to its end."""
    assert result.status == "completed", (result.status, result.message, result.harness_log.decode())
    assert result.verifier_output is not None
    found: dict[str, Any] = json.loads(result.verifier_output)
    return found


def script(folder: Path, agent: str) -> str:
    """One of a task's scripted agents."""
    return (folder / "agents" / f"{agent}.sh").read_text()
