"""What a hostile process inside cannot do. As root, what depends on the user runs once more as an ordinary one."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from openforge.sandboxes import Bind, Limits, LocalBackend, LocalSandbox, Network, SandboxError

NAMESPACES = ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup")


async def out(sandbox: LocalSandbox, command: str) -> str:
    result = await sandbox.exec(command, timeout=20)
    return (result.stdout + result.stderr).decode()


async def test_no_capability_is_left_and_none_can_be_gained(sandbox: LocalSandbox) -> None:
    status = dict(line.split(":\t", 1) for line in (await out(sandbox, "cat /proc/self/status")).splitlines())
    assert {status[f"Cap{s}"] for s in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {"0" * 16}
    assert status["NoNewPrivs"] == "1"
    assert status["Uid"].split() == ["1000"] * 4


async def test_every_namespace_is_its_own_and_the_string_says_so(sandbox: LocalSandbox) -> None:
    inside = (await out(sandbox, f"cd /proc/self/ns; readlink {' '.join(NAMESPACES)}")).split()
    outside = [os.readlink(f"/proc/self/ns/{n}") for n in NAMESPACES]
    assert len(inside) == len(NAMESPACES)
    assert not set(inside) & set(outside)
    assert ": user,mnt,pid,net,ipc,uts,cgroup; caps none; no_new_privs" in sandbox.isolation
    assert ("uid 0 outside" in sandbox.isolation) == (os.getuid() == 0)


ATTEMPTS = [
    "mount -o remount,rw /usr",
    "mount -o remount,bind,rw /usr",
    "mount -t tmpfs none /workspace",
    "umount /usr",
    "touch /usr/planted",
    "touch /planted",
    "touch /etc/planted",
    "echo x > /proc/sys/kernel/hostname",
    "cat /proc/sys/kernel/core_pattern > /proc/sys/kernel/core_pattern",
    "cat /proc/sys/vm/swappiness > /proc/sys/vm/swappiness",
    "cat /proc/sys/kernel/ns_last_pid > /proc/sys/kernel/ns_last_pid",
    "echo x > /dev/planted",
    "echo x > /run/planted",
    "echo '#' > /proc/sysrq-trigger",
    "mknod /workspace/disk b 8 0",
    "mknod /tmp/disk c 1 1",
    "cat /etc/shadow",
    "ls /root",
    "ls /sys/kernel",
    "unshare --user true",
    "unshare --user --map-root-user --mount true",
    "unshare --mount true",
    "unshare --net true",
    "/usr/sbin/chroot / true",
    "hostname other",
    "nice -n -5 true 2>&1 | grep -v denied",
    "nsenter --target 1 --mount true",
]


async def test_no_attempt_to_get_out_succeeds(sandbox: LocalSandbox) -> None:
    for attempt in ATTEMPTS:
        program = attempt.split()[0]
        assert (await sandbox.exec(f"command -v {program}")).exit_code == 0, f"{program} must be there to be refused"
    codes = {a: (await sandbox.exec(a, timeout=20)).exit_code for a in ATTEMPTS}
    assert {a: c for a, c in codes.items() if c in (0, None)} == {}
    assert not Path("/usr/planted").exists()


async def test_the_hosts_files_are_not_there(sandbox: LocalSandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("host secret")
    result = await sandbox.exec(["cat", str(secret)])
    assert result.exit_code == 1 and b"host secret" not in result.stdout
    found = await out(sandbox, "ls -d /home/* /root /mnt /srv /boot /opt /sys 2>/dev/null; cat /etc/passwd")
    assert found.splitlines()[0] == "/home/agent"
    assert [line.split(":")[0] for line in found.splitlines()[1:]] == ["root", "agent", "nobody"]


@pytest.mark.parametrize("network", ["none", "proxy"])
async def test_the_hosts_loopback_is_out_of_reach(backend: LocalBackend, network: Network) -> None:
    sandbox = await backend.create("episode", network=network)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        dial = f"exec 3<>/dev/tcp/127.0.0.1/{port}"
        assert subprocess.run(["bash", "-c", dial], check=False).returncode == 0, "the server answers outside"
        assert (await sandbox.exec(dial)).exit_code != 0
    interfaces = await out(sandbox, "tail -n +3 /proc/net/dev")
    assert [line.split(":")[0].strip() for line in interfaces.splitlines()] == ["lo"]
    assert await out(sandbox, "tail -n +2 /proc/net/route") == ""


async def test_an_abstract_socket_of_the_host_is_out_of_reach(sandbox: LocalSandbox) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0openforge-test-{os.getpid()}")
        name = f"openforge-test-{os.getpid()}"
        assert name in Path("/proc/net/unix").read_text()
        assert name not in await out(sandbox, "cat /proc/net/unix")


async def test_other_processes_are_out_of_sight_and_reach(backend: LocalBackend, sandbox: LocalSandbox) -> None:
    other = await backend.create("other")
    await other.exec("echo secret > /workspace/f; sleep 300 >/dev/null 2>&1 &")
    assert "No such file" in await out(sandbox, "cat /workspace/f")
    listed = await out(sandbox, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    assert "sleep infinity" in listed and "sleep 300" not in listed and "pytest" not in listed
    # Our own pid is a living process outside; inside, the number names nobody.
    assert "No such process" in await out(sandbox, f"kill -0 {max(os.getpid(), 1000)}")
    assert "No such process" in await out(sandbox, f"kill -0 {other.holder_pid}")
    assert b"sleep\x00300" in (await other.exec("cat /proc/[0-9]*/cmdline")).stdout


async def test_the_process_that_joined_cannot_be_read_by_what_it_started(sandbox: LocalSandbox) -> None:
    """Its memory is a copy of the host's, its descriptors are the host's."""
    for part in ("readlink exe", "readlink fd/0", "cat fd/3", "ls root/", "ls cwd/", "cat environ", "cat maps"):
        result = await sandbox.exec(f"{part.replace(' ', ' /proc/$PPID/')}; exit $?")
        assert result.stdout == b"" and result.exit_code != 0, (part, result)
    result = await sandbox.exec("head -c 1 /proc/$PPID/mem")
    assert b"Permission denied" in result.stderr
    assert (await out(sandbox, "ls /proc/self/fd | wc -l")).strip() == "4"  # three and the folder being listed


async def test_limits(backend: LocalBackend) -> None:
    limits = Limits(file_bytes=1 << 20, tmp_bytes=4 << 20, processes=40)
    sandbox = await backend.create("episode", limits=limits)
    result = await sandbox.exec("head -c 3000000 /dev/zero > big; echo $?; stat -c %s big; ulimit -Hc")
    assert result.stdout.split() == [b"153", b"1048576", b"0"]  # 128 + SIGXFSZ
    result = await sandbox.exec("for i in 1 2 3 4 5 6; do head -c 1000000 /dev/zero > /tmp/$i || exit 3; done")
    assert result.exit_code == 3 and b"No space left" in result.stderr
    if os.getuid() != 0 and "OPENFORGE_ROOTLESS" not in os.environ:  # the kernel exempts root, see `Limits`
        result = await sandbox.exec("for i in $(seq 100); do sleep 60 & done", timeout=20)
        assert b"Resource temporarily unavailable" in result.stderr
        await sandbox.end_processes()


async def test_binds_are_read_only_and_must_exist(backend: LocalBackend, tmp_path: Path) -> None:
    (tmp_path / "tool").mkdir()
    (tmp_path / "tool" / "f").write_text("data")
    sandbox = await backend.create("e", binds=[Bind(tmp_path / "tool"), Bind(tmp_path / "tool", "/opt/tool")])
    assert await out(sandbox, f"cat '{tmp_path}/tool/f' /opt/tool/f") == "datadata"
    assert "Read-only" in await out(sandbox, "echo x > /opt/tool/f")
    assert "Read-only" in await out(sandbox, f"rm '{tmp_path}/tool/f'")
    with pytest.raises(SandboxError, match="nowhere does not exist"):
        await backend.create("e", binds=[Bind(tmp_path / "nowhere")])


async def test_two_sandboxes_look_the_same_inside(backend: LocalBackend) -> None:
    looks = [
        await out(await backend.create(f"e{i}"), "env | sort; pwd; hostname; id; ulimit -a; mount; ls -a . ~ /")
        for i in range(2)
    ]
    assert looks[0] == looks[1] and "/workspace" in looks[0]
    assert "böxes" not in looks[0] and "episode" not in looks[0]


@pytest.mark.skipif(os.getuid() != 0, reason="these tests run as an ordinary user already")
def test_all_of_this_as_an_ordinary_user(tmp_path: Path) -> None:
    """In a user namespace as uid 4242, without a capability: what an ordinary user is to the kernel."""
    unshare = ["unshare", "--user", "--map-user=4242", "--map-group=4242"]
    files = [
        str(Path(__file__).with_name(f"test_{name}.py"))
        for name in ("images", "isolation", "join", "life", "limits", "route")
    ]
    # Without this very test, which would start itself again.
    places = [f"--basetemp={tmp_path / 'rootless'}", "-k", "not as_an_ordinary_user", *files]
    done = subprocess.run(
        [*unshare, sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *places],
        env={**os.environ, "OPENFORGE_ROOTLESS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) > 25, done.stdout[-3000:]
