"""Episodes of a real harness in real sandboxes, through the real proxy, against the scripted policy mock."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripted_policy import ScriptedPolicy, Turn

from openforge.harnesses import Context, Ended, Harness, Output
from openforge.proxy.client import Proxy, start_proxy
from openforge.proxy.lineage import call_rows
from openforge.samples.merge import Merged, merge
from openforge.sandboxes import LocalBackend, LocalSandbox

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
NOTE = "what the note says"


@dataclass
class Episode:
    """What an episode left: how the harness ended, its calls and their rows, and the sandbox, still there.

    Attributes:
        requests: the proxy's records of the calls.
        calls: rows of the calls table.
        rows: training rows.
        dropped: how many calls are not trained, by reason.
    """

    ended: Ended
    output: Output
    version: str
    requests: list[dict[str, Any]]
    calls: list[dict[str, Any]]
    rows: list[Merged]
    dropped: Counter[str]
    sandbox: LocalSandbox

    def told(self) -> str:
        """The episode in a few lines, for a test that failed."""
        keys = ("call", "dialect", "parent", "trainable", "reason", "delivery")
        calls = "\n".join(json.dumps({k: c[k] for k in keys}) for c in self.calls)
        log = self.ended.log.decode(errors="replace")[-3000:]
        return f"exit code {self.ended.exit_code}, {self.output}\n{calls}\n{log}"


async def play(
    backend: LocalBackend,
    harness: Harness,
    script: Sequence[Turn],
    context: Any,
    journal: Path,
    episodes: int = 1,
    aside: str | None = None,
    budget: int = 20,
    **over: Any,
) -> list[Episode]:
    """Play so many episodes of one group, side by side, with a budget of turns; keywords go into the Context."""
    policy = ScriptedPolicy(script, aside)
    await policy.start()
    proxy = await start_proxy(policy.url, journal)
    try:
        runs = (_episode(f"e{i}", backend, harness, proxy, context, budget, over) for i in range(episodes))
        return await asyncio.gather(*runs)
    finally:
        await proxy.stop()
        await policy.stop()


async def _episode(
    name: str, backend: LocalBackend, harness: Harness, proxy: Proxy, context: Any, budget: int, over: dict[str, Any]
) -> Episode:
    sandbox = await backend.create(name, binds=harness.binds())
    version = await harness.place(sandbox)
    await sandbox.upload_content(f"{NOTE}\n".encode(), "note.txt")
    await proxy.open_session(
        name,
        secret=SECRET,
        sampling=SAMPLING,
        limits={"turns": budget, "tokens": None},
        deadline_seconds=120.0,
        policy_version="0@scripted",
        context_window=WINDOW,
    )
    url = await sandbox.route(proxy)
    given = {"base_url": url, "api_key": SECRET, "context_window": WINDOW, "max_tokens": 4096, "turns": 5, **over}
    ctx: Context = context(**given)
    ended = await harness.run(sandbox, ctx)
    summary = await proxy.close_session(name, harness_exited=not ended.timed_out)
    await sandbox.end_processes()
    output = await harness.output(sandbox, ctx, ended)
    calls, _ = call_rows(summary.records)
    rows, dropped = merge(calls)
    requests = [r for r in summary.records if r["record"] == "call"]
    return Episode(ended, output, version, requests, calls, rows, dropped, sandbox)
