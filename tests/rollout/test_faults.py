"""Failures of what an episode stands on, injected one by one: each has its status, and none is a reward of 0."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from proxy_stub import StubUpstream
from shard_rig import ASK, PASSES, Make, make_proxy, make_shard, row, rows_of

from openforge.policy.lease import ServerError
from openforge.proxy.journal import JournalError
from openforge.proxy.lineage import prompt_ids
from openforge.rollout import engine, gate
from openforge.rollout.gate import GONE, Gate
from openforge.rollout.machine import DiskFull, Machine, oom_kills
from openforge.rollout.progress import Progress
from openforge.rollout.rows import evidence
from openforge.sandboxes import LocalBackend, Owner, reap

SHORT = {"turns": 2, "tokens": None, "seconds": 2.5}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "ASK_SECONDS", 0.5)
    monkeypatch.setattr(gate, "PAUSE", 0.05)
    monkeypatch.setattr(engine, "BACK_OFF", 0.05)


def ends(episodes: list[dict[str, Any]]) -> list[tuple[str, int, str, bool]]:
    """(rollout, attempt, status, final), after checking that only a verified end holds a verdict."""
    for e in episodes:
        judged = e["status"] in ("completed", "agent_error", "agent_timeout", "budget_exhausted")
        assert judged == (e["verifier_output"] is not None), e
        assert judged or e["message"], e
    return [(e["rollout_id"], e["attempt"], e["status"], e["final"]) for e in episodes]


async def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"not within 30 s: {what}"
        await asyncio.sleep(0.01)


# ---- harness and verifier ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("verifier", "status"),
    [
        (PASSES, "agent_timeout"),
        ("raise SystemExit(5)", "verifier_failed"),
        ("import time; time.sleep(600)", "verifier_timeout"),
    ],
)
async def test_a_hanging_agent_is_judged_by_its_verifier_and_by_nothing_else(
    make: Make, upstream: StubUpstream, verifier: str, status: str
) -> None:
    upstream.says("yes")
    shard = make(row("a", agent=ASK + "sleep 600", verifier=verifier, verifier_seconds=1.0, limits=SHORT), attempts=1)
    episodes, _ = await rows_of(shard)
    assert ends(episodes) == [("a", 0, status, True)]


async def test_only_the_missing_member_of_a_group_is_run_again(make: Make, upstream: StubUpstream) -> None:
    once = "import os, sys\nif not os.path.exists('/workspace/said.txt'): sys.exit(9)\n" + PASSES
    rows = [row(f"r{i}", verifier=once) for i in range(3)]
    # Its first attempt leaves nothing for the verifier, which crashes; the stub's second answer counts from there.
    upstream.says("yes", "yes")
    first = make(*rows[:2])
    await first.run()
    failing = [*rows[:2], row("r2", agent="true", verifier=once)]
    episodes, _ = await rows_of(make(*failing))
    assert ends(episodes) == [
        ("r0", 0, "completed", True),
        ("r1", 0, "completed", True),
        ("r2", 0, "verifier_failed", False),
        ("r2", 1, "verifier_failed", True),
    ]
    assert len(upstream.bodies) == 2


# ---- policy server -------------------------------------------------------------------------------------------------
async def test_no_attempt_starts_while_the_policy_server_is_gone(make: Make, upstream: StubUpstream) -> None:
    port = int(upstream.url.rsplit(":", 1)[1])
    upstream.hold = asyncio.Event()
    shard = make(row("a", limits=SHORT), row("b"), row("c"), concurrency=1)
    run = asyncio.create_task(shard.run())
    await upstream.arrived.get()
    await upstream.stop()
    await until(lambda: shard.progress.note == GONE, "the shard waits")
    assert "the policy server is gone; waiting for it" in shard.progress.line()
    again = StubUpstream()
    await again.start(port)
    try:
        await run
    finally:
        await again.stop()
    assert ends(shard.book.finished(shard.partial)) == [
        ("a", 0, "policy_failed", False),
        ("a", 1, "completed", True),
        ("b", 0, "completed", True),
        ("c", 0, "completed", True),
    ]
    assert shard.progress.note is None


async def test_a_hanging_policy_server_is_not_the_agents_timeout(make: Make, upstream: StubUpstream) -> None:
    upstream.hold = asyncio.Event()
    shard = make(row("a", limits=SHORT))
    run = asyncio.create_task(shard.run())
    await until(lambda: shard.progress.note == GONE, "the shard waits")
    upstream.hold.set()
    await run
    episodes = shard.book.finished(shard.partial)
    assert ends(episodes) == [("a", 0, "policy_failed", False), ("a", 1, "completed", True)]
    assert "did not sample one token in 0.5 s" in episodes[0]["message"]


async def test_an_agent_that_was_merely_slow_stays_judged(make: Make, upstream: StubUpstream) -> None:
    async def slow(body: Any) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    upstream.script.append(slow)  # this generation never ends, the server answers others
    episodes, _ = await rows_of(make(row("a", limits=SHORT)))
    assert ends(episodes) == [("a", 0, "agent_timeout", True)]


async def test_a_policy_server_that_stays_away_stops_the_shard(make: Make, upstream: StubUpstream) -> None:
    progress = Progress(1, lambda line: None)
    shard = make(row("a", limits=SHORT), progress=progress)
    shard.gate = Gate(shard.endpoint, 0.2, progress)
    upstream.hold = asyncio.Event()
    with pytest.raises(ExceptionGroup) as e:
        await shard.run()
    told = engine.innermost(e.value)
    assert isinstance(told, ServerError) and "has not answered for 0.2 s (server.start_seconds)" in str(told)
    # What has ended is kept: the next command goes on from here.
    assert [r["status"] for r in make(row("a")).partial.ended["a"]] == ["policy_failed"]


# ---- proxy ---------------------------------------------------------------------------------------------------------
async def test_a_dead_proxy_is_replaced_and_its_episodes_run_again(make: Make, upstream: StubUpstream) -> None:
    shard = make(row("a"), row("b", agent=ASK + "sleep 1"), concurrency=2)
    dead = await shard.proxy.get()
    upstream.hold = asyncio.Event()
    run = asyncio.create_task(shard.run())
    await upstream.arrived.get()
    await upstream.arrived.get()
    os.kill(dead.pid, signal.SIGKILL)
    upstream.hold.set()
    await run
    episodes = shard.book.finished(shard.partial)
    calls, _ = evidence(episodes, shard.partial)
    assert ends(episodes) == [(r, i, s, i == 1) for r in "ab" for i, s in enumerate(("policy_failed", "completed"))]
    assert len(list(shard.partial.journal.glob("*.jsonl"))) == 2
    assert bytes(i for i in prompt_ids(calls, 0) if i < 256).endswith(b"user\nhelloassistant\n")


# ---- disk ----------------------------------------------------------------------------------------------------------
class Disk:
    """A small file system. Where none may be mounted, a folder that counts as full once 16 MiB more are used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
        self.mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
        fs = os.statvfs(folder)
        self.reserve = 4 << 20 if self.mounted else fs.f_bfree * fs.f_frsize - (12 << 20)

    def machine(self) -> Machine:
        return Machine([self.folder], reserve=self.reserve)

    def enlarge(self) -> None:
        self.reserve = 1 << 20
        if self.mounted:
            subprocess.run(["mount", "-o", "remount,size=100m", str(self.folder)], check=True)

    def close(self) -> None:
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.folder)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    one = Disk(tmp_path / "disk")
    yield one
    one.close()


