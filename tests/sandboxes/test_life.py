"""Processes, owners and the reaper."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from openforge.sandboxes import LocalBackend, LocalSandbox, Owner, SandboxError, SandboxLost, probe, reap

OWNER = """
import asyncio, sys
from pathlib import Path
from openforge.sandboxes import LocalBackend, Owner

async def main():
    backend = LocalBackend(Path(sys.argv[1]), sys.argv[2], Owner.current())
    sandbox = await backend.create("episode")
    await sandbox.exec("setsid sleep 908 >/dev/null 2>&1 & echo x > file")
    print(sandbox.holder_pid, sandbox.sandbox_id, backend.spawner.pid, flush=True)
    await sandbox.exec("sleep 909")

asyncio.run(main())
"""


def ends(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 30)[0])


class Elsewhere:
    """A sandbox owned by another process, which lives until it is killed."""

    def __init__(self, root: Path, run: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(root), run], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        holder, self.sandbox_id, spawner = self.process.stdout.readline().split()
        self.pidfds = [os.pidfd_open(int(holder)), os.pidfd_open(int(spawner))]

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


@pytest.fixture
def elsewhere(tmp_path: Path):  # type: ignore[no-untyped-def]
    made: list[Elsewhere] = []

    def make(root: Path, run: str) -> Elsewhere:
        made.append(Elsewhere(root, run))
        return made[-1]

    yield make
    for e in made:
        e.kill()


async def commands(sandbox: LocalSandbox) -> str:
    return (await sandbox.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).stdout.decode()


async def test_end_processes_kills_daemons_and_keeps_files(sandbox: LocalSandbox) -> None:
    await sandbox.exec(
        "trap '' TERM HUP INT; echo kept > file; setsid sleep 910 >/dev/null 2>&1 & "
        "(setsid bash -c 'trap \"\" TERM; (setsid sleep 911 &); sleep 912' >/dev/null 2>&1 &); "
        "bash -c 'while :; do (sleep 913 &); sleep 0.01; done' >/dev/null 2>&1 &"
    )
    assert "sleep 910" in await commands(sandbox)
    await sandbox.end_processes()
    assert "sleep 91" not in await commands(sandbox)
    assert await sandbox.download_content("file") == b"kept\n"


async def test_end_processes_ends_commands_in_flight(sandbox: LocalSandbox) -> None:
    tasks = [asyncio.create_task(sandbox.exec(f"sleep 914; touch late{i}")) for i in range(5)]
    await asyncio.sleep(0)  # some are not inside yet
    await sandbox.end_processes()
    assert {(await t).exit_code for t in tasks} == {-9}
    assert "sleep 914" not in await commands(sandbox)
    assert await sandbox.list_files(".") == []


async def test_the_agent_cannot_end_its_own_sandbox(sandbox: LocalSandbox) -> None:
    result = await sandbox.exec("kill -9 1; kill -TERM 1; kill -STOP 1; kill -9 -1; sleep 60", timeout=30)
    assert result.exit_code == -9
    assert (await sandbox.exec("echo still here")).stdout == b"still here\n"


async def test_a_process_that_kills_all_others_for_ever_is_ended_too(sandbox: LocalSandbox) -> None:
    loop = "setsid bash -c 'while :; do kill -9 -1; done' >/dev/null 2>&1 & echo"
    await asyncio.gather(*(sandbox.exec(loop) for _ in range(3)))
    await sandbox.end_processes()
    assert (await sandbox.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).stdout.count(b"while") == 0
    await sandbox.upload_content(b"x", "file")


async def test_a_lost_sandbox_says_so(sandbox: LocalSandbox) -> None:
    task = asyncio.create_task(sandbox.exec("touch up; sleep 60"))
    await sandbox.exec("until [ -e up ]; do sleep 0.02; done")
    pidfd = os.pidfd_open(sandbox.holder_pid)
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    with pytest.raises(SandboxLost, match=sandbox.sandbox_id):
        await task
    assert ends(pidfd)
    os.close(pidfd)
    for work in (sandbox.exec("true"), sandbox.upload_content(b"", "f"), sandbox.list_files(), sandbox.end_processes()):
        with pytest.raises(SandboxLost):
            await work


async def test_a_killed_spawner_is_a_lost_sandbox(backend: LocalBackend, sandbox: LocalSandbox) -> None:
    pidfd = os.pidfd_open(sandbox.holder_pid)
    assert backend.spawner.pid is not None
    os.kill(backend.spawner.pid, signal.SIGKILL)
    assert ends(pidfd)
    os.close(pidfd)
    with pytest.raises(SandboxLost):
        await sandbox.exec("true")
    with pytest.raises(SandboxLost, match="the process that keeps this run's sandboxes died"):
        await backend.create("next")


async def test_twenty_at_once(backend: LocalBackend) -> None:
    sandboxes = await asyncio.gather(*(backend.create(f"e{i}") for i in range(20)))
    assert len({s.sandbox_id for s in sandboxes}) == 20
    await asyncio.gather(*(s.exec(f"echo {i} > f") for i, s in enumerate(sandboxes)))
    texts = await asyncio.gather(*(s.download_content("f") for s in sandboxes))
    assert texts == [f"{i}\n".encode() for i in range(20)]
    await asyncio.gather(*(s.delete() for s in sandboxes))
    assert os.listdir(backend.root) == []


async def test_nothing_is_left_after_close(tmp_path: Path) -> None:
    async with LocalBackend(tmp_path, "run", Owner.current()) as backend:
        sandbox = await backend.create("episode")
        pidfd = os.pidfd_open(sandbox.holder_pid)
        label = json.loads((tmp_path / f"{sandbox.sandbox_id}.json").read_text())
        assert (label["run"], label["episode_id"], label["owner"]["pid"]) == ("run", "episode", os.getpid())
        assert label["holder"]["pid"] == sandbox.holder_pid
    assert ends(pidfd)
    os.close(pidfd)
    assert os.listdir(tmp_path) == []


async def test_the_owners_death_leaves_no_process_and_the_reaper_the_rest(tmp_path: Path, elsewhere) -> None:  # type: ignore[no-untyped-def]
    mine, other, living = elsewhere(tmp_path, "run_a"), elsewhere(tmp_path, "run_b"), elsewhere(tmp_path, "run_a")
    mine.kill()
    other.kill()
    for pidfd in (*mine.pidfds, *other.pidfds):
        assert ends(pidfd), "a process outlived its owner"
    assert not select.select(living.pidfds, [], [], 0)[0]
    before = {e.sandbox_id for e in (mine, other, living)}
    assert {p.name for p in tmp_path.iterdir() if p.is_dir()} == before
    assert reap(tmp_path, "run_a") == [mine.sandbox_id]
    left = before - {mine.sandbox_id}
    assert {p.name for p in tmp_path.iterdir()} == left | {f"{s}.json" for s in left}
    assert reap(tmp_path, "run_a") == []
    assert not select.select(living.pidfds, [], [], 0)[0]


async def test_the_reaper_kills_a_holder_that_outlived_its_owner(tmp_path: Path) -> None:
    """Made by hand, since the kernel sees to it that there is none."""
    with subprocess.Popen(["sleep", "915"]) as orphan, subprocess.Popen(["true"]) as owner:
        named: dict[str, object] = {"host": Owner.current().host, "boot": Owner.current().boot}
        label = {"run": "r", "episode_id": "e", "owner": {**named, "pid": owner.pid, "start": 1}}
        holder = {**named, "pid": orphan.pid, "start": Owner.of(orphan.pid).start}
        (tmp_path / "e-1.json").write_text(json.dumps({**label, "holder": holder}))
        # The same pid with another start is another process: it must not be touched.
        (tmp_path / "e-2.json").write_text(json.dumps({**label, "holder": {**named, "pid": os.getpid(), "start": 1}}))
        (tmp_path / "torn.json").write_text('{"run": "r"')
        foreign = {**label, "owner": {**named, "pid": owner.pid, "start": 1, "host": "elsewhere"}, "holder": None}
        (tmp_path / "e-3.json").write_text(json.dumps(foreign))
        assert reap(tmp_path, "r") == ["e-1", "e-2"]
        assert orphan.wait(30) == -signal.SIGKILL
    assert sorted(os.listdir(tmp_path)) == ["e-3.json", "torn.json"]


async def test_the_reaper_kills_what_was_still_starting(tmp_path: Path) -> None:
    folder = tmp_path / "e-1"
    named_of = {"host": Owner.current().host, "boot": Owner.current().boot}
    with (
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(916)", f"{folder}/work"]) as orphan,
        subprocess.Popen(["true"]) as owner,
    ):
        label = {"run": "r", "episode_id": "e", "owner": {**named_of, "pid": owner.pid, "start": 1}, "holder": None}
        (tmp_path / "e-1.json").write_text(json.dumps(label))
        assert reap(tmp_path, "r") == ["e-1"]
        assert orphan.wait(30) == -signal.SIGKILL


STARTS = """
import asyncio, sys
from pathlib import Path
from openforge.sandboxes import LocalBackend, Owner

