"""The rollout engine over real sandboxes and the real proxy. The harness is a stub (a shell script that calls the
policy once or more), and so is the policy server; what is tested is what becomes of each episode."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from proxy_stub import StubUpstream
from stub_harness import StubHarness

from openforge import tables
from openforge.environments.claw_eval.folder import make_verifier
from openforge.harnesses import Context
from openforge.policy.lease import Endpoint
from openforge.proxy.client import start_proxy
from openforge.proxy.lineage import prompt_ids
from openforge.rollout import engine
from openforge.rollout.partial import Partial
from openforge.rollout.progress import Progress
from openforge.sandboxes import LocalBackend, Owner

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


def row(name: str, agent: str = ASK, verifier: str = PASSES, **over: Any) -> dict[str, Any]:
    files = [{"path": "verify.py", "content": verifier.encode(), "mode": 0o644}]
    return {
        "rollout_id": name,
        "group_id": "g",
        "task_id": "t",
        "environment": "claw_eval",
        "split": "train",
        "instruction": agent,
        "files": [],
        "verifier": make_verifier("v", ["python3", "-I", "verify.py"], files, 30.0),
        "tags": ["kind"],
        "sample": 0,
        "purpose": "train",
        "cell": "train",
        "iteration": 1,
        "benchmark": "b",
        "network": "proxy",
        "harness": "stub",
        "harness_options": "{}",
        "limits": {"turns": 2, "tokens": None, "seconds": 30.0},
        "sampling": dict.fromkeys(tables.SAMPLING.names, None) | {"temperature": 1.0, "top_p": 1.0, "max_tokens": 16},
    } | over


Make = Callable[..., engine.Shard]


@pytest.fixture
async def upstream() -> AsyncIterator[StubUpstream]:
    stub = StubUpstream()
    await stub.start()
    yield stub
    await stub.stop()


@pytest.fixture
async def make(tmp_path: Path, upstream: StubUpstream) -> AsyncIterator[Make]:
    """A shard of some rows, as rollout.shard puts it together; called again it is the rerun of a dead one."""
    partial = tmp_path / "partial"
    proxy = await start_proxy(upstream.url, partial / "d" / "journal")
    async with LocalBackend(tmp_path / "sandboxes", "r", Owner.current()) as backend:

        def shard(*rows: dict[str, Any], **over: Any) -> engine.Shard:
            given: dict[str, Any] = {
                "partial": Partial(partial, "d"),
                "proxy": proxy,
                "endpoint": Endpoint(f"{upstream.url}/v1", "", "policy", 4096, "0@abc"),
                "backend": backend,
                "harness": Agent(),
                "concurrency": 4,
                "attempts": 2,
                "keep_artifacts": 0,
                "staleness": 0,
                "progress": Progress(len(rows), lambda line: None),
            }
            return engine.Shard(rows=rows, **(given | over))

        yield shard
    await proxy.stop()


async def rows_of(shard: engine.Shard, tmp_path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    await shard.run()
    episodes, calls, _ = engine.finish(shard, tmp_path)
    # The declared tables take them as they are.
    tables.EPISODES.arrow(episodes)
    tables.CALLS.arrow(calls)
    return episodes, calls


async def test_an_episode_is_recorded_with_its_verdict(make: Make, upstream: StubUpstream, tmp_path: Path) -> None:
    upstream.says("yes")
    episodes, calls = await rows_of(make(row("a")), tmp_path)
    (e,) = episodes
    assert (e["status"], e["final"], e["turns"], e["attempt"]) == ("completed", True, 1, 0)
    assert e["episode_id"] == tables.episode_id("a", 0) and '"passed": true' in e["verifier_output"]
    assert e["seconds"]["total"] >= e["seconds"]["agent"] > 0 and "caps none" in e["isolation"]
    (c,) = calls
    # The stub's tokenizer: one id a byte and 257 at the end.
    assert c["response_token_ids"] == [*b"yes", 257] and c["trainable"] and c["delivery"] == "confirmed"
    assert bytes(i for i in prompt_ids(calls, 0) if i < 256).endswith(b"user\nhelloassistant\n")


async def test_a_wrong_answer_is_a_reward_of_0_and_final(make: Make, upstream: StubUpstream, tmp_path: Path) -> None:
    upstream.says("no")
    (e,), _ = await rows_of(make(row("a")), tmp_path)
    assert e["status"] == "completed" and '"score": 0.0' in e["verifier_output"]


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"agent": ASK + "exit 7"}, "agent_error"),
        ({"agent": ASK + "sleep 60", "limits": {"turns": 2, "tokens": None, "seconds": 2.0}}, "agent_timeout"),
        ({"agent": ASK + ASK, "limits": {"turns": 1, "tokens": None, "seconds": 30.0}}, "budget_exhausted"),
    ],
)
async def test_the_agents_own_ends_are_judged_and_not_retried(
    make: Make, upstream: StubUpstream, tmp_path: Path, change: dict[str, Any], status: str
) -> None:
    upstream.says("yes")
    episodes, _ = await rows_of(make(row("a", **change)), tmp_path)
    assert [(e["status"], e["final"]) for e in episodes] == [(status, True)]
    assert '"passed": true' in episodes[0]["verifier_output"]


@pytest.mark.parametrize(
    ("verifier", "status"),
    [("raise SystemExit(5)", "verifier_failed"), ("print('fine')", "verifier_failed")],
)
async def test_an_infrastructure_failure_is_tried_again_and_has_no_verdict(
    make: Make, tmp_path: Path, verifier: str, status: str
) -> None:
    episodes, _ = await rows_of(make(row("a", verifier=verifier)), tmp_path)
    assert [(e["attempt"], e["status"], e["final"]) for e in episodes] == [(0, status, False), (1, status, True)]
    assert all(e["verifier_output"] is None and e["message"] for e in episodes)


async def test_a_sandbox_that_cannot_be_made_is_no_reward(make: Make, tmp_path: Path) -> None:
    (first, last), calls = await rows_of(make(row("a", network="open")), tmp_path)
    assert (first["status"], last["status"], last["final"]) == ("setup_failed", "setup_failed", True)
    assert "open" in last["message"] and calls == []


async def test_a_rerun_runs_only_what_had_not_ended(make: Make, upstream: StubUpstream, tmp_path: Path) -> None:
    upstream.says("yes")
    first = make(row("a"))
    await first.run()
    # The job dies here, with b started and never ended.
    first.partial.start("b", 0, datetime.now(UTC))
    asked = len(upstream.bodies)
    upstream.says("yes")
    episodes, calls = await rows_of(make(row("a"), row("b")), tmp_path)
    assert len(upstream.bodies) == asked + 1
    assert [(e["rollout_id"], e["attempt"], e["status"], e["final"]) for e in episodes] == [
        ("a", 0, "completed", True),
        ("b", 0, "sandbox_lost", False),
        ("b", 1, "completed", True),
    ]
    assert {c["episode_id"] for c in calls} == {tables.episode_id("a", 0), tables.episode_id("b", 1)}


async def test_nothing_of_an_episode_is_left(make: Make, upstream: StubUpstream, tmp_path: Path) -> None:
    shard = make(*(row(f"r{i}") for i in range(6)))
    await shard.run()
    assert shard.backend.sandboxes == {} and list((tmp_path / "sandboxes").iterdir()) == []
    assert (shard.progress.done, shard.progress.running) == (6, 0)