async def test_a_full_disk_stops_the_shard_and_the_same_command_goes_on(upstream: StubUpstream, disk: Disk) -> None:
    upstream.says("yes", "yes")
    greedy = "head -c 20M /dev/zero > big || sleep 600\nsleep 1.5\n" + ASK
    rows = [row("a"), row("b", agent=greedy)]
    folder = disk.folder
    proxy = make_proxy(folder / "partial", upstream.url)
    try:
        async with LocalBackend(folder / "sandboxes", "r", Owner.current()) as backend:

            def shard() -> engine.Shard:
                made = make_shard(folder / "partial", upstream.url, proxy, backend, rows, concurrency=1)
                made.machine = disk.machine()
                return made

            with pytest.raises(ExceptionGroup) as e:
                await shard().run()
            told = engine.innermost(e.value)
            assert isinstance(told, DiskFull)
            assert "is full" in str(told) and "free space and type the same command again" in str(told)
            disk.enlarge()
            episodes, _ = await rows_of(shard())
    finally:
        await proxy.stop()
    assert ends(episodes) == [
        ("a", 0, "completed", True),
        ("b", 0, "sandbox_lost", False),
        ("b", 1, "completed", True),
    ]
    assert episodes[1]["message"] == str(told)


# ---- memory --------------------------------------------------------------------------------------------------------
KILLS_ITSELF = "import os\nos.kill(os.getpid(), 9)"


