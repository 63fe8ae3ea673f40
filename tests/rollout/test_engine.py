"""The rollout engine over real sandboxes and the real proxy. The harness is a stub (a shell script that calls the
policy once or more), and so is the policy server; what is tested is what becomes of each episode."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from proxy_stub import StubUpstream
from shard_rig import ASK, Make, row, rows_of

from openforge import tables
from openforge.proxy.lineage import prompt_ids


async def test_an_episode_is_recorded_with_its_verdict(make: Make, upstream: StubUpstream) -> None:
    upstream.says("yes")
    episodes, calls = await rows_of(make(row("a")))
    (e,) = episodes
    assert (e["status"], e["final"], e["turns"], e["attempt"]) == ("completed", True, 1, 0)
    assert e["episode_id"] == tables.episode_id("a", 0) and '"passed": true' in e["verifier_output"]
    assert e["seconds"]["total"] >= e["seconds"]["agent"] > 0 and "caps none" in e["isolation"]
    (c,) = calls
    # The stub's tokenizer: one id a byte and 257 at the end.
    assert c["response_token_ids"] == [*b"yes", 257] and c["trainable"] and c["delivery"] == "confirmed"
    assert bytes(i for i in prompt_ids(calls, 0) if i < 256).endswith(b"user\nhelloassistant\n")


async def test_a_wrong_answer_is_a_reward_of_0_and_final(make: Make, upstream: StubUpstream) -> None:
    upstream.says("no")
    (e,), _ = await rows_of(make(row("a")))
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
    make: Make, upstream: StubUpstream, change: dict[str, Any], status: str
) -> None:
    upstream.says("yes")
    episodes, _ = await rows_of(make(row("a", **change)))
    assert [(e["status"], e["final"]) for e in episodes] == [(status, True)]
    assert '"passed": true' in episodes[0]["verifier_output"]


@pytest.mark.parametrize(
    ("verifier", "status"),
    [("raise SystemExit(5)", "verifier_failed"), ("print('fine')", "verifier_failed")],
)
async def test_an_infrastructure_failure_is_tried_again_and_has_no_verdict(
    make: Make, verifier: str, status: str
) -> None:
    episodes, _ = await rows_of(make(row("a", verifier=verifier)))
    assert [(e["attempt"], e["status"], e["final"]) for e in episodes] == [(0, status, False), (1, status, True)]
    assert all(e["verifier_output"] is None and e["message"] for e in episodes)


async def test_a_rerun_runs_only_what_had_not_ended(make: Make, upstream: StubUpstream) -> None:
    upstream.says("yes")
    first = make(row("a"))
    await first.run()
    # The job dies here, with b started and never ended.
    first.partial.start("b", 0, datetime.now(UTC))
    asked = len(upstream.bodies)
    upstream.says("yes")
    episodes, calls = await rows_of(make(row("a"), row("b")))
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
    assert list((tmp_path / "sandboxes").iterdir()) == []
    assert (shard.progress.done, shard.progress.running) == (6, 0)
