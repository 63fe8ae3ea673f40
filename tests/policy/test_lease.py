"""Leases against a stub server (stub_vllm.py): who shares, who waits, and what ends when somebody dies."""

import os
import signal

import httpx
import pytest
from policy_rig import Stub, until

from openforge.config import Server
from openforge.policy import process
from openforge.policy.keeper import ask_for_room
from openforge.policy.lease import PolicyMismatch, ServerError, lease
from openforge.policy.state import places


def take(stub: Stub, policy: str, cfg: Server | None = None):
    return lease(
        cfg or Server(),
        stub.policy(policy),
        f"{policy}@0",
        state_dir=stub.state,
        job="test",
        root=stub.root,
        progress=lambda _: None,
    )


@pytest.fixture(autouse=True)
def owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENFORGE_OWNER", str(process.this()))


def test_endpoint_serves_the_policy_and_a_second_policy_is_swapped_in(stub: Stub) -> None:
    for name in ("a", "b"):
        with take(stub, name) as endpoint:
            headers = {"Authorization": f"Bearer {endpoint.api_key}"}
            served = httpx.get(f"{endpoint.base_url}/models", headers=headers).json()["served"]
            assert served == str(stub.policy(name))
            assert (endpoint.model, endpoint.context_window, endpoint.policy_version) == ("policy", 2048, f"{name}@0")
            assert httpx.get(f"{endpoint.base_url}/models").status_code == 401
    assert stub.log() == ["start a", "reload b"]


def test_same_policy_is_shared_and_another_waits_until_the_last_lease_is_gone(stub: Stub) -> None:
    first, second = stub.job("a", "first"), stub.job("a", "second")
    assert first.leased() == second.leased()
    other = stub.job("b", "other")
    assert other.says().endswith("holds the server with policy a@0")
    first.end()
    second.process.kill()  # kill -9: the lease ends with the process
    other.leased()
    assert stub.log() == ["start a", "reload b"]


def test_waiting_jobs_are_served_in_order_of_arrival(stub: Stub) -> None:
    first = stub.job("a", "first")
    first.leased()
    swap = stub.job("b", "swap")
    assert swap.says() == "waiting for the policy: first holds the server with policy a@0"
    late = stub.job("a", "late")
    assert late.says() == "waiting for the policy: jobs that came earlier wait for another policy"
    first.end()
    swap.leased()
    assert late.says() == "waiting for the policy: swap holds the server with policy b@0"
    swap.end()
    late.leased()
    assert stub.log() == ["start a", "reload b", "reload a"]


def test_a_job_may_take_a_second_lease_past_the_queue_that_waits_for_it(stub: Stub) -> None:
    with take(stub, "a") as one:
        other = stub.job("b")
        other.says()
        with take(stub, "a") as two:
            assert one == two
    other.leased()


def test_two_jobs_that_start_at_once_share_one_keeper(stub: Stub) -> None:
    stub.policy("a", "held")
    jobs = [stub.job("a", f"job{i}") for i in range(3)]
    until(lambda: stub.log() == ["start a"], "a start")
    (stub.policy("a") / "held").unlink()
    assert len({j.leased() for j in jobs}) == 1
    assert stub.log() == ["start a"]


def test_warm_server_ends_with_its_owner_but_not_under_a_lease(stub: Stub) -> None:
    owner = stub.owner()
    job = stub.job("a", owner=owner)
    job.leased()
    keeper, server = stub.record()
    stub.end_owner()
    late = stub.job("a", owner=owner)  # the keeper still serves while there is a lease
    late.leased()
    job.end()
    late.end()
    until(lambda: not process.alive(keeper), "the keeper's end")
    assert not process.session_of(server)
    assert places(stub.state) == []


def test_owner_that_dies_while_its_server_starts_ends_it(stub: Stub) -> None:
    stub.policy("a", "held")
    job = stub.job("a", owner=stub.owner())
    until(lambda: stub.log() == ["start a"], "a start")
    keeper, server = stub.record()
    job.process.kill()
    stub.end_owner()
    until(lambda: not process.alive(keeper) and not process.session_of(server), "the end of both")