@pytest.mark.parametrize("agent", [ASK + "kill -9 $$", ASK + "bash -c 'kill -9 $$'\nexit 137", ASK])
@pytest.mark.parametrize(("risen", "status"), [(1, "sandbox_lost"), (0, None)])
async def test_killed_for_lack_of_memory_is_no_verdict(
    make: Make, upstream: StubUpstream, agent: str, risen: int, status: str | None
) -> None:
    killed = [0]

    def count() -> int:
        killed[0] += risen
        return killed[0]

    verifier = PASSES if agent != ASK else KILLS_ITSELF
    shard = make(row("a", agent=agent, verifier=verifier), attempts=1, machine=Machine([Path("/")], 0, count))
    episodes, _ = await rows_of(shard)
    otherwise = "agent_error" if agent != ASK else "verifier_failed"
    assert ends(episodes) == [("a", 0, status or otherwise, True)]
    if status:
        assert episodes[0]["message"] == "killed by the kernel for lack of memory"


async def test_a_kill_elsewhere_is_not_the_episodes(make: Make, upstream: StubUpstream) -> None:
    counts = iter(range(1000))
    shard = make(row("a"), machine=Machine([Path("/")], 0, lambda: next(counts)))
    episodes, _ = await rows_of(shard)
    assert ends(episodes) == [("a", 0, "completed", True)]


def test_the_kernels_count_can_be_read() -> None:
    assert "oom_kill" in Path("/proc/vmstat").read_text() and oom_kills() >= 0


# ---- records -------------------------------------------------------------------------------------------------------
async def test_a_journal_that_lost_records_is_one_sentence(make: Make, upstream: StubUpstream) -> None:
    shard = make(row("a"))
    await shard.run()
    (file,) = shard.partial.journal.glob("*.jsonl")
    whole = file.read_bytes()
    lines = whole.splitlines(keepends=True)
    episodes = shard.book.finished(shard.partial)
    file.write_bytes(lines[0])
    with pytest.raises(JournalError, match=r"holds 1 sessions and 0 answered calls of episode \w+, which had 1"):
        evidence(episodes, shard.partial)
    file.write_bytes(whole[:40] + b"\x00" * 20 + whole[60:])
    with pytest.raises(JournalError, match=r"jsonl, line 1: not a journal record; the file was altered or damaged"):
        evidence(episodes, shard.partial)
    # The records of attempts went back to a time before this one: it was run again under the same name.
    file.write_bytes(whole + lines[0])
    with pytest.raises(JournalError, match=r"holds 2 sessions .* remove .* to run the shard anew"):
        evidence(episodes, shard.partial)


# ---- the job itself ------------------------------------------------------------------------------------------------
async def test_a_job_killed_in_an_episode_leaves_nothing_and_the_episode_is_run_once_more(
    make: Make, upstream: StubUpstream, tmp_path: Path
) -> None:
    here = Path(__file__).parent
    tests = [here, here.parent / "proxy", here.parent / "environments", here.parents[1]]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, tests))}
    agent = "setsid sleep 918 > /dev/null 2>&1 &\n" + ASK
    upstream.hold = asyncio.Event()
    argv = [sys.executable, str(here / "runner.py"), str(tmp_path), upstream.url, agent]
    with subprocess.Popen(argv, env=env) as job:
        await upstream.arrived.get()
        inside = [p for p in Path("/proc").glob("[0-9]*/cmdline") if b"sleep\0918" in text(p)]
        assert inside
        job.kill()
    await until(lambda: not any(p.exists() and b"sleep\0918" in text(p) for p in inside), "the sandbox's end")
    left = str(tmp_path).encode()
    await until(lambda: not [p for p in Path("/proc").glob("[0-9]*/cmdline") if left in text(p)], "the job's end")
    assert len(reap(tmp_path / "sandboxes", "r")) == 1
    assert list((tmp_path / "sandboxes").iterdir()) == []
    upstream.hold.set()
    upstream.says("yes")
    asked = len(upstream.bodies)
    episodes, calls = await rows_of(make(row("a", agent=agent)))
    assert ends(episodes) == [("a", 0, "sandbox_lost", False), ("a", 1, "completed", True)]
    assert len(upstream.bodies) == asked + 1 and {c["episode_id"] for c in calls} == {episodes[1]["episode_id"]}
    assert list((tmp_path / "sandboxes").iterdir()) == []


def text(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
