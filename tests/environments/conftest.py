from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from stub_harness import End, StubHarness

from openforge.environments import EnvCallResult, create_env, llm_args
from openforge.environments.claw_eval.folder import make_verifier
from openforge.environments.claw_eval.setup import KEY, Setup
from openforge.sandboxes import LocalBackend, Owner


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[LocalBackend]:
    async with LocalBackend(tmp_path / "sandboxes", "test", Owner.current()) as one:
        yield one


@pytest.fixture
def episode(backend: LocalBackend) -> Any:
    """Runs one episode: the agent is a script, the verifier a Python program. The sandbox is its `.sandbox`."""

    async def run(
        agent: str,
        verifier: str,
        *,
        command: tuple[str, ...] = ("python3", "-I", "verify.py"),
        files: dict[str, str] | None = None,
        expected: str = "",
        seconds: float = 30.0,
        verifier_seconds: float = 30.0,
        end: End | None = None,
        setup: Setup | None = None,
        grader: dict[str, str] | None = None,
        judge: dict[str, Any] | None = None,
        harness: StubHarness | None = None,
    ) -> EnvCallResult:
        harness = harness or StubHarness()
        sandbox = await backend.create("e1", binds=harness.binds())
        judging = {"verify.py": verifier, "expected.txt": expected, **(grader or {})}
        task = {
            "task_id": "t1",
            "payload": json.dumps({KEY: setup.payload()} if setup is not None else {}),
            "instruction": agent,
            "files": _files(files or {}),
            "verifier": make_verifier("test", command, _files(judging), verifier_seconds),
            "sampling": {"max_tokens": 16},
        }
        exits: list[bool] = []

        async def close(harness_exited: bool) -> End:
            exits.append(harness_exited)
            return end or End()

        result = await create_env("claw_eval", sandbox).run(
            task=task,
            llm_args=llm_args("http://127.0.0.1:8080/s/e1", "key", "policy", 2048),
            harness=harness,
            harness_options={},
            limits={"turns": 3, "tokens": None, "seconds": seconds},
            session=close,
            judge=judge,
        )
        assert len(exits) == (result.status != "unsupported")
        result.sandbox, result.exited = sandbox, exits[0] if exits else None  # type: ignore[attr-defined]
        return result

    return run


def _files(texts: dict[str, str]) -> list[dict[str, Any]]:
    return [{"path": p, "content": t.encode(), "mode": 0o644} for p, t in texts.items()]