@pytest.mark.parametrize("mark", ["", "stubborn"])
def test_killed_keeper_is_replaced_and_its_server_ended(stub: Stub, mark: str) -> None:
    stub.policy("a", *filter(None, [mark]))
    with take(stub, "a"):
        pass
    keeper, server = stub.record()
    os.kill(keeper.pid, signal.SIGKILL)
    if not mark:
        until(lambda: not process.alive(server), "the server's end by the kernel's signal, with no job to look")
    (stub.policy("a") / "stubborn").unlink(missing_ok=True)
    with take(stub, "a"):
        assert not process.alive(server)
        assert stub.record()[1] != server
    assert stub.log() == ["start a", "start a"]


def test_dead_server_is_started_anew_by_the_next_lease(stub: Stub) -> None:
    with take(stub, "a") as one:
        keeper, server = stub.record()
    os.kill(server.pid, signal.SIGKILL)
    with take(stub, "a") as two:
        assert two.api_key != one.api_key
        assert stub.record()[0] == keeper
    assert stub.log() == ["start a", "start a"]


def test_stale_weights_are_a_mismatch_and_the_server_is_not_used_again(stub: Stub) -> None:
    with take(stub, "a"):
        _, server = stub.record()
    stub.policy("b", "stale")
    # ord("b") - ord("a") = 1: the difference of the two probes
    with pytest.raises(PolicyMismatch, match=r"policy b@0 .* differ from the checkpoint's by 1 "), take(stub, "b"):
        pass
    assert not process.alive(server)
    with take(stub, "a"):
        pass
    assert stub.log() == ["start a", "reload b", "start a"]


def test_folder_that_is_no_policy_is_refused(stub: Stub) -> None:
    (stub.policy("a") / "config.json").unlink()
    with pytest.raises(ServerError, match=r"a policy folder with config\.json is needed"), take(stub, "a"):
        pass


def test_policy_without_a_probe_is_refused(stub: Stub) -> None:
    (stub.policy("a") / "probe.json").unlink()
    with pytest.raises(PolicyMismatch, match=r"probe\.json is missing"), take(stub, "a"):
        pass


def test_server_that_dies_tells_its_last_words(stub: Stub) -> None:
    stub.policy("a", "dies")
    with pytest.raises(ServerError, match=r"died \(exit code 3\)(?s:.*)the stub dies as told"), take(stub, "a"):
        pass


def test_server_that_is_not_healthy_in_time_is_ended(stub: Stub) -> None:
    stub.policy("a", "held")
    cfg = Server(start_seconds=0.5)
    with pytest.raises(ServerError, match=r"not healthy within 0\.5 s"), take(stub, "a", cfg):
        pass
    pid = int(stub.events.read_text().split()[-1])
    assert process.identity(pid) is None


def test_server_that_is_not_warm_ends_with_its_job_even_when_that_fails(stub: Stub) -> None:
    with pytest.raises(ZeroDivisionError), take(stub, "a", Server(warm=False)):
        keeper, server = stub.record()
        raise ZeroDivisionError
    assert not process.alive(keeper) and not process.alive(server)
    assert places(stub.state) == []


def test_room_is_made_by_idle_servers_of_the_same_owner_only(stub: Stub) -> None:
    me, stranger = process.this(), stub.owner()
    with take(stub, "a"):
        assert not ask_for_room(stub.place(), {me})
    keeper, server = stub.record()
    assert not ask_for_room(stub.place(), {stranger})
    assert process.alive(keeper)
    assert ask_for_room(stub.place(), {stranger, me})
    until(lambda: not process.alive(keeper) and not process.alive(server), "the end of the idle server")


def test_attached_endpoint_is_used_as_it_is(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    with take(stub, "a") as own:
        monkeypatch.setenv("ENDPOINT_KEY", own.api_key)
        cfg = Server(url=own.base_url + "/", api_key_env="ENDPOINT_KEY")
        with lease(cfg, None, "foreign", state_dir=stub.state, job="eval") as endpoint:
            assert endpoint.base_url == own.base_url
            assert (endpoint.api_key, endpoint.model) == (own.api_key, "policy")
            assert (endpoint.context_window, endpoint.policy_version) == (777, "foreign")
        monkeypatch.setenv("ENDPOINT_KEY", "wrong")
        refused = lease(cfg, None, "foreign", state_dir=stub.state, job="eval")
        with pytest.raises(ServerError, match="ENDPOINT_KEY"), refused:
            pass
    assert stub.log() == ["start a"]
