"""One protocol, three backends: this machine, Orchard (its mock), and our own server in a process of its own."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import itertools
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import mock_orchard
import pytest
from mock_orchard import OPTIONS
from served import KEY, Served

from openforge.sandboxes import (
    Backend,
    Bind,
    Limits,
    LocalBackend,
    Owner,
    Sandbox,
    SandboxError,
    SandboxFileError,
    SandboxLost,
    SandboxUnsupported,
)
from openforge.sandboxes.orchard import OrchardBackend

SHARE = "shared"  # folder that our server may bind


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("server")
    (folder / SHARE).mkdir()
    served = Served(folder / "state", "--allow", "127.0.0.1:*", "--share", str(folder / SHARE))
    yield served
    served.end()


@pytest.fixture(params=["local", "orchard", "server"])
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
async def backend(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Backend]:
    owner, options = Owner.current(), replace(OPTIONS, network_policy=True)
    async with LocalBackend(tmp_path / "local", "run_a", owner) as local:
        if kind == "local":
            yield local
        elif kind == "orchard":
            async with (
                mock_orchard.serving(local) as mock,
                OrchardBackend(
                    tmp_path / "ids", "run_a", owner, url=mock.url, key=mock_orchard.KEY, options=options
                ) as orchard,
            ):
                yield orchard
        else:
            served: Served = request.getfixturevalue("server")
            options = replace(options, image=None)
            async with OrchardBackend(
                tmp_path / "ids", "run_a", owner, url=served.url, key=KEY, options=options
            ) as ours:
                yield ours


@pytest.fixture
async def sandbox(backend: Backend) -> Sandbox:
    return await backend.create("episode", network="none")


async def alive_inside(sandbox: Sandbox) -> bytes:
    return (await sandbox.exec("cat /proc/[0-9]*/cmdline")).stdout


# ---- commands ------------------------------------------------------------------------------------------------------
async def test_commands_and_their_streams(sandbox: Sandbox) -> None:
    assert (await sandbox.exec("echo {a,b} $0")).stdout == b"a b /bin/bash\n"
    assert (await sandbox.exec(["printf", "%s|", "a b", "$HOME", "é"])).stdout == "a b|$HOME|é|".encode()
    data = bytes(range(256)) * 1000
    result = await sandbox.exec("cat; echo problem >&2; exit 3", stdin=data)
    assert (result.exit_code, result.stdout, result.stderr, result.timed_out) == (3, data, b"problem\n", False)
    assert (await sandbox.exec("cat")).stdout == b"", "without stdin it is empty"


async def test_environment_and_folder(sandbox: Sandbox) -> None:
    result = await sandbox.exec("echo $A $HOME $TMPDIR $LANG; pwd", env={"A": "x y"})
    assert result.stdout == b"x y /home/agent /tmp C.UTF-8\n/workspace\n"
    assert (await sandbox.exec("env | grep -c -i python")).stdout == b"0\n"
    await sandbox.exec("mkdir 'a b'")
    assert (await sandbox.exec("pwd", cwd="a b")).stdout == b"/workspace/a b\n"
    assert (await sandbox.exec("pwd", cwd="/tmp")).stdout == b"/tmp\n"
    with pytest.raises(SandboxFileError, match="/workspace/nowhere inside the sandbox: No such file") as e:
        await sandbox.exec("pwd", cwd="nowhere")
    assert e.value.errno == errno.ENOENT
    await sandbox.exec("touch file")
    with pytest.raises(SandboxFileError, match="/workspace/file inside the sandbox: Not a directory"):
        await sandbox.exec("pwd", cwd="file")


async def test_exit_codes(sandbox: Sandbox) -> None:
    assert (await sandbox.exec("kill -9 $$")).exit_code == -9
    assert (await sandbox.exec("kill -TERM $$")).exit_code == -15
    assert (await sandbox.exec("exit 137")).exit_code == 137
    assert (await sandbox.exec("exit 124")).exit_code == 124
    missing = await sandbox.exec(["no-such-program"])
    assert missing.exit_code == 127 and b"no-such-program: No such file" in missing.stderr
    assert (await sandbox.exec(["/etc/passwd"])).exit_code == 126


async def test_long_output_keeps_its_start_and_end(sandbox: Sandbox, tmp_path: Path) -> None:
    log = tmp_path / "log"
    result = await sandbox.exec("echo first; head -c 5000000 /dev/zero | tr '\\0' x; echo last", log=log)
    assert result.stdout.startswith(b"first\nxxx") and result.stdout.endswith(b"xxxlast\n")
    left_out = 6 + 5_000_000 + 5 - (1 << 20)
    assert f"\n[... {left_out} bytes left out ...]\n".encode() in result.stdout
    assert len(result.stdout) < (1 << 20) + 100
    assert log.read_bytes() == b"first\n" + b"x" * 5_000_000 + b"last\n"


async def test_a_log_grows_while_the_command_runs(sandbox: Sandbox, tmp_path: Path) -> None:
    log = tmp_path / "log"
    await sandbox.exec("echo one; echo two >&2", log=log)
    task = asyncio.create_task(sandbox.exec("echo three; until [ -e go ]; do sleep 0.02; done", log=log))
    while b"three" not in log.read_bytes():
        assert not task.done()
        await asyncio.sleep(0.01)
    await sandbox.exec("touch go")
    assert (await task).stdout == b"three\n"
    assert sorted(log.read_text().split()) == ["one", "three", "two"]


async def test_a_timeout_kills_all_descendants_and_nothing_else(sandbox: Sandbox) -> None:
    other = asyncio.create_task(sandbox.exec("touch up; until [ -e go ]; do sleep 0.02; done; echo done", timeout=60))
    await sandbox.exec("until [ -e up ]; do sleep 0.02; done", timeout=60)
    command = "trap '' TERM; (setsid bash -c '(setsid sleep 931 &)'; setsid sleep 932 & wait) & echo begun; sleep 933"
    result = await sandbox.exec(command, timeout=1)
    assert (result.exit_code, result.timed_out, result.stdout) == (None, True, b"begun\n")
    assert b"sleep\x0093" not in await alive_inside(sandbox)
    await sandbox.exec("touch go")
    assert (await other).stdout == b"done\n"


async def test_a_daemon_outlives_its_command_and_does_not_hold_it_up(sandbox: Sandbox) -> None:
    result = await asyncio.wait_for(sandbox.exec("sleep 934 & echo started"), 30)  # it keeps stdout open
    assert (result.exit_code, result.stdout) == (0, b"started\n")
    # The shell has forked it; it may not be what it will be yet.
    async with asyncio.timeout(30):
        while b"sleep\x00934" not in await alive_inside(sandbox):
            pass


async def test_a_cancelled_command_leaves_nothing(sandbox: Sandbox) -> None:
    task = asyncio.create_task(sandbox.exec("setsid sleep 935 & touch up; sleep 936"))
    await sandbox.exec("until [ -e up ]; do sleep 0.02; done", timeout=60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert b"sleep\x0093" not in await alive_inside(sandbox)


async def test_commands_run_side_by_side(sandbox: Sandbox) -> None:
    wait = "touch {0}; until [ -e {1} ]; do sleep 0.02; done; echo {0}"
    pairs = ("abc", "bca")
    results = await asyncio.gather(*(sandbox.exec(wait.format(a, b), timeout=60) for a, b in zip(*pairs, strict=True)))
    assert [r.stdout for r in results] == [b"a\n", b"b\n", b"c\n"]


async def test_end_processes(sandbox: Sandbox, tmp_path: Path) -> None:
    await sandbox.exec("setsid sleep 937 >/dev/null 2>&1 & echo x > file")
    log = tmp_path / "log"
    running = asyncio.create_task(sandbox.exec("touch up; sleep 938", log=log))
    plain = asyncio.create_task(sandbox.exec("touch up2; sleep 939"))
    await sandbox.exec("until [ -e up ] && [ -e up2 ]; do sleep 0.02; done", timeout=60)
    await sandbox.end_processes()
    assert (await running).exit_code == -9 and (await plain).exit_code == -9
    assert b"sleep\x0093" not in await alive_inside(sandbox)
    assert await sandbox.download_content("file") == b"x\n"


async def test_patches(sandbox: Sandbox) -> None:
    await sandbox.upload_content(b"one\ntwo\n", "f.txt")
    patch = "--- a/f.txt\n+++ b/f.txt\n@@ -1,2 +1,2 @@\n one\n-two\n+three\n"
    assert (await sandbox.apply_patch(patch)).exit_code == 0
    assert await sandbox.download_content("f.txt") == b"one\nthree\n"
    assert (await sandbox.apply_patch(patch)).exit_code == 1


# ---- files ---------------------------------------------------------------------------------------------------------
async def test_content_and_modes(sandbox: Sandbox, tmp_path: Path) -> None:
    data = bytes(range(256)) * 40_000  # 10 MB: in pieces
    await sandbox.upload_content(data, "a b/c/ü 'x'.bin", 0o750)
    assert await sandbox.download_content("a b/c/ü 'x'.bin") == data
    result = await sandbox.exec("stat -c '%a %s %U' 'a b/c/'*; sha256sum < 'a b/c/'*; ls -A 'a b/c' | wc -l")
    sha256 = hashlib.sha256(data).hexdigest()
    assert result.stdout.decode().split() == ["750", "10240000", "agent", sha256, "-", "1"]
    await sandbox.upload_content(b"", "/home/agent/.config/tool.toml")
    assert await sandbox.download_content("/home/agent/.config/tool.toml") == b""
    (tmp_path / "in").write_bytes(b"\0data")
    (tmp_path / "in").chmod(0o711)
    await sandbox.upload_file(tmp_path / "in", "in")
    assert (await sandbox.exec("stat -c %a in")).stdout == b"711\n"
    assert await sandbox.download_file("in", tmp_path / "new" / "out") == 5
    assert (tmp_path / "new" / "out").read_bytes() == b"\0data"


async def test_listing(sandbox: Sandbox) -> None:
    await sandbox.exec("mkdir d; echo hi > d/f; ln -s nowhere d/dangling; mkdir d/sub; mkfifo d/pipe; touch -d @77 d/f")
    entries = await sandbox.list_files("d")
    assert [(e.name, e.type) for e in entries] == [
        ("dangling", "symlink"),
        ("f", "file"),
        ("pipe", "other"),
        ("sub", "directory"),
    ]
    assert (entries[1].size, entries[1].modified) == (3, 77.0)
    assert {"workspace", "home", "usr", "proc"} <= {e.name for e in await sandbox.list_files()}
    for path, number in [("nowhere", errno.ENOENT), ("d/f", errno.ENOTDIR)]:
        with pytest.raises(SandboxFileError, match=f"/workspace/{path} inside the sandbox: ") as e:
            await sandbox.list_files(path)
        assert e.value.errno == number


async def test_a_download_of_what_is_no_file(sandbox: Sandbox) -> None:
    await sandbox.exec("mkfifo pipe; mkdir d; truncate -s 300M sparse; touch locked; chmod 0 locked; ln -s nowhere l")
    for remote, number in [
        ("pipe", errno.EINVAL),
        ("d", errno.EISDIR),
        ("sparse", errno.EFBIG),
        ("/dev/zero", errno.EINVAL),
        ("missing", errno.ENOENT),
        ("l", errno.ENOENT),
        ("locked", errno.EACCES),
    ]:
        with pytest.raises(SandboxFileError, match=f"{remote} inside the sandbox: ") as e:
            await sandbox.download_content(remote)
        assert e.value.errno == number, remote


async def test_an_upload_replaces_what_the_agent_planted(sandbox: Sandbox, kind: str) -> None:
    traps = [
        ("ln -s /etc/passwd f", "f"),
        ("ln -s /etc d", "d/passwd"),
        ("mkfifo f", "f"),
        ("mkdir -p f/g; touch f/g/h; chmod 0 f/g f", "f"),
        ("touch d", "d/f"),
    ]
    # In one call and in pieces; at Orchard in the call itself, or not.
    sizes = {"local": [8], "orchard": [100_000], "server": [8, 9_000_000]}[kind]
    for i, ((trap, remote), size) in enumerate(itertools.product(traps, sizes)):
        folder = f"/workspace/{i}"
        assert (await sandbox.exec(f"mkdir {folder}; cd {folder}; {trap}")).exit_code == 0
        await sandbox.upload_content(b"v" * size, f"{folder}/{remote}")
        assert await sandbox.download_content(f"{folder}/{remote}") == b"v" * size, trap
        assert (await sandbox.exec(f"! test -L {remote} && ! test -L d", cwd=folder)).exit_code == 0, trap
    assert (await sandbox.exec("head -n 1 /etc/passwd")).stdout.startswith(b"root:x:0:0:root:/root:")
    for remote in ("../x", "/etc/x", "/", ".", "", "a\0b", "/usr/bin/x"):
        with pytest.raises(SandboxError):
            await sandbox.upload_content(b"x", remote)


# ---- life ----------------------------------------------------------------------------------------------------------
async def test_names_networks_and_heartbeats(backend: Backend, kind: str) -> None:
    one, two = await asyncio.gather(backend.create("e", network="none"), backend.create("e", network="proxy"))
    assert one.sandbox_id != two.sandbox_id and (one.network, two.network) == ("none", "proxy")
    assert {"local": "bubblewrap", "orchard": "Orchard pod", "server": "bubblewrap"}[kind] in one.isolation
    await one.start_heartbeat(60)
    await one.stop_heartbeat()
    assert (await one.exec("echo on")).stdout == b"on\n"


async def test_a_companion_is_apart_and_goes_with_its_sandbox(sandbox: Sandbox) -> None:
    other = await sandbox.companion()
    await sandbox.upload_content(b"x", "mine.txt")
    assert (await other.exec("ls")).stdout == b""
    await sandbox.delete()
    await sandbox.delete()
    for gone in (sandbox, other):
        with pytest.raises(SandboxLost):
            await gone.exec("true")
        with pytest.raises(SandboxLost):
            await gone.download_content("f")


async def test_binds(backend: Backend, kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    folder = tmp_path
    if kind == "server":
        folder = Path(request.getfixturevalue("server").state).parent / SHARE
    (folder / "tool").mkdir()
    (folder / "tool" / "run").write_text("#!/bin/sh\necho ran\n")
    (folder / "tool" / "run").chmod(0o755)
    (folder / "one").write_text("file\n")
    binds = [Bind(folder / "tool", "/tmp/opt/tool"), Bind(folder / "one", "/tmp/opt/one")]
    sandbox = await backend.create("e", network="none", binds=binds)
    assert (await sandbox.exec("/tmp/opt/tool/run; cat /tmp/opt/one")).stdout == b"ran\nfile\n"
    with pytest.raises(SandboxError, match="nowhere"):
        await backend.create("e", network="none", binds=[Bind(folder / "nowhere", "/tmp/x")])


async def test_a_bind_that_the_server_does_not_share_is_copied(backend: Backend, kind: str, tmp_path: Path) -> None:
    (tmp_path / "one").write_text("file\n")
    sandbox = await backend.create("e", network="none", binds=[Bind(tmp_path / "one", "/workspace/deep/one")])
    assert (await sandbox.exec("cat deep/one")).stdout == b"file\n"


class StubProxy:
    """Answers every connection with the episode's first line, adopted or at its public address."""

    def __init__(self) -> None:
        self.servers: list[asyncio.Server] = []
        self.port = 0

    async def start(self) -> None:
        self.servers.append(await asyncio.start_server(self._answer, "127.0.0.1", 0))
        self.port = self.servers[0].sockets[0].getsockname()[1]

    def public_url(self, episode_id: str) -> str:
        return f"http://127.0.0.1:{self.port}/s/{episode_id}"

    async def adopt(self, episode_id: str, listener: socket.socket) -> None:
        self.servers.append(await asyncio.start_server(self._answer, sock=listener))

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"heard " + await reader.readline())
        writer.close()

    def close(self) -> None:
        for server in self.servers:
            server.close()


