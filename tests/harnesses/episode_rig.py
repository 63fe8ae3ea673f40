"""One episode of a real harness in a real sandbox, through the real proxy, against the scripted policy mock."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripted_policy import ScriptedPolicy, Turn

from openforge.harnesses import Context, Ended, Harness, Output
from openforge.proxy.client import start_proxy
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


@dataclass
class Episode:
    """What an episode left: how the harness ended, its calls and their rows, and the sandbox, still there.

    Attributes:
        calls: rows of the calls table.
        rows: training rows.
        dropped: how many calls are not trained, by reason.
        requests: what the policy was asked.
    """

    ended: Ended
    output: Output
    version: str
    calls: list[dict[str, Any]]
    rows: list[Merged]
    dropped: Counter[str]
    requests: list[dict[str, Any]]
    sandbox: LocalSandbox


async def play(
    backend: LocalBackend,
    harness: Harness,
    script: Sequence[Turn],
    context: Any,
    journal: Path,
    files: dict[str, bytes] | None = None,
    **over: Any,
) -> Episode:
    """Play one episode; keywords go into the harness's Context."""
    policy = ScriptedPolicy(script)
    await policy.start()
    proxy = await start_proxy(policy.url, journal)
    try:
        sandbox = await backend.create("e1", binds=harness.binds())
        version = await harness.place(sandbox)
        await sandbox.upload_contents([(name, data, 0o644) for name, data in (files or {}).items()])
        await proxy.open_session(
            "e1",
            secret=SECRET,
            sampling=SAMPLING,
            limits={"turns": 20, "tokens": None},
            deadline_seconds=120.0,
            policy_version="0@scripted",
            context_window=WINDOW,
        )
        url = await sandbox.route(proxy)
        given = {"base_url": url, "api_key": SECRET, "context_window": WINDOW, "max_tokens": 4096, "turns": 5, **over}
        ctx: Context = context(**given)
        ended = await harness.run(sandbox, ctx)
        summary = await proxy.close_session("e1", harness_exited=not ended.timed_out)
        await sandbox.end_processes()
        output = await harness.output(sandbox, ctx, ended)
        calls, _ = call_rows(summary.records)
        rows, dropped = merge(calls)
        return Episode(ended, output, version, calls, rows, dropped, policy.bodies, sandbox)
    finally:
        await proxy.stop()
        await policy.stop()


def told(episode: Episode) -> str:
    """The episode in a few lines, for a test that failed."""
    calls = [{k: c[k] for k in ("call", "dialect", "parent", "trainable", "reason", "delivery")} for c in episode.calls]
    log = episode.ended.log.decode(errors="replace")[-3000:]
    return f"exit code {episode.ended.exit_code}, {episode.output}\n{json.dumps(calls, indent=1)}\n{log}"
