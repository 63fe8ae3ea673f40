"""The gate before an attempt, where an endpoint has replicas."""

from __future__ import annotations

import pytest
from proxy_stub import StubUpstream

from openforge.policy.lease import Endpoint, ServerError
from openforge.rollout.gate import Gate
from openforge.rollout.progress import Progress

DEAD = "http://127.0.0.1:9/v1"


async def test_one_replica_that_answers_is_enough() -> None:
    stub = StubUpstream()
    await stub.start()
    progress = Progress(1, lambda line: None, quiet=True)
    try:
        endpoint = Endpoint(DEAD, "", "m", 512, "none@x", replicas=(DEAD, f"{stub.url}/v1"))
        gate = Gate(endpoint, 30.0, progress)
        gate.doubt()
        await gate.passed()
        assert [(b["model"], b["max_tokens"]) for b in stub.bodies] == [("m", 1)]
    finally:
        await stub.stop()
    gate = Gate(endpoint, 0.0, progress)
    gate.doubt()
    with pytest.raises(ServerError, match=r"has not answered for 0 s \(server.start_seconds\): Cannot connect"):
        await gate.passed()
