"""Episodes of claw_eval under a real harness, through the real proxy, against the scripted policy mock."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripted_policy import ScriptedPolicy, Turn

from openforge.environments import EnvCallResult, create_env, llm_args
from openforge.environments.claw_eval.folder import make_verifier
from openforge.environments.claw_eval.setup import KEY, Setup
from openforge.harnesses import Harness
from openforge.proxy.client import Summary, start_proxy
from openforge.proxy.lineage import call_rows
from openforge.samples.merge import Merged, merge
from openforge.sandboxes import LocalBackend

SECRET = "sk-of-one-episode-0123456789abcdef"
SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "max_tokens": 4096,
}
# A byte is a token here, and a start prompt has tens of thousands of bytes.
WINDOW = 1_000_000
COMMAND = ("python3", "-I", "verify.py", "{evidence}", "{answer}")


@dataclass
class Played:
    """What an episode left: the environment's result, its calls, their training rows and what is not trained."""

    result: EnvCallResult
    requests: list[dict[str, Any]]
    calls: list[dict[str, Any]]
    rows: list[Merged]
    dropped: dict[str, int]

    def told(self) -> str:
        """The episode in a few lines, for a test that failed."""
        r = self.result
        log = r.harness_log.decode(errors="replace")[-3000:]
        tools = [[t.get("function", {}).get("name") for t in q["tools"] or ()] for q in self.requests[:1]]
        return f"{r.status}: {r.message}; {r.verifier_output}\n{r.dispatches}\n{tools}\n{log}"


async def play(
    backend: LocalBackend,
    harness: Harness,
    script: Sequence[Turn],
    setup: Setup,
    verifier: str,
    journal: Path,
    *,
    instruction: str = "Do the task.",
    options: dict[str, Any] | None = None,
    judge: dict[str, Any] | None = None,
) -> Played:
    """One episode; the verifier is a Python program that gets the evidence's folder and the answer's file."""
    policy = ScriptedPolicy(script)
    await policy.start()
    proxy = await start_proxy(policy.url, journal)
    task = {
        "task_id": "t1",
        "payload": json.dumps({KEY: setup.payload()}),
        "instruction": instruction,
        "files": [{"path": "note.txt", "content": b"a note\n", "mode": 0o644}],
        "verifier": make_verifier(
            "test", COMMAND, [{"path": "verify.py", "content": verifier.encode(), "mode": 0o644}], 60.0
        ),
        "sampling": SAMPLING,
    }
    summary: list[Summary] = []

    async def close(harness_exited: bool) -> Summary:
        summary.append(await proxy.close_session("e1", harness_exited))
        return summary[0]

    try:
        sandbox = await backend.create("e1", binds=harness.binds())
        await proxy.open_session(
            "e1",
            secret=SECRET,
            sampling=SAMPLING,
            limits={"turns": 20, "tokens": None},
            deadline_seconds=180.0,
            policy_version="0@scripted",
            context_window=WINDOW,
        )
        url = await sandbox.route(proxy)
        async with harness.warm(options=options or {}) as warm:
            result = await create_env("claw_eval", sandbox).run(
                task=task,
                llm_args=llm_args(url, SECRET, "policy", WINDOW),
                harness=warm,
                harness_options=options or {},
                limits={"turns": 20, "tokens": None, "seconds": 120.0},
                session=close,
                judge=judge,
            )
        await sandbox.delete()
    finally:
        await proxy.stop()
        await policy.stop()
    assert not backend.sandboxes
    records = summary[0].records
    calls, _ = call_rows(records)
    rows, dropped = merge(calls)
    return Played(result, [r for r in records if r["record"] == "call"], calls, rows, dict(dropped))
