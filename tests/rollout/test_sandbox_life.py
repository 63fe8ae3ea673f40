"""The life of sandboxes in a shard: what fails, is full, dies, is made ahead or takes too long, and what is left.

Sandboxes are real ones of this machine; `Scripted` stands between them and the engine and injects the faults.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tarfile
import time
from collections.abc import AsyncIterator, Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from proxy_stub import StubUpstream
from shard_rig import ASK, PASSES, Agent, Make, row, rows_of

from openforge import tables
from openforge.config_sandbox import Artifacts, Sandbox
from openforge.rollout import engine, pool
from openforge.sandboxes import LocalBackend, LocalSandbox, Owner, SandboxError, SandboxFull, SandboxUnsupported

NONE = Artifacts(keep="none")


class Scripted:
    """A backend of this machine whose next creations end as `script` says: an error to raise, or None.

    Attributes:
        once: episodes whose first creation fails.
        made: episodes that a sandbox was made for, in order.
        most: sandboxes alive at once, at most.
    """

    def __init__(self, local: LocalBackend) -> None:
        self.local, self.script = local, list[SandboxError | None]()
        self.once: set[str] = set()
        self.made: list[str] = []
        self.most = 0

    async def create(self, episode_id: str, **asked: Any) -> LocalSandbox:
        told = self.script.pop(0) if self.script else None
        if told is not None:
            raise told
        if episode_id in self.once:
            self.once.remove(episode_id)
            raise SandboxError("once")
        self.made.append(episode_id)
        sandbox = await self.local.create(episode_id, **asked)
        self.most = max(self.most, len(self.local.sandboxes))
        return sandbox

    async def close(self) -> None:
        await self.local.close()

    def of(self, rollout: str, attempt: int = 0) -> LocalSandbox | None:
        """The living sandbox of an attempt."""
        episode = tables.episode_id(rollout, attempt)
        found = [s for s in self.local.sandboxes.values() if s.episode_id == episode and s.holder_pid > 0]
        return found[0] if found else None


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[Scripted]:
    async with LocalBackend(tmp_path / "boxes", "r", Owner.current()) as local:
        yield Scripted(local)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "BACK_OFF", 0.01)


def ends(episodes: list[dict[str, Any]]) -> list[tuple[str, int, str]]:
    return [(e["rollout_id"], e["attempt"], e["status"]) for e in episodes]


async def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"not within 30 s: {what}"
        await asyncio.sleep(0.01)


# ---- creation ------------------------------------------------------------------------------------------------------
async def test_a_creation_that_fails_twice_uses_two_attempts(make: Make, backend: Scripted) -> None:
    backend.script = [SandboxError("the first"), SandboxError("the second")]
    episodes, _ = await rows_of(make(row("a"), backend=backend, attempts=3))
    assert ends(episodes) == [("a", 0, "setup_failed"), ("a", 1, "setup_failed"), ("a", 2, "completed")]
    assert [e["message"] for e in episodes] == ["the first", "the second", None]
    assert [e["isolation"] == "none reached" for e in episodes] == [True, True, False]


async def test_what_a_backend_does_not_offer_is_unsupported_and_not_tried_again(make: Make, backend: Scripted) -> None:
    backend.script = [SandboxUnsupported("no GPU here")]
    episodes, calls = await rows_of(make(row("a"), backend=backend, attempts=3))
    assert ends(episodes) == [("a", 0, "unsupported")] and episodes[0]["message"] == "no GPU here" and calls == []
    assert episodes[0]["final"] and episodes[0]["verifier_output"] is None


async def test_a_creation_that_hangs_is_cut_off(make: Make, backend: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(*args: Any, **asked: Any) -> LocalSandbox:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(backend, "create", hang)
    shard = make(row("a"), backend=backend, attempts=1, sandbox=Sandbox(create_seconds=0.1, artifacts=NONE))
    episodes, _ = await rows_of(shard)
    assert ends(episodes) == [("a", 0, "setup_failed")]
    assert episodes[0]["message"] == "no sandbox within 0.1 s (sandbox.create_seconds)"


# ---- room ----------------------------------------------------------------------------------------------------------
async def test_a_full_backend_is_waited_for_and_no_attempt_is_used(make: Make, backend: Scripted) -> None:
    backend.script = [SandboxFull("200 of 200 are taken", 0.05)] * 3
    shard = make(row("a"), backend=backend, attempts=1)
    lines: list[str] = []
    wait = shard.progress.waits_for_room

    def watched(why: str) -> Any:
        manager = wait(why)
        lines.append(shard.progress.line())
        return manager

    shard.progress.waits_for_room = watched  # type: ignore[method-assign]
    episodes, _ = await rows_of(shard)
    assert ends(episodes) == [("a", 0, "completed")] and backend.made == [tables.episode_id("a", 0)]
    assert (shard.progress.waits, shard.progress.waiting) == (3, 0)
    # Three times 0.05 s that it was told to wait; the setup that follows has none of it.
    assert 0.15 <= episodes[0]["seconds"]["queue"] <= episodes[0]["seconds"]["total"] - episodes[0]["seconds"]["setup"]


def test_who_waits_for_room_is_shown(make: Make) -> None:
    progress = make().progress
    assert "wait" not in progress.line()
    with progress.waits_for_room("200 of 200 are taken"):
        assert progress.line().endswith("; 1 wait for room: 200 of 200 are taken")
    assert "wait" not in progress.line()


async def test_the_end_of_an_episode_is_room_for_the_next(
    make: Make, backend: Scripted, upstream: StubUpstream
) -> None:
    """The second one is told to ask again in an hour; it asks as soon as the first one's sandbox is gone."""
    upstream.hold = asyncio.Event()
    backend.script = [None, SandboxFull("full", 3600.0)]
    shard = make(row("a"), row("b"), backend=backend, concurrency=2)
    run = asyncio.create_task(shard.run())
    await until(lambda: shard.progress.waiting == 1, "one waits")
    assert "1 wait for room: full" in shard.progress.line()
    upstream.hold.set()
    await run
    assert ends(shard.book.finished(shard.partial)) == [("a", 0, "completed"), ("b", 0, "completed")]


