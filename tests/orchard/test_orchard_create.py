"""From the request for a sandbox to one that is ready, and to the last trace of it."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mock_orchard
import pytest
from conftest import OPTIONS
from mock_orchard import MockOrchard

from openforge.sandboxes import (
    Bind,
    Network,
    Owner,
    SandboxError,
    SandboxFull,
    SandboxLost,
    SandboxUnsupported,
)
from openforge.sandboxes.orchard import OrchardBackend, OrchardSandbox, binds, ledger


def made(mock: MockOrchard, root: Path, key: str | None = mock_orchard.KEY, **options: Any) -> OrchardBackend:
    return OrchardBackend(root, "run_a", Owner.current(), url=mock.url, key=key, options=replace(OPTIONS, **options))


def test_ids_are_dns_labels_and_never_the_same() -> None:
    for run, episode in [("run_a", "Ep_1"), ("R" * 80, "-x-"), ("ü", ""), ("9", "a/b.c")]:
        names = {ledger.name(run, episode) for _ in range(50)}
        assert len(names) == 50
        assert all(re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,48}[a-z0-9])?", n) for n in names)


async def test_what_is_asked_of_the_service(mock: MockOrchard, tmp_path: Path) -> None:
    async with made(mock, tmp_path / "ids", cpu="2", memory="4Gi", network_policy=True) as backend:
        none, proxy, opened = [await backend.create("e", network=n) for n in ("none", "proxy", "open")]
        other = await none.companion(image="python:3.11")
        assert [c["block_network"] for c in mock.creates] == [True, True, False, True]
        assert [c["image"] for c in mock.creates] == ["debian:12"] * 3 + ["python:3.11"]
        assert {(c["cpu"], c["memory"], c["timeout"]) for c in mock.creates} == {("2", "4Gi", 20)}
        assert [s.network for s in (none, proxy, opened)] == ["none", "proxy", "open"]
        assert "egress denied but to the proxy" in proxy.isolation and "egress open" in opened.isolation
        await none.delete()
        with pytest.raises(SandboxLost):
            await other.exec("true")
        assert set(mock.records) == {proxy.sandbox_id, opened.sandbox_id}
    assert not mock.records
    assert not list((tmp_path / "ids").iterdir())


async def test_what_cannot_be_had_is_refused_before_anything_is_made(mock: MockOrchard, tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="set SANDBOX_BASE_URL to its address"):
        OrchardBackend(tmp_path, "r", Owner.current())
    with pytest.raises(SandboxError, match=r"SANDBOX_BASE_URL is 'localhost:8000'; it must be an http:// or https://"):
        OrchardBackend(tmp_path, "r", Owner.current(), url="localhost:8000")
    cases: list[tuple[dict[str, Any], Network, str]] = [
        ({}, "proxy", "takes the NetworkPolicy of docs/connect-orchard.md"),
        ({"image": None}, "none", "makes pods of a container image: name one"),
        ({"episode_seconds": 7201.0}, "none", "an episode may take 7201 s, but .* deletes a sandbox after 7200 s"),
    ]
    for options, network, match in cases:
        async with made(mock, tmp_path, **options) as backend:
            with pytest.raises(SandboxUnsupported, match=match):
                await backend.create("e", network=network)
    async with made(mock, tmp_path) as backend:
        with pytest.raises(SandboxError, match="no-such-folder does not exist and cannot be bound"):
            await backend.create("e", network="none", binds=[Bind(tmp_path / "no-such-folder")])
    assert not mock.creates


async def test_keys(mock: MockOrchard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, match in [
        (None, "asks for a key: set SANDBOX_API_KEY"),
        ("wrong", "does not know the key in SANDBOX_API_KEY"),
    ]:
        async with made(mock, tmp_path, key) as backend:
            with pytest.raises(SandboxError, match=match):
                await backend.create("e", network="none")
    monkeypatch.setenv("SANDBOX_API_KEY", mock_orchard.KEY)
    monkeypatch.setenv("SANDBOX_BASE_URL", mock.url + "/")
    async with OrchardBackend(tmp_path, "r", Owner.current(), options=OPTIONS) as backend:
        assert (await (await backend.create("e", network="none")).exec("echo ok")).stdout == b"ok\n"


async def test_a_full_service_is_asked_again(mock: MockOrchard, backend: OrchardBackend) -> None:
    quota = 'pods "sandbox-x" is forbidden: exceeded quota: sandboxes, requested: cpu=4'
    busy = {"Retry-After": "0.1"}
    mock.refusals = [(503, busy, "Service temporarily overloaded"), (429, busy, "no room"), (500, busy, quota)]
    sandbox = await backend.create("e", network="none")
    assert (await sandbox.exec("echo in")).stdout == b"in\n"
    assert len({c["sandbox_id"] for c in mock.creates}) == 1 and len(mock.creates) == 4


async def test_one_that_stays_full_says_so(mock: MockOrchard, tmp_path: Path) -> None:
    mock.refusals = [(429, {"Retry-After": "0.1"}, "no room")] * 100
    async with made(mock, tmp_path, full_seconds=0.3) as backend:
        with pytest.raises(SandboxFull, match=r"has had no room for another sandbox for 0 s: 429 no room") as e:
            await backend.create("e", network="none")
        assert e.value.retry_after == 0.1
    assert not list(tmp_path.glob("*.orchard"))


async def test_a_refusal_is_no_quota(mock: MockOrchard, backend: OrchardBackend) -> None:
    mock.refusals = [(500, {}, "Invalid value: must be a DNS label")]
    with pytest.raises(SandboxError, match="makes no sandbox: 500 Invalid value: must be a DNS label"):
        await backend.create("e", network="none")
    assert len(mock.creates) == 1


async def test_a_lost_answer_makes_no_second_pod(mock: MockOrchard, backend: OrchardBackend) -> None:
    """A second create of one id would spoil the record of the first."""
    mock.lose_creates = 1
    sandbox = await backend.create("e", network="none")
    assert (await sandbox.exec("echo in")).stdout == b"in\n"
    assert len(mock.creates) == 1 and list(mock.records) == [sandbox.sandbox_id]


@pytest.mark.parametrize(
    ("start", "kind", "match"),
    [
        ("failed", SandboxError, r"did not start: failed \(\)"),
        ("unschedulable", SandboxFull, r"found no place in 1 s: unschedulable \(0/3 nodes are available\)"),
        ("pending", SandboxError, r"was not ready in 1 s: pending"),
    ],
)
async def test_a_pod_that_does_not_start(
    mock: MockOrchard, tmp_path: Path, start: str, kind: type[SandboxError], match: str
) -> None:
    mock.start = start
    async with made(mock, tmp_path, create_seconds=1) as backend:
        with pytest.raises(kind, match=match):
            await backend.create("e", network="none")
    assert not mock.records and not list(tmp_path.glob("*.orchard"))


async def test_a_cancelled_create_leaves_nothing(mock: MockOrchard, backend: OrchardBackend) -> None:
    mock.start = "pending"
    task = asyncio.create_task(backend.create("e", network="none"))
    while not mock.records:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not mock.records and not backend.sandboxes


async def test_binds_are_copied_once_and_taken_from_an_image_that_has_them(
    mock: MockOrchard, backend: OrchardBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "tool"
    (tool / "bin").mkdir(parents=True)
    (tool / "bin" / "run").write_text("#!/bin/sh\necho tool $(cat ../data)\n")
    (tool / "bin" / "run").chmod(0o755)
    (tool / "data").write_bytes(b"x" * 100)
    (tool / "link").symlink_to("bin/run")
    one = Bind(tool, "/tmp/opt/tool")
    packed, tar = [], binds._tar

    def counted(host: Path) -> bytes:
        packed.append(host)
        return tar(host)

    monkeypatch.setattr(binds, "_tar", counted)
    for _ in range(2):
        sandbox = await backend.create("e", network="none", binds=[one, Bind(tool / "data", "/tmp/file")])
        result = await sandbox.exec("./link; stat -c %a bin/run; wc -c < /tmp/file", cwd="/tmp/opt/tool/bin/..")
        assert result.stdout.decode().split() == ["tool", "755", "100"], result.stderr
    assert packed == [tool, tool / "data"]
    (tool / "data").write_bytes(b"new")
    sandbox = await backend.create("e", network="none", binds=[one])
    assert (await sandbox.exec("cat data", cwd="/tmp/opt/tool")).stdout == b"new"
    # An image that holds it says so by a file; the mock's pods have no /opt of their own.
    monkeypatch.setattr(binds, "marker", lambda bind, digest: "/usr/bin/env")
    sandbox = await backend.create("e", network="none", binds=[one])
    assert (await sandbox.exec("test -e /tmp/opt")).exit_code == 1, "nothing was copied"


def test_a_digest_is_of_contents(tmp_path: Path) -> None:
    """Names, permissions, links and contents count; times do not, which differ between two checkouts."""
    seen = set()
    changes: list[Callable[[Path], object]] = [
        lambda p: None,
        lambda p: (p / "a").write_text("2"),
        lambda p: (p / "a").chmod(0o700),
        lambda p: (p / "a").rename(p / "b"),
        lambda p: (p / "l").symlink_to("a"),
        lambda p: (p / "d").mkdir(),
    ]
    for i, change in enumerate(changes):
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / "a").write_text("1")
        (folder / "a").chmod(0o644)
        change(folder)
        seen.add(binds.digest(folder))
    assert len(seen) == 6
    again = tmp_path / "again"
    again.mkdir()
    (again / "a").write_text("1")
    (again / "a").chmod(0o644)
    assert binds.digest(again) == binds.digest(tmp_path / "0")


class Proxy:
    """Stands for the recording proxy with a public address."""

    def public_url(self, episode_id: str) -> str:
        return f"https://gpu.example.org:8443/s/{episode_id}"

    async def adopt(self, episode_id: str, listener: object) -> None:
        raise AssertionError("a pod has no listener to hand over")


async def test_ways_out_and_in(mock: MockOrchard, tmp_path: Path) -> None:
    async with made(mock, tmp_path, network_policy=True) as backend:
        sandbox = await backend.create("e7")
        assert await sandbox.route(Proxy()) == "https://gpu.example.org:8443/s/e7"
        with pytest.raises(SandboxUnsupported, match="no way in to port 9000"):
            await sandbox.connect(9000)
        closed = await backend.create("e7", network="none")
        with pytest.raises(SandboxError, match="network 'none'; a route takes 'proxy'"):
            await closed.route(Proxy())


OWNER = """
import asyncio, sys
from pathlib import Path
from openforge.sandboxes import Owner
from openforge.sandboxes.orchard import Options, OrchardBackend

