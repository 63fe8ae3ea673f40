"""A shard over real sandboxes and the real proxy; its harness is a shell script, its policy server a stub."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stub_harness import StubHarness

from openforge import tables
from openforge.config_sandbox import Artifacts, Sandbox
from openforge.environments.claw_eval.folder import make_verifier
from openforge.harnesses import Context
from openforge.policy.lease import Endpoint
from openforge.proxy.client import KeptProxy, start_proxy
from openforge.rollout import engine
from openforge.rollout.gate import Gate
from openforge.rollout.machine import Machine
from openforge.rollout.partial import Partial
from openforge.rollout.progress import Progress
from openforge.rollout.rows import Book, evidence
from openforge.sandboxes import Backend

# Asks the policy and writes its answer to said.txt; python3 is the sandbox's.
ASK = """
cat > ask.py <<'PY'
import json, os, sys, urllib.request
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": sys.argv[1]}]}).encode()
head = {"authorization": "Bearer " + os.environ["KEY"], "content-type": "application/json"}
url = os.environ["BASE"] + "/v1/chat/completions"
answer = json.load(urllib.request.urlopen(urllib.request.Request(url, body, head)))
open("said.txt", "w").write(answer["choices"][0]["message"]["content"])
PY
python3 ask.py hello || exit 3
rm ask.py
"""
PASSES = """
import json, os
said = open("/workspace/said.txt").read() if os.path.exists("/workspace/said.txt") else ""
print(json.dumps({"score": float(said == "yes"), "passed": said == "yes"}))
"""


class Agent(StubHarness):
    """The stub with a way to the policy."""

    def env(self, ctx: Context) -> dict[str, str]:
        return {"KEY": ctx.api_key, "BASE": ctx.base_url}


def row(
    name: str, agent: str = ASK, verifier: str = PASSES, verifier_seconds: float = 30.0, **over: Any
) -> dict[str, Any]:
    files = [{"path": "verify.py", "content": verifier.encode(), "mode": 0o644}]
    return {
        "rollout_id": name,
        "group_id": "g",
        "reserve": False,
        "task_id": "t",
        "environment": "claw_eval",
        "split": "train",
        "instruction": agent,
        "payload": "{}",
        "judge": None,
        "files": [],
        "verifier": make_verifier("v", ["python3", "-I", "verify.py"], files, verifier_seconds),
        "tags": ["kind"],
        "sample": 0,
        "purpose": "train",
        "cell": "train",
        "iteration": 1,
        "benchmark": "b",
        "orchestrator": "local",
        "image": "host",
        "network": "proxy",
        "grading": "same",
        "harness": "stub",
        "harness_options": "{}",
        "limits": {"turns": 2, "tokens": None, "seconds": 30.0},
        "sampling": dict.fromkeys(tables.SAMPLING.names, None) | {"temperature": 1.0, "top_p": 1.0, "max_tokens": 16},
    } | over


PARTIAL = Path("partial/train-train-0001/0001")  # of the shard, below its run


Make = Callable[..., engine.Shard]


def make_shard(
    folder: Path, url: str, proxy: KeptProxy, backend: Backend, rows: Sequence[dict[str, Any]], **over: Any
) -> engine.Shard:
    """A shard of some rows, as rollout.shard puts it together; made again it is the rerun of a dead one."""
    endpoint = Endpoint(f"{url}/v1", "", "policy", 4096, "0@abc")
    progress = Progress(len(rows), lambda line: None)
    given: dict[str, Any] = {
        "book": Book(rows, "1", "0@abc", 0, "artifacts/shard=0001.zip"),
        "partial": Partial(folder, "d"),
        "proxy": proxy,
        "endpoint": endpoint,
        "gate": Gate(endpoint, 30.0, progress),
        "machine": Machine([folder], reserve=1 << 20),
        "backend": backend,
        "harness": Agent(),
        "concurrency": 4,
        "attempts": 2,
        "sandbox": Sandbox(artifacts=Artifacts(keep="none")),
        "progress": progress,
    }
    return engine.Shard(**(given | over))


def make_proxy(folder: Path, url: str) -> KeptProxy:
    """Its proxy: doubts a policy server after 0.2 s of silence, and waits half a second for one token."""
    return KeptProxy(lambda: start_proxy(url, folder / "d" / "journal", patience_seconds=0.2, probe_seconds=0.5))


async def rows_of(shard: engine.Shard) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    await shard.run()
    episodes = shard.book.finished(shard.partial)
    calls, _ = evidence(episodes, shard.partial)
    # The declared tables take them as they are.
    tables.EPISODES.arrow(episodes)
    tables.CALLS.arrow(calls)
    return episodes, calls