async def test_room_that_never_comes_stops_the_shard_and_uses_no_attempt(
    make: Make, backend: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "FULL_SECONDS", 0.05)
    backend.script = [SandboxFull("others hold 200 of 200", 0.02)] * 100
    with pytest.raises(ExceptionGroup) as e:
        await make(row("a"), backend=backend, attempts=1).run()
    told = engine.innermost(e.value)
    assert isinstance(told, pool.NoRoom)
    assert str(told) == "there has been no room for a sandbox for 0.05 s: others hold 200 of 200"
    backend.script = []
    episodes, _ = await rows_of(make(row("a"), backend=backend, attempts=1))
    assert ends(episodes) == [("a", 0, "sandbox_lost"), ("a", 1, "completed")]
    assert episodes[0]["message"] == str(told)


async def test_no_more_sandboxes_are_alive_than_allowed(make: Make, backend: Scripted) -> None:
    terms = Sandbox(max_alive=2, warm=1, artifacts=NONE)
    episodes, _ = await rows_of(make(*(row(f"r{i}") for i in range(6)), backend=backend, sandbox=terms, concurrency=6))
    assert {e["status"] for e in episodes} == {"completed"} and len(episodes) == 6
    assert backend.most == 2


# ---- a warm pool ---------------------------------------------------------------------------------------------------
WARM = Sandbox(warm=2, artifacts=NONE)


async def test_the_next_rollouts_sandboxes_are_made_ahead_each_for_one_episode(
    make: Make, backend: Scripted, upstream: StubUpstream
) -> None:
    upstream.hold = asyncio.Event()
    shard = make(*(row(n) for n in "abcd"), backend=backend, sandbox=WARM, concurrency=1)
    run = asyncio.create_task(shard.run())
    await upstream.arrived.get()
    await until(lambda: backend.of("b") and backend.of("c"), "two more than the one that runs")
    assert backend.of("d") is None and sorted(backend.made) == sorted(tables.episode_id(n, 0) for n in "abc")
    upstream.hold.set()
    await run
    assert ends(shard.book.finished(shard.partial)) == [(n, 0, "completed") for n in "abcd"]
    assert sorted(backend.made) == sorted(tables.episode_id(n, 0) for n in "abcd")
    assert backend.local.sandboxes == {}


