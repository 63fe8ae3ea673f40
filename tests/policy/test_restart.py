"""A server that dies or hangs under a lease (the stub; its keeper runs in a thread), and a port that is taken."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Iterator

import httpx
import pytest
from policy_rig import Stub, kept, until

from openforge.config import Server as ServerConfig
from openforge.policy import keeper as keeping
from openforge.policy import process, server
from openforge.policy.lease import Endpoint, lease
from openforge.policy.server import Server


@pytest.fixture
def endpoint(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    """A lease of policy a, from a keeper that looks often."""
    for name, seconds in {"BEAT_SECONDS": 0.05, "WATCH_SECONDS": 0.05, "HEARTBEAT_SECONDS": 0.5, "TICK": 0.05}.items():
        monkeypatch.setattr(keeping, name, seconds)
    owner = stub.owner()
    monkeypatch.setenv("OPENFORGE_OWNER", str(owner))
    with kept(ServerConfig(), stub.policy("a"), stub.state, stub.root, owner) as (one, keeper):
        stub.keeper = keeper
        yield one


def answers(endpoint: Endpoint) -> bool:
    """Whether the policy answers where the lease says, to the lease's key."""
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    body = {"prompt": ".", "max_tokens": 1}
    try:
        answer = httpx.post(f"{endpoint.base_url}/completions", json=body, headers=headers, timeout=1)
        known = httpx.get(f"{endpoint.base_url}/models", headers=headers, timeout=1)
    except httpx.HTTPError:
        return False
    return answer.status_code == known.status_code == 200


def kill(stub: Stub) -> None:
    """Kill the server, and return when its keeper has another and looks after it again."""
    before = stub.record()[1]
    os.kill(before.pid, signal.SIGKILL)
    until(lambda: (s := stub.keeper.server) is not None and s.identity != before, "another server")


@pytest.mark.parametrize(
    "break_it",
    [
        lambda stub: os.kill(stub.record()[1].pid, signal.SIGKILL),
        lambda stub: (stub.policy("a") / "hung").touch(),
    ],
    ids=["killed", "hung"],
)
def test_a_broken_server_comes_back_under_its_lease(
    stub: Stub, endpoint: Endpoint, break_it: Callable[[Stub], None]
) -> None:
    before = stub.record()[1]
    break_it(stub)
    until(lambda: stub.log() == ["start a", "start a"], "a restart")
    until(lambda: answers(endpoint), "an answer at the same address")
    assert not process.alive(before) and stub.record()[1] != before


def test_a_server_that_says_its_engine_is_dead_is_started_again(stub: Stub, endpoint: Endpoint) -> None:
    (stub.policy("a") / "held").touch()  # /health is 503 from here on
    until(lambda: stub.log() == ["start a", "start a"], "a restart")
    (stub.policy("a") / "held").unlink()
    until(lambda: answers(endpoint), "an answer at the same address")


def test_the_lease_is_told_and_ends_after_three_restarts_without_progress(stub: Stub, endpoint: Endpoint) -> None:
    link, told = endpoint.link, list[str]()
    assert link is not None
    for _ in range(2):
        kill(stub)
    until(lambda: answers(endpoint), "the second restart")
    link.progress()
    until(lambda: stub.keeper.restarts == 0, "the word of progress")
    kill(stub)  # the first that counts
    until(lambda: answers(endpoint), "the third restart")
    (stub.policy("a") / "dies").touch()
    os.kill(stub.record()[1].pid, signal.SIGKILL)
    lost = asyncio.run(asyncio.wait_for(link.listen(told.append), 30))
    assert lost.startswith("the policy server was lost after 3 restarts without progress: ")
    assert "the stub dies as told" in lost and lost.count("the stub dies as told") <= 3
    assert len(told) == 5 and told[0] == "it died (exit code -9)"


def test_a_keeper_that_is_gone_ends_the_lease(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENFORGE_OWNER", str(process.this()))
    with lease(ServerConfig(), stub.policy("a"), "a@0", state_dir=stub.state, job="j", root=stub.root) as endpoint:
        os.kill(stub.record()[0].pid, signal.SIGKILL)
        assert endpoint.link is not None
        lost = asyncio.run(asyncio.wait_for(endpoint.link.listen(print), 30))
    assert lost == "the keeper of the policy server is gone, and the server with it"


def test_a_port_that_was_taken_meanwhile_is_tried_elsewhere(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken, free = other.getsockname()[1], server.free_port()
        ports = iter([taken, free])
        monkeypatch.setattr(server, "free_port", lambda: next(ports))
        log = stub.state / "log"
        one = Server.start(ServerConfig(), stub.policy("a"), "a@0", log=log, root=stub.root)
        try:
            assert one.port == free and one.healthy()
            assert "Address already in use" in log.read_text()
        finally:
            one.stop()
