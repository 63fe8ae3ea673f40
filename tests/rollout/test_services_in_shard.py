"""Episodes with services in a shard: what the rows keep of them, and which end a failing service is."""

from __future__ import annotations

import json
from typing import Any

from proxy_stub import StubUpstream
from service_setup import MAIL, service, setup
from shard_rig import ASK, Make, row, rows_of

from openforge.environments.claw_eval.setup import KEY, Setup


def needs(setup: Setup, agent: str, **over: Any) -> dict[str, Any]:
    return row("a", agent, payload=json.dumps({KEY: setup.payload()}), **over)


CALLS = ASK + "tool mail_add '{\"text\": \"hello\"}'; tool mail_add '{}' || true\n"


async def test_dispatches_and_audit_stand_in_the_row_and_outlive_the_job(make: Make, upstream: StubUpstream) -> None:
    upstream.says("yes")
    shard = make(needs(setup(), CALLS))
    (e,), _ = await rows_of(shard)
    assert e["status"] == "completed", e["message"]
    assert [(d["tool"], d["status"]) for d in e["dispatches"]] == [("mail_add", 200), ("mail_add", 400)]
    assert json.loads(e["audit"])["mail"]["items"] == ["first", "hello"]
    assert (e["user_rounds"], e["snapshot"]) == (0, None)
    # Read back from the records, as a rerun reads it.
    (again,), _ = await rows_of(make(needs(setup(), CALLS)))
    assert again == e


async def test_a_service_that_never_starts_and_one_that_dies_are_infrastructure(
    make: Make, upstream: StubUpstream
) -> None:
    upstream.says("yes")
    dies = needs(setup(service("mail", MAIL, "dies")), ASK)
    crashed = needs(setup(), ASK + "tool mail_crash; true\n") | {"rollout_id": "b"}
    episodes, _ = await rows_of(make(dies, crashed))
    ends = [(e["rollout_id"], e["attempt"], e["status"]) for e in episodes]
    assert ends == [("a", n, "setup_failed") for n in (0, 1)] + [("b", n, "sandbox_lost") for n in (0, 1)]
    assert all(e["verifier_output"] is None and "service 'mail' ended with exit code" in e["message"] for e in episodes)