async def test_a_warm_sandbox_that_dies_before_its_turn_is_replaced(
    make: Make, backend: Scripted, upstream: StubUpstream
) -> None:
    upstream.hold = asyncio.Event()
    shard = make(row("a"), row("b"), backend=backend, sandbox=WARM, concurrency=1, attempts=1)
    run = asyncio.create_task(shard.run())
    await upstream.arrived.get()
    await until(lambda: backend.of("b"), "a warm one")
    warm = backend.of("b")
    assert warm is not None
    os.kill(warm.holder_pid, signal.SIGKILL)
    upstream.hold.set()
    await run
    assert ends(shard.book.finished(shard.partial)) == [("a", 0, "completed"), ("b", 0, "completed")]
    assert shard.progress.replaced == 1 and backend.made.count(tables.episode_id("b", 0)) == 2
    assert backend.local.sandboxes == {}


async def test_a_warm_creation_that_fails_uses_no_attempt(make: Make, backend: Scripted) -> None:
    backend.once = {tables.episode_id("b", 0)}
    episodes, _ = await rows_of(make(row("a"), row("b"), backend=backend, sandbox=WARM, concurrency=1, attempts=1))
    assert ends(episodes) == [("a", 0, "completed"), ("b", 0, "completed")] and not backend.once


async def test_an_end_by_a_signal_leaves_nothing_of_a_warm_pool(
    make: Make, backend: Scripted, upstream: StubUpstream, tmp_path: Path
) -> None:
    """interrupts.py turns the signal into the cancellation of the job's one task."""
    upstream.hold = asyncio.Event()
    shard = make(*(row(n) for n in "abc"), backend=backend, sandbox=WARM, concurrency=1)
    run = asyncio.create_task(shard.run())
    await upstream.arrived.get()
    await until(lambda: backend.of("b") and backend.of("c"), "a warm pool")
    pids = [s.holder_pid for s in backend.local.sandboxes.values()]
    assert len(pids) == 3
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert backend.local.sandboxes == {} and list((tmp_path / "boxes").iterdir()) == []
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


# ---- phases --------------------------------------------------------------------------------------------------------
async def test_a_sandbox_that_dies_under_the_agent_is_lost_and_the_rollout_runs_again(
    make: Make, backend: Scripted, upstream: StubUpstream
) -> None:
    upstream.hold = asyncio.Event()
    shard = make(row("a"), backend=backend)
    run = asyncio.create_task(shard.run())
    await upstream.arrived.get()
    sandbox = backend.of("a")
    assert sandbox is not None
    os.kill(sandbox.holder_pid, signal.SIGKILL)
    await until(lambda: shard.partial.ended.get("a"), "the first attempt's end")
    upstream.hold.set()
    await run
    assert ends(shard.book.finished(shard.partial)) == [("a", 0, "sandbox_lost"), ("a", 1, "completed")]


class Slow(Agent):
    """Its place check never ends."""

    async def place(self, sandbox: Any) -> str:
        await asyncio.Event().wait()
        raise AssertionError


async def test_a_setup_that_takes_too_long_is_setup_failed(make: Make, backend: Scripted) -> None:
    terms = Sandbox(setup_seconds=1.0, artifacts=NONE)
    episodes, _ = await rows_of(make(row("a"), backend=backend, sandbox=terms, harness=Slow(), attempts=1))
    assert ends(episodes) == [("a", 0, "setup_failed")] and episodes[0]["turns"] == 0
    assert "the setup phase did not end within" in episodes[0]["message"]
    assert "(sandbox.setup_seconds)" in episodes[0]["message"]


async def test_a_verify_phase_that_takes_too_long_is_verifier_timeout(make: Make, backend: Scripted) -> None:
    # Its verifier may take 0.2 s and starts later than 0.01 s, for a process cleans first: the phase ends before it.
    terms = Sandbox(verify_seconds=0.01, artifacts=NONE)
    hangs = row("a", verifier="import time; time.sleep(60)", verifier_seconds=0.2)
    episodes, _ = await rows_of(make(hangs, backend=backend, sandbox=terms, attempts=1))
    assert ends(episodes) == [("a", 0, "verifier_timeout")] and episodes[0]["verifier_output"] is None
    assert episodes[0]["message"] == "the verify phase did not end within 0.21 s (sandbox.verify_seconds)"
    assert episodes[0]["turns"] == 1


