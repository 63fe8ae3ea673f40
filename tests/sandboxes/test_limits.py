"""Memory, processes, CPU and disk: what the kernel holds here, what is said where it cannot."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from openforge.sandboxes import Limits, LocalBackend, LocalSandbox, Owner, SandboxError, SandboxFileError, cgroups, reap

GROUPS = cgroups.available().folders
with_groups = pytest.mark.skipif(
    set(GROUPS) != {"memory", "pids", "cpu"}, reason="this user may make no control groups on this machine"
)


def groups_of(sandbox: LocalSandbox) -> list[Path]:
    return [Path(p) for p in sandbox.group.paths()]


@with_groups
async def test_a_memory_hog_is_killed_and_the_result_says_why(backend: LocalBackend) -> None:
    limits = Limits(memory_bytes=64 << 20)
    sandbox = await backend.create("episode", limits=limits)
    assert f"memory {64 << 20} (cgroup v{cgroups.available().version})" in sandbox.isolation
    hog = ["python3", "-c", "x = bytearray(300 << 20); print(len(x))"]
    result = await sandbox.exec(hog, timeout=60)
    assert (result.exit_code, result.stdout) == (-9, b"")
    assert result.note is not None and f"limit of memory, {64 << 20} bytes" in result.note
    result = await sandbox.exec("head -c 300000000 /dev/zero | tail -c 300000000 >/dev/null; exit $?", timeout=60)
    assert result.exit_code == 137 and result.note is not None, "as a shell says it"
    assert sandbox.group.memory_kills() >= 2
    result = await sandbox.exec("kill -9 $$")
    assert (result.exit_code, result.note) == (-9, None), "killed by itself"
    assert (await sandbox.exec("echo alive")).stdout == b"alive\n"
    free = await backend.create("episode")
    assert (await free.exec(hog, timeout=60)).exit_code == 0


@with_groups
async def test_a_fork_bomb_stays_in_its_sandbox(backend: LocalBackend) -> None:
    sandbox, other = [
        await backend.create(f"e{i}", limits=Limits(processes=50, memory_bytes=256 << 20)) for i in range(2)
    ]
    assert "processes 50 (cgroup" in sandbox.isolation
    bomb = "f() { f | f & }; f; for i in $(seq 100); do sleep 60 & done"
    result = await sandbox.exec(["/bin/dash", "-c", bomb], timeout=60)  # bash waits and tries again
    assert b"Cannot fork" in result.stderr
    current = [int((p / "pids.current").read_text()) for p in groups_of(sandbox) if (p / "pids.current").exists()]
    assert max(current) <= 51, "ours may be on its way in"
    assert (await other.exec("sleep 0 & wait; echo free")).stdout == b"free\n"
    await sandbox.upload_content(b"x", "file")
    await sandbox.end_processes()
    assert (await sandbox.exec("sleep 0 & wait; cat file")).stdout == b"x"


@with_groups
async def test_cpu_time_is_shared_out(backend: LocalBackend) -> None:
    sandbox = await backend.create("episode", limits=Limits(cpus=0.2))
    assert "cpus 0.2 (cgroup" in sandbox.isolation
    await sandbox.exec("timeout 1 bash -c 'while :; do :; done'", timeout=60)
    stat = dict(line.split() for line in (sandbox.group.folders["cpu"] / "cpu.stat").read_text().splitlines())
    assert int(stat["nr_throttled"]) > 0


async def test_a_disk_hog_meets_the_end_of_its_disk(backend: LocalBackend) -> None:
    sandbox = await backend.create("episode", limits=Limits(disk_bytes=8 << 20))
    assert f"disk {8 << 20} (tmpfs)" in sandbox.isolation
    result = await sandbox.exec("head -c 6000000 /dev/zero > ~/a; head -c 6000000 /dev/zero > b")
    assert b"No space left on device" in result.stderr, "the home and the work folder share it"
    hidden = "rm ~/a b; exec 3>c; rm c; head -c 20000000 /dev/zero >&3"
    assert b"No space left on device" in (await sandbox.exec(hidden)).stderr, "a file without a name counts"
    await sandbox.end_processes()
    with pytest.raises(SandboxFileError, match="/workspace/up") as e:
        await sandbox.upload_content(bytes(9 << 20), "up")
    assert e.value.errno == errno.ENOSPC
    await sandbox.upload_content(b"fits", "up")
    assert await sandbox.download_content("up") == b"fits"
    folder = backend.root / sandbox.sandbox_id
    assert sum(f.stat().st_size for f in (folder / "disk").rglob("*") if f.is_file()) == 0, "nothing is on the host's"


async def test_what_is_kept_of_a_disk_in_memory(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("host secret")
    async with LocalBackend(tmp_path / "s", "run", Owner.current(), keep=tmp_path / "kept") as backend:
        sandbox = await backend.create("episode", limits=Limits(disk_bytes=8 << 20))
        await sandbox.exec(f"mkdir d; echo x > d/f; ln -s '{secret}' l; ln -s '{tmp_path}' m; mkfifo p; sleep 917 &")
    kept = tmp_path / "kept" / sandbox.sandbox_id
    assert (kept / "d/f").read_text() == "x\n"
    assert os.readlink(kept / "l") == str(secret) and (kept / "p").is_fifo()
    assert sorted(os.listdir(kept)) == ["d", "l", "m", "p"]
    assert os.listdir(tmp_path / "s") == []


@with_groups
async def test_no_group_is_left(backend: LocalBackend) -> None:
    limits = Limits(memory_bytes=64 << 20, cpus=1)
    sandboxes = [await backend.create(f"e{i}", limits=limits) for i in range(4)]
    folders = [f for s in sandboxes for f in groups_of(s)]
    assert len(folders) in (4, 12) and all(f.is_dir() for f in folders)
    await sandboxes[0].exec("setsid sleep 918 >/dev/null 2>&1 &")
    for sandbox in sandboxes:
        await sandbox.delete()
    assert [f for f in folders if f.exists()] == []
    with pytest.raises(SandboxError, match="nowhere"):
        await backend.create("e", binds=[], limits=limits, image="nowhere")
    assert not [d for folder in set(GROUPS.values()) for d in folder.glob("openforge-e-*")]


@with_groups
def test_the_reaper_removes_the_groups_of_a_dead_owner(tmp_path: Path) -> None:
    group = cgroups.plan(f"reaped-{os.getpid()}", Limits(), cgroups.available())
    group.make(Limits())
    owner = {"host": Owner.current().host, "boot": Owner.current().boot, "pid": os.getpid(), "start": 1}
    label = {"run": "r", "episode_id": "e", "owner": owner, "holder": None, "groups": group.paths()}
    (tmp_path / "e-1.json").write_text(json.dumps(label))
    assert reap(tmp_path, "r") == ["e-1"]
    assert not any(os.path.exists(p) for p in group.paths())


async def test_a_limit_that_cannot_be_had_is_an_error_unless_asked_loosely(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "available", lambda: cgroups.Hierarchy(2, {}))  # as on a machine without
    with pytest.raises(SandboxError, match=r"limits of memory_bytes and cpus need control groups.*Delegate=yes"):
        await backend.create("e", limits=Limits(memory_bytes=64 << 20, cpus=2))
    sandbox = await backend.create("e", limits=Limits(memory_bytes=64 << 20, cpus=2, best_effort=True))
    assert f"memory {64 << 20} (not held), cpus 2 (not held)" in sandbox.isolation
    by = "not held" if os.getuid() == 0 or "uid 0" in sandbox.isolation else "rlimit"
    assert f"processes 1024 ({by})" in (await backend.create("e")).isolation


@pytest.mark.parametrize(
    ("name", "value"), [("memory_bytes", 0), ("cpus", 0.0), ("disk_bytes", -1), ("processes", 0), ("tmp_bytes", 1)]
)
def test_a_size_that_makes_no_sense_is_refused(name: str, value: float) -> None:
    with pytest.raises(SandboxError, match=f"limits.{name} = {value}: at least"):
        Limits(**{name: value})  # type: ignore[arg-type]


def test_no_limit_is_no_limit() -> None:
    assert Limits(file_bytes=None, cpu_seconds=None, open_files=None, processes=None).rlimits() == {"CORE": 0}


V1 = """24 32 0:21 / /sys/fs/cgroup ro,nosuid - tmpfs tmpfs ro,mode=755
30 24 0:27 /docker/c1 {point}/memory rw,nosuid - cgroup cgroup rw,memory
31 24 0:28 / {point}/cpu,cpuacct rw,nosuid - cgroup cgroup rw,cpu,cpuacct
33 24 0:29 / {point}/unified rw,nosuid - cgroup2 cgroup2 rw
"""


def test_where_version_1_is_found(tmp_path: Path) -> None:
    """Texts as cgroups(7) and proc(5) have them, with a container's root of a hierarchy."""
    for name in ("memory/job", "cpu,cpuacct/user/job"):
        (tmp_path / name).mkdir(parents=True)
    own = "5:cpu,cpuacct:/user/job\n4:memory:/docker/c1/job\n3:pids:/elsewhere\n0::/\n"
    found = cgroups.find(own, V1.format(point=tmp_path))
    assert found.version == 1
    assert found.folders == {"memory": tmp_path / "memory/job", "cpu": tmp_path / "cpu,cpuacct/user/job"}