async def test_routes(backend: Backend, kind: str) -> None:
    proxy = StubProxy()
    await proxy.start()
    sandbox = await backend.create("e1")
    url = await sandbox.route(proxy, port=8085)
    # A pod of Orchard's has no listener of ours: it is told the public address, and its network decides.
    assert url == (proxy.public_url("e1") if kind == "orchard" else "http://127.0.0.1:8085/s/e1")
    if kind != "orchard":
        ask = "exec 3<>/dev/tcp/127.0.0.1/8085; echo GET /x >&3; cat <&3"
        assert (await sandbox.exec(ask, timeout=30)).stdout == b"heard GET /x\n"
    closed = await backend.create("e1", network="none")
    with pytest.raises(SandboxError, match="network 'none'; a route takes 'proxy'"):
        await closed.route(proxy)
    proxy.close()


SERVE = (
    "import socket; s = socket.create_server(('127.0.0.1', 9100)); "
    "c, _ = s.accept(); c.sendall(c.recv(99).upper()); c.recv(1)"
)


async def test_connect(sandbox: Sandbox, kind: str) -> None:
    if kind == "orchard":
        with pytest.raises(SandboxUnsupported, match="no way in to port 9100"):
            await sandbox.connect(9100)
        return
    with pytest.raises(ConnectionRefusedError, match="9100"):
        await sandbox.connect(9100)
    serving = asyncio.create_task(sandbox.exec(["python3", "-c", SERVE], timeout=60))
    while True:
        try:
            connection = await sandbox.connect(9100)
            break
        except ConnectionRefusedError:
            assert not serving.done()
    with connection:
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(connection, b"ping")
        assert await loop.sock_recv(connection, 99) == b"PING"
    assert (await serving).exit_code == 0


async def test_limits_of_a_process(backend: Backend) -> None:
    sandbox = await backend.create("e", network="none", limits=Limits(file_bytes=1 << 20, open_files=64))
    result = await sandbox.exec("ulimit -f; ulimit -n; head -c 2000000 /dev/zero > f; stat -c %s f")
    assert result.stdout.split() == [b"1024", b"64", b"1048576"]