# ---- a second sandbox for grading ----------------------------------------------------------------------------------
PLANTED = """
mkdir -p deep/er && echo inner > deep/er/file && chmod 700 deep && ln -s er/file deep/link && ln -s /etc/passwd out
mkfifo pipe; echo shut > shut && chmod 0 shut; cp /bin/true tool; echo mine > $HOME/mine; echo mine > /tmp/mine
"""
WHERE = """
import json, os, stat
seen = {
    "said": open("/workspace/said.txt").read(),
    "deep": open("/workspace/deep/link").read(),
    "shut": open("/workspace/shut").read(),
    "mode": stat.S_IMODE(os.stat("/workspace/tool").st_mode),
    "kept_out": [p for p in ("/workspace/out", "/workspace/pipe") if os.path.lexists(p)],
    "mine": [p for p in (os.environ.get("AGENT_HOME", "/home/agent") + "/mine", "/tmp/mine") if os.path.exists(p)],
}
print(json.dumps({"score": 1, "passed": True, "seen": seen}))
"""


async def test_a_second_sandbox_holds_the_work_folder_and_nothing_else_of_the_agents(
    make: Make, backend: Scripted, upstream: StubUpstream
) -> None:
    upstream.says("yes")
    shard = make(row("a", agent=ASK + PLANTED, verifier=WHERE, grading="second"), backend=backend)
    episodes, _ = await rows_of(shard)
    assert ends(episodes) == [("a", 0, "completed")]
    seen = {"said": "yes", "deep": "inner\n", "shut": "shut\n", "mode": 0o755, "kept_out": [], "mine": []}
    assert json.loads(episodes[0]["verifier_output"])["seen"] == seen
    assert backend.local.sandboxes == {}


# ---- artifacts -----------------------------------------------------------------------------------------------------
async def test_failed_attempts_keep_their_log_and_work_folder(
    make: Make, backend: Scripted, upstream: StubUpstream
) -> None:
    upstream.says("yes")
    terms = Sandbox(artifacts=Artifacts(keep="failed", most=1, work=True))
    wrong = ASK + PLANTED + "echo $KEY > key.txt; echo went wrong; exit 7"
    rows = [row("a"), row("b", agent=wrong), row("c", agent=wrong)]
    shard = make(*rows, backend=backend, sandbox=terms, concurrency=1)
    episodes, _ = await rows_of(shard)
    assert ends(episodes) == [("a", 0, "completed"), ("b", 0, "agent_error"), ("c", 0, "agent_error")]
    kept = tables.episode_id("b", 0)
    assert [e["artifacts"] for e in episodes] == [None, f"artifacts/shard=0001.zip/{kept}.log", None]
    files = {p.name: p.read_bytes() for p in shard.partial.artifacts.iterdir()}
    assert set(files) == {f"{kept}.log", f"{kept}.tar"} and files[f"{kept}.log"] == b"went wrong\n"
    with tarfile.open(fileobj=BytesIO(files[f"{kept}.tar"])) as tar:
        names = tar.getnames()
        content = tar.extractfile("key.txt")
        assert content is not None and content.read() == b"[session key]\n"
    assert {"said.txt", "deep/er/file", "deep/link", "shut", "tool"} <= set(names)
    assert not {"out", "pipe"} & set(names)


async def test_artifacts_of_all_episodes_stop_at_their_number(make: Make, backend: Scripted) -> None:
    terms = Sandbox(artifacts=Artifacts(keep="all", most=2))
    shard = make(*(row(n, agent=f"echo {n}", verifier=PASSES) for n in "abc"), backend=backend, sandbox=terms)
    await rows_of(shard)
    assert len(list(shard.partial.artifacts.iterdir())) == 2
    # Another process of the shard counts on.
    again = make(row("d", agent="echo d"), backend=backend, sandbox=terms)
    await again.run()
    assert len(list(shard.partial.artifacts.iterdir())) == 2