def test_version_2_where_a_group_was_delegated(tmp_path: Path) -> None:
    """A folder in the place of cgroup2, which is not to be had here: a mock that takes what is written."""
    scope = tmp_path / "user.slice/run-1.scope"
    scope.mkdir(parents=True)
    mountinfo = f"30 24 0:27 / {tmp_path} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
    (scope / "cgroup.controllers").write_text("cpuset cpu memory pids\n")
    (scope / "cgroup.subtree_control").write_text("\n")
    (scope / "cgroup.type").write_text("domain\n")
    (scope / "cgroup.procs").write_text("77\n")
    cgroups.find("0::/user.slice/run-1.scope\n", mountinfo)
    assert (scope / "cgroup.subtree_control").read_text().split() == ["+cpu", "+memory", "+pids"]
    assert (scope / "openforge.main/cgroup.procs").read_text() == "77", "our processes make room"
    (scope / "cgroup.subtree_control").write_text("cpu memory pids\n")  # as the kernel reads it back
    (scope / "openforge.main/cgroup.controllers").write_text("")
    for own in ("run-1.scope", "run-1.scope/openforge.main"):
        found = cgroups.find(f"0::/user.slice/{own}\n", mountinfo)
        assert found == cgroups.Hierarchy(2, {name: scope for name in ("cpu", "memory", "pids")})
    limits = Limits(memory_bytes=1 << 30, cpus=1.5)
    group = cgroups.plan("s1", limits, found)
    assert group.processes() == [f"{scope}/openforge-s1/cgroup.procs"]
    group.make(limits)
    written = {p.name: p.read_text() for p in (scope / "openforge-s1").iterdir()}
    assert written == {"memory.max": str(1 << 30), "pids.max": "1024", "cpu.max": "150000 100000"}
    (scope / "openforge-s1/memory.events").write_text("low 0\nhigh 0\nmax 9\noom 2\noom_kill 2\noom_group_kill 0\n")
    assert group.memory_kills() == 2
