"""Episodes whose sandboxes are made by a server: ours in a process of its own, and the mock of Orchard.

The mock's pods are sandboxes of this machine: with the host's network they reach the proxy's port as pods of a cluster
reach a public one, and without any they do not.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import mock_orchard
import pytest
from policy_thread import Policy
from proxy_stub import StubUpstream
from served import Served
from shard_rig import ASK, PARTIAL, Agent, make_shard, row, rows_of

from openforge import harnesses
from openforge.config import Cell, EvalConfig, Server, Tasks
from openforge.config_sandbox import Artifacts, Sandbox
from openforge.proxy import public
from openforge.proxy.client import KeptProxy, ProxyError, start_proxy
from openforge.rollout import backends, by_hand, engine, reach
from openforge.rollout.backends import check, make
from openforge.sandboxes import Bind, LocalBackend, LocalSandbox, Owner, SandboxError

ELSEWHERE = {"orchestrator": "orchard"}
TERMS = Sandbox(backend="orchard", artifacts=Artifacts(keep="none"))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "BACK_OFF", 0.01)
    for name in (public.IP, public.PORT, public.BIND, public.SCHEME, public.CERT):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Served]]:
    """Starts our server with some options; its address and key stand in the environment."""
    made: list[Served] = []

    def start(*options: str) -> Served:
        shares = [w for bind in Agent().binds() for w in ("--share", str(bind.host))]
        made.append(Served(tmp_path / "server", "--allow", "127.0.0.1:*", *shares, *options))
        monkeypatch.setenv("SANDBOX_BASE_URL", made[-1].url)
        monkeypatch.setenv("SANDBOX_API_KEY", made[-1].key)
        return made[-1]

    yield start
    for server in made:
        assert server.api.get("/sandboxes").json()["sandboxes"] == []
        server.end()


@contextlib.asynccontextmanager
async def shard_at(
    url: str, tmp_path: Path, upstream: StubUpstream, *rows: dict[str, Any], **over: Any
) -> AsyncIterator[engine.Shard]:
    """A shard whose sandboxes are made at `url`, as rollout.shard puts it together."""
    folder = tmp_path / PARTIAL
    terms = over.setdefault("sandbox", TERMS)
    starter = partial(start_proxy, upstream.url, folder / "d" / "journal")
    proxy = KeptProxy(lambda: reach.start(starter, url))
    backend = make("orchard", terms, tmp_path / "ids", "r", 600.0)
    try:
        yield make_shard(folder, upstream.url, proxy, backend, rows, **over)
    finally:
        await backend.close()
        await proxy.stop()
    assert not list((tmp_path / "ids").glob("*.orchard"))


def ends(episodes: list[dict[str, Any]]) -> list[tuple[str, int, str]]:
    return [(e["rollout_id"], e["attempt"], e["status"]) for e in episodes]


async def listed(server: Served) -> list[str]:
    async with httpx.AsyncClient(base_url=server.url, headers={"X-API-Key": server.key}) as http:
        return [s["sandbox_id"] for s in (await http.get("/sandboxes")).json()["sandboxes"]]


# ---- our server ----------------------------------------------------------------------------------------------------
async def test_episodes_run_through_our_server(
    served: Callable[..., Served], tmp_path: Path, upstream: StubUpstream
) -> None:
    server = served()
    upstream.says("yes", "yes", "yes")
    rows = [row(n, grading=g, **ELSEWHERE) for n, g in (("a", "same"), ("b", "second"), ("c", "same"))]
    terms = TERMS.model_copy(update={"warm": 1})
    async with shard_at(server.url, tmp_path, upstream, *rows, concurrency=2, sandbox=terms) as shard:
        await reach.check(shard.backend, await shard.proxy.get(), rows[0], tmp_path)
        episodes, calls = await rows_of(shard)
        assert await listed(server) == []
    assert ends(episodes) == [(n, 0, "completed") for n in "abc"] and len(calls) == 3
    assert all(json.loads(e["verifier_output"])["passed"] and e["network"] == "proxy" for e in episodes)
    assert all("net" in e["isolation"] and "the episode's proxy" in e["isolation"] for e in episodes)
    assert {c["delivery"] for c in calls} == {"confirmed"}


@pytest.mark.slow
async def test_a_full_server_is_waited_for_and_a_deleted_sandbox_is_run_again(
    served: Callable[..., Served], tmp_path: Path, upstream: StubUpstream
) -> None:
    server = served("--max-sandboxes", "1")
    upstream.hold = asyncio.Event()
    rows = [row("a", **ELSEWHERE), row("b", **ELSEWHERE)]
    async with shard_at(server.url, tmp_path, upstream, *rows, concurrency=2) as shard:
        run = asyncio.create_task(shard.run())
        await upstream.arrived.get()
        (first,) = await listed(server)
        async with httpx.AsyncClient(base_url=server.url, headers={"X-API-Key": server.key}) as http:
            assert (await http.delete(f"/sandboxes/{first}")).is_success
        upstream.hold.set()
        await run
        episodes = shard.book.finished(shard.partial)
        assert shard.progress.waits > 0
    lost = [e for e in episodes if e["status"] == "sandbox_lost"]
    assert len(lost) == 1 and sorted(ends(episodes)) == sorted(
        [*ends(lost), *(("ab"[i], int("ab"[i] == lost[0]["rollout_id"]), "completed") for i in range(2))]
    )


@pytest.mark.slow
def test_one_line_of_the_configuration_makes_an_episode_elsewhere(
    served: Callable[..., Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = served()
    monkeypatch.setitem(harnesses._KINDS, "stub", Agent)
    monkeypatch.delenv("SANDBOX_BASE_URL")
    policy = Policy()
    lines: list[str] = []
    try:
        policy.says("yes")
        config = EvalConfig(
            model="tiny-random",
            tasks=Tasks(source="tiny"),
            cells=(Cell(name=by_hand.CELL),),
            sandbox=Sandbox(backend="orchard", url=server.url),
        )
        # The row was planned for this machine; by hand it is run where the configuration says.
        agent = "echo begins\n" + ASK + "mkdir sub && echo x > sub/kept"
        given = row("a", agent=agent, seed=1, harness_options='{"launch": "fork"}')
        outcome = by_hand.run(
            given, config, None, Server(url=f"{policy.url}/v1"), tmp_path, keep=True, say=lines.append
        )
    finally:
        policy.close()
    assert (outcome.episode["status"], outcome.reward) == ("completed", 1.0), outcome.episode
    assert "harness: begins" in lines
    assert outcome.kept is not None and (outcome.kept / "sub" / "kept").read_text() == "x\n"
    assert (outcome.kept / "said.txt").read_text() == "yes"


async def test_a_server_that_is_not_there_stops_the_shard_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setattr(backends, "CHECK_PATIENCE", 0.2)
    with pytest.raises(SandboxError, match=url):
        await asyncio.wait_for(check("orchard", Sandbox(backend="orchard", url=url), "r", 60.0), 60)


# ---- Orchard's own, as a mock --------------------------------------------------------------------------------------
class Bare(Agent):
    """What it needs is in the image."""

    def binds(self, root: Path | None = None) -> list[Bind]:
        return []


class Pods:
    """Sandboxes of this machine with another network than the mock asks for."""

    def __init__(self, local: LocalBackend, network: Any) -> None:
        self._local, self._network = local, network

    async def create(self, episode_id: str, **asked: Any) -> LocalSandbox:
        return await self._local.create(episode_id, **asked | {"network": self._network})


@contextlib.asynccontextmanager
async def orchard(tmp_path: Path, network: str) -> AsyncIterator[mock_orchard.MockOrchard]:
    async with LocalBackend(tmp_path / "pods", "pods", Owner.current()) as local:
        pods: Any = Pods(local, network)
        async with mock_orchard.serving(pods) as mock:
            yield mock


@pytest.mark.slow
async def test_episodes_run_through_the_mock_of_orchard(
    tmp_path: Path, upstream: StubUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream.says("yes", "yes")
    monkeypatch.setenv("MY_KEY", mock_orchard.KEY)
    async with orchard(tmp_path, "open") as mock:
        terms = Sandbox(
            backend="orchard", url=mock.url, api_key_env="MY_KEY", network_policy=True, artifacts=TERMS.artifacts
        )
        rows = [row(n, image="debian:12", **ELSEWHERE) for n in "ab"]
        async with shard_at(mock.url, tmp_path, upstream, *rows, sandbox=terms, harness=Bare()) as shard:
            await reach.check(shard.backend, await shard.proxy.get(), rows[0], tmp_path)
            episodes, calls = await rows_of(shard)
    assert ends(episodes) == [("a", 0, "completed"), ("b", 0, "completed")] and len(calls) == 2
    assert all(json.loads(e["verifier_output"])["passed"] for e in episodes)
    assert all("Orchard pod of debian:12" in e["isolation"] for e in episodes)


async def test_a_proxy_that_sandboxes_cannot_reach_is_found_before_the_first_episode(
    tmp_path: Path, upstream: StubUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", mock_orchard.KEY)
    async with orchard(tmp_path, "none") as mock:
        terms = Sandbox(backend="orchard", url=mock.url, api_key_env="MY_KEY", network_policy=True)
        given = row("a", image="debian:12", **ELSEWHERE)
        async with shard_at(mock.url, tmp_path, upstream, given, sandbox=terms) as shard:
            proxy = await shard.proxy.get()
            with pytest.raises(reach.Unreachable) as e:
                await reach.check(shard.backend, proxy, given, tmp_path)
    assert str(e.value).startswith(f"a sandbox cannot reach the recording proxy at http://127.0.0.1:{proxy.port}/s/")
    assert "refused" in str(e.value) and f"set {public.IP} and {public.PORT} to an address" in str(e.value)


async def test_episodes_that_outlive_their_sandbox_are_refused_before_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", mock_orchard.KEY)
    async with orchard(tmp_path, "none") as mock:
        terms = Sandbox(backend="orchard", url=mock.url, api_key_env="MY_KEY", ttl_seconds=600.0)
        with pytest.raises(SandboxError, match=r"an episode may take 601 s, but .* deletes a sandbox after 600 s"):
            await check("orchard", terms, "r", 601.0)
        await check("orchard", terms, "r", 599.0)


# ---- where the proxy listens ---------------------------------------------------------------------------------------
class Started:
    """Stands for a proxy; remembers where it was to listen. A taken port is refused as the real one's start is."""

    def __init__(self) -> None:
        self.asked: list[tuple[int | None, int | None]] = []

    async def __call__(self, *, public: public.Public | None = None, port: int | None = None) -> Any:
        self.asked.append((None if public is None else public.port, port))
        if public is not None:
            try:
                socket.create_server((public.host, public.port)).close()
            except OSError as e:
                raise ProxyError(str(e)) from None
        return self