async def main():
    options = Options(image="debian:12")
    owner = Owner.current()
    backend = OrchardBackend(Path(sys.argv[1]), sys.argv[2], owner, url=sys.argv[3], key=sys.argv[4], options=options)
    print((await backend.create("e", network="none")).sandbox_id, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_the_reaper_deletes_what_dead_owners_of_this_run_left(
    mock: MockOrchard, backend: OrchardBackend, tmp_path: Path
) -> None:
    root = tmp_path / "ids"
    processes, names = [], {}
    for which, run in [("mine", "run_a"), ("other", "run_b"), ("living", "run_a")]:
        argv = [sys.executable, "-c", OWNER, str(root), run, mock.url, mock_orchard.KEY]
        process = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE)
        assert process.stdout is not None
        names[which] = (await process.stdout.readline()).decode().strip()
        processes.append(process)
    for process in processes[:2]:
        process.kill()
        await process.wait()
    own = await backend.create("own", network="none")
    (root / "torn.orchard").write_text('{"run": "run_a"')
    assert await backend.reap() == [names["mine"]]
    assert set(mock.records) == {names["other"], names["living"], own.sandbox_id}
    assert await backend.reap() == []
    assert {p.name for p in root.iterdir()} == {f"{n}.orchard" for n in (*mock.records, "torn")}
    processes[2].kill()
    await processes[2].wait()


async def test_an_id_stays_written_down_until_the_service_has_deleted_it(
    mock: MockOrchard, backend: OrchardBackend, sandbox: OrchardSandbox, tmp_path: Path
) -> None:
    await mock.down()
    with pytest.raises(SandboxError, match="no answer from"):
        await sandbox.delete()
    assert json.loads((tmp_path / "ids" / f"{sandbox.sandbox_id}.orchard").read_text())["episode_id"] == "episode"
    await mock.up()
    await sandbox.delete()
    assert not mock.records and not list((tmp_path / "ids").iterdir())


async def test_answers_that_nobody_expects(tmp_path: Path) -> None:
    """Some web server that is no Orchard: one sentence with what it says."""

    async def hello(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello")
        writer.close()

    server = await asyncio.start_server(hello, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with OrchardBackend(tmp_path, "r", Owner.current(), url=url, options=OPTIONS) as backend:
        with pytest.raises(SandboxError, match="makes no sandbox: 404 hello"):
            await backend.create("e", network="none")
    server.close()
