"""What an agent may try: each attempt fails, the host is unharmed, and the result says why."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from openforge.sandboxes import Limits, LocalBackend, LocalSandbox, SandboxError, SandboxFileError

PYTHON = "/usr/bin/python3"


async def python(sandbox: LocalSandbox, code: str) -> str:
    result = await sandbox.exec([PYTHON, "-c", code], timeout=60)
    assert result.stderr == b"" and result.exit_code == 0, result
    return result.stdout.decode().strip()


def own_address() -> str | None:
    """An address of this host that is not its loopback; nothing is sent to find it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            s.connect(("192.0.2.1", 9))
        except OSError:
            return None
        return str(s.getsockname()[0])


DIAL = """
import socket
for kind, address in {places!r}:
    with socket.socket(socket.AF_INET, getattr(socket, kind)) as s:
        try:
            s.connect(tuple(address))
            s.send(b"x")
            print("reached")
        except OSError as e:
            print(e.errno)
"""


async def test_private_and_public_addresses_and_name_servers_are_out_of_reach(backend: LocalBackend) -> None:
    places = [
        (k, (a, 53)) for k in ("SOCK_STREAM", "SOCK_DGRAM") for a in ("10.0.0.1", "192.168.1.1", "169.254.169.254")
    ]
    places += [
        ("SOCK_STREAM", ("1.1.1.1", 443)),
        ("SOCK_DGRAM", ("8.8.8.8", 53)),
        ("SOCK_DGRAM", ("255.255.255.255", 9)),
    ]
    own = own_address()
    if own is not None:
        places.append(("SOCK_STREAM", (own, 22)))
    for network in ("none", "proxy"):
        sandbox = await backend.create("e", network=network)
        answers = (await python(sandbox, DIAL.format(places=places))).split()
        assert set(answers) <= {str(errno.ENETUNREACH), str(errno.EACCES)} and len(answers) == len(places)
        resolve = (
            "import socket\ntry: print(socket.getaddrinfo('example.com', 80))\nexcept socket.gaierror: print('no')"
        )
        assert await python(sandbox, resolve) == "no"
        stub = DIAL.format(places=[("SOCK_STREAM", ("127.0.0.53", 53))])
        assert await python(sandbox, stub) == str(errno.ECONNREFUSED), "its own loopback, where nobody listens"


LISTEN = (
    "import socket; s = socket.create_server(('0.0.0.0', 9123)); print('up', flush=True); "
    "c, _ = s.accept(); print('reached', flush=True)"
)


async def test_another_sandboxs_port_is_out_of_reach(backend: LocalBackend, sandbox: LocalSandbox) -> None:
    other = await backend.create("other")
    await other.exec(["bash", "-c", f'setsid {PYTHON} -c "{LISTEN}" > said 2>&1 & until grep -q up said; do :; done'])
    dial = DIAL.format(places=[("SOCK_STREAM", ("127.0.0.1", 9123))])
    assert await python(sandbox, dial) == str(errno.ECONNREFUSED)
    assert await other.download_content("said") == b"up\n"
    assert await python(other, dial) == "reached", "it does listen"


async def test_no_path_leads_to_the_verifier_the_journal_or_another_sandbox(
    backend: LocalBackend, sandbox: LocalSandbox, tmp_path: Path
) -> None:
    """By name, through the first process's root, and by what is left of descriptors."""
    other = await backend.create("other")
    await other.upload_content(b"a neighbour's", "secret")
    journal = tmp_path / "partial" / "journal.jsonl"
    verifier = tmp_path / "tests" / "verify.sh"
    for path in (journal, verifier):
        path.parent.mkdir()
        path.write_text("a run's")
    places = [
        journal,
        verifier,
        Path.home(),
        backend.root,
        backend.root / other.sandbox_id,
        Path.cwd(),
        "/proc/1/cwd/x",
    ]
    look = (
        "import os\n"
        f"for p in {[str(p) for p in places]!r}:\n"
        "    for root in ('', '/proc/1/root', '/proc/self/root', '/workspace/../../..', '/proc/1/cwd'):\n"
        "        assert not os.path.lexists(root + p), root + p\n"
        "print(sorted(os.listdir('/proc/self/fd')))"
    )
    assert await python(sandbox, look) == "['0', '1', '2', '3']"
    found = await sandbox.exec(
        "find / -xdev \\( -name journal.jsonl -o -name verify.sh -o -name secret \\) 2>/dev/null"
    )
    assert found.stdout == b""


PTRACE = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for pid in (1, os.getppid(), {theirs}, {pytest}):
    libc.ptrace(16, pid, None, None)  # PTRACE_ATTACH
    print(ctypes.get_errno())
"""


async def test_a_neighbour_cannot_be_traced(backend: LocalBackend, sandbox: LocalSandbox) -> None:
    other = await backend.create("other")
    theirs = max(other.holder_pid, 5000)  # of a number that no process of so young a sandbox has
    answers = await python(sandbox, PTRACE.format(theirs=theirs, pytest=max(os.getpid(), 5000)))
    # Of the two that are its own: an agent that traced its sandbox's first process could have it exit.
    first, supervisor, *outside = (int(a) for a in answers.split())
    assert first == errno.EPERM and supervisor == errno.EPERM
    assert outside == [errno.ESRCH, errno.ESRCH]


async def test_proc_and_sys_take_no_writes(sandbox: LocalSandbox) -> None:
    code = """
import os
taken = []
for root in ("/proc/sys", "/sys"):
    for folder, _, files in os.walk(root):
        for name in files:
            try:
                os.close(os.open(os.path.join(folder, name), os.O_WRONLY))
                taken.append(os.path.join(folder, name))
            except OSError:
                pass