async def main():
    backend = LocalBackend(Path(sys.argv[1]), "r", Owner.current())
    first = await backend.create("first")
    print(backend.spawner.pid, flush=True)
    await asyncio.gather(*(backend.create(f"e{i}") for i in range(6)))
    await asyncio.sleep(600)

asyncio.run(main())
"""


def living(folder: Path) -> list[str]:
    """Processes whose command line or mounts name a folder, as ps would show them."""
    word, found = str(folder).encode(), []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{name}/cmdline").read_bytes() if name.isdigit() else b""
            if word in line or (line and word in Path(f"/proc/{name}/mountinfo").read_bytes()):
                found.append(f"{name}: {line.decode()}")
    return found


def test_nothing_outlives_an_owner_that_is_killed_while_sandboxes_start(tmp_path: Path) -> None:
    """bwrap's own death signal comes too late for what is being started when all of its parents are killed."""
    folders = [tmp_path / f"owner{i}" for i in range(4)]
    commands = [[sys.executable, "-c", STARTS, str(folder)] for folder in folders]
    owners = [subprocess.Popen(c, stdout=subprocess.PIPE, text=True) for c in commands]
    for i, owner in enumerate(owners):
        assert owner.stdout is not None
        spawner = int(owner.stdout.readline())
        select.select([], [], [], 0.02 * i)  # not to wait for anything: a kill at another moment of the start
        os.kill(spawner, signal.SIGKILL)
        owner.kill()
        owner.communicate()
    deadline = time.monotonic() + 30
    for folder in folders:
        assert "first" in {name.split("-")[0] for name in reap(folder, "r")}
        while left := living(folder):
            assert time.monotonic() < deadline, left
            time.sleep(0.02)
        while left_files := list(folder.iterdir()):  # a label that was not even written is kept for a second
            assert time.monotonic() < deadline, left_files
            assert reap(folder, "r") == []


async def test_refusals_of_create(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="network 'host' must be one of none, proxy, open"):
        await backend.create("e", network="host")  # type: ignore[arg-type]
    for name in ("../e", "a/b", "", ".hidden"):
        with pytest.raises(SandboxError, match="must be a plain name"):
            await backend.create(name)
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2; exit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(SandboxError, match=r"kernel\.unprivileged_userns_clone=1.*No permissions to"):
        await backend.create("e")
    assert not probe()["works"]
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(SandboxError, match="apt install bubblewrap"):
        await backend.create("e")
    assert "apt install bubblewrap" in probe()["why"]
    assert os.listdir(backend.root) == []


def test_probe() -> None:
    found = probe()
    assert found["works"] and found["why"] is None
    assert found["bwrap"] == shutil.which("bwrap")