async def test_the_next_free_port_of_a_range_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    # Three ports beside one another, of which the first is another shard's.
    for _ in range(50):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", 0)) as held:
            first = held.getsockname()[1]
            socket.create_server(("127.0.0.1", first + 1)).close()
            env = {
                public.IP: "192.0.2.7",
                public.PORT: f"{first}-{first + 1}",
                public.BIND: f"127.0.0.1:{first}-{first + 1}",
            }
            starter = Started()
            await reach.start(starter, "http://sandboxes.example", env)
            assert starter.asked == [(first, None), (first + 1, None)]
            with pytest.raises(reach.Unreachable, match=f"none of the ports {first}, which are taken"):
                await reach.start(starter, "http://sandboxes.example", {public.IP: "h", public.PORT: str(first)})
            return
    raise AssertionError("no two free ports beside one another")


async def test_a_server_of_another_machine_needs_to_be_told_where_the_proxy_is() -> None:
    starter = Started()
    with pytest.raises(
        reach.Unreachable, match=r"are on another machine, and nothing says .*PUBLIC_IP and .*PUBLIC_PORT"
    ):
        await reach.start(starter, "http://sandboxes.example", {})
    with pytest.raises(reach.Unreachable, match="PUBLIC_PORT is not set"):
        await reach.start(starter, "http://sandboxes.example", {public.IP: "h"})
    assert starter.asked == []
    await reach.start(starter, None, {})
    assert starter.asked == [(None, None)]