for name in os.listdir("/proc"):
    path = f"/proc/{name}"
    if not name.isdigit() and os.path.isfile(path):
        try:
            os.close(os.open(path, os.O_WRONLY))
            taken.append(path)
        except OSError:
            pass
print(taken)
"""
    taken = set(eval(await python(sandbox, code)))  # a list of strings that our own code printed
    nowhere = {p for p in taken if (await sandbox.exec(["stat", "-c", "%t,%T", p])).stdout.strip() == b"1,3"}
    assert taken == nowhere, "only what /dev/null covers may be written to"


async def test_a_sparse_file_of_ten_gigabytes_is_refused_at_once(backend: LocalBackend, tmp_path: Path) -> None:
    sandbox = await backend.create("episode", limits=Limits(file_bytes=None))
    assert (await sandbox.exec("truncate -s 10G sparse && stat -c %s sparse")).stdout == b"10737418240\n"
    with pytest.raises(SandboxFileError, match="more than") as e:
        await sandbox.download_file("sparse", tmp_path / "out")
    assert e.value.errno == errno.EFBIG
    assert not (tmp_path / "out").exists() and list(tmp_path.glob("*out*")) == []


async def test_a_device_and_a_pipe_of_the_agent_hold_nothing_up(sandbox: LocalSandbox, tmp_path: Path) -> None:
    result = await sandbox.exec("mknod disk b 8 0; mknod memory c 1 1; mkfifo pipe; ls")
    assert result.stdout == b"pipe\n" and result.stderr.count(b"Operation not permitted") == 2
    for name in ("pipe", "/dev/tty", "/dev/urandom", "/dev/full"):
        with pytest.raises(SandboxFileError, match=f"{name} inside the sandbox"):
            await sandbox.download_file(name, tmp_path / "out")
    await sandbox.upload_content(b"x", "pipe")
    assert await sandbox.download_content("pipe") == b"x"


async def test_a_child_that_will_not_die_dies(sandbox: LocalSandbox) -> None:
    stubborn = "trap '' TERM HUP INT; while :; do sleep 1; done"
    command = f'setsid bash -c "{stubborn}" </dev/null >/dev/null 2>&1 & disown; {stubborn}'
    result = await sandbox.exec(command, timeout=1)
    assert (result.exit_code, result.timed_out) == (None, True)
    listed = await sandbox.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    assert b"trap" not in listed.stdout


async def test_what_is_printed_to_a_person_is_escaped(sandbox: LocalSandbox) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\r\u202eevil\x9b1m"
    result = await sandbox.exec(["printf", "%s", evil])
    assert result.stdout.decode() == evil, "what is recorded is exact"
    with pytest.raises(SandboxFileError) as e:
        await sandbox.download_content(f"{evil}.txt")
    assert str(e.value).isprintable()
    assert "\\x1b]0;owned\\x07\\x1b[2J\\r\\u202eevil\\x9b1m.txt inside the sandbox: No such file" in str(e.value)
    with pytest.raises(SandboxError) as refused:
        await sandbox.upload_content(b"", f"/etc/{evil}")
    assert str(refused.value).isprintable()


async def test_the_hosts_network_is_only_open_where_it_was_asked_for(backend: LocalBackend) -> None:
    sandbox = await backend.create("e", network="open")
    assert sandbox.network == "open" and "the host's network" in sandbox.isolation
    assert "net" not in sandbox.isolation.split(":")[1].split(";")[0].split(",")
    with socket.create_server(("127.0.0.1", 0)) as server:
        dial = DIAL.format(places=[("SOCK_STREAM", ("127.0.0.1", server.getsockname()[1]))])
        assert await python(sandbox, dial) == "reached"
        connection = await sandbox.connect(server.getsockname()[1])
        connection.close()
    resolver = Path("/etc/resolv.conf").read_bytes()
    assert await sandbox.download_content("/etc/resolv.conf") == resolver
    default = await backend.create("e")
    assert default.network == "proxy" and "the host's network" not in default.isolation
    assert await default.download_content("/etc/resolv.conf") == b""


async def test_all_at_once_and_the_host_is_unharmed(backend: LocalBackend) -> None:
    """The attacks of one sandbox side by side; a neighbour works on meanwhile."""
    hostile = await backend.create("hostile", limits=Limits(processes=60, disk_bytes=8 << 20, tmp_bytes=8 << 20))
    neighbour = await backend.create("neighbour")
    files = len(os.listdir("/proc/self/fd"))
    attacks = [
        "for i in 1 2 3 4; do head -c 1G /dev/zero > /tmp/$i; head -c 1G /dev/zero > $i; done 2>/dev/null",
        "while :; do (exec sleep 60 &) 2>/dev/null || exit; done",
        "yes | head -c 200M",
        "kill -9 -1",
        "setsid bash -c \"trap '' TERM; sleep 60\" & sleep 60",
    ]
    for attack in attacks:
        result = await hostile.exec(["/bin/dash" if "exec sleep" in attack else "/bin/bash", "-c", attack], timeout=2)
        assert len(result.stdout) <= (1 << 20) + 100
        assert (await neighbour.exec("echo fine")).stdout == b"fine\n"
    await hostile.end_processes()
    await hostile.delete()
    assert (await neighbour.exec("echo fine")).stdout == b"fine\n"
    assert len(os.listdir("/proc/self/fd")) <= files
    assert {p.stem for p in backend.root.iterdir()} == {neighbour.sandbox_id}
