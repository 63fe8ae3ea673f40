"""Our own server killed under the backend that uses it."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from mock_orchard import OPTIONS
from served import KEY, Served

from openforge.sandboxes import Owner, SandboxFull, SandboxLost, SandboxUnsupported
from openforge.sandboxes.orchard import OrchardBackend

OWN = replace(OPTIONS, image=None)  # our own server has the host's system


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path / "state", "--max-sandboxes", "2")
    served.options += ("--port", str(urlsplit(served.url).port))  # the next one listens where this one does
    yield served
    if not served.running:
        served.start()
    served.end()


def backend(server: Served, root: Path, patience: float = 60) -> OrchardBackend:
    options = replace(OWN, patience=patience, full_seconds=0.2)
    return OrchardBackend(root / "ids", "run_a", Owner.current(), url=server.url, key=KEY, options=options)


async def test_commands_outlive_a_kill_of_the_server_and_run_once(server: Served, tmp_path: Path) -> None:
    async with backend(server, tmp_path) as ours:
        sandbox = await ours.create("e", network="none")
        command = "echo ran >> runs.{0}; touch up.{0}; until [ -e go ]; do sleep 0.02; done; cat runs.{0}; exit {0}"
        plain = [asyncio.create_task(sandbox.exec(command.format(i))) for i in range(3)]
        logged = asyncio.create_task(sandbox.exec(command.format(3), log=tmp_path / "log"))
        await sandbox.exec("until [ -e up.0 ] && [ -e up.1 ] && [ -e up.2 ] && [ -e up.3 ]; do sleep 0.02; done")
        server.kill()
        server.start()
        await sandbox.exec("touch go")
        for i, task in enumerate([*plain, logged]):
            result = await task
            assert (result.exit_code, result.stdout) == (i, b"ran\n")
        assert (tmp_path / "log").read_bytes() == b"ran\n"


async def test_a_full_server_and_one_that_stays_away(server: Served, tmp_path: Path) -> None:
    async with backend(server, tmp_path, patience=2) as ours:
        sandboxes = [await ours.create("e", network="none") for _ in range(2)]
        with pytest.raises(SandboxFull, match=r"has had no room .*: 429 the server is full \(sandboxes: 2 of 2\)"):
            await ours.create("e", network="none")
        with pytest.raises(SandboxUnsupported, match="network 'open' is not offered by http"):
            await ours.create("e", network="open")
        with pytest.raises(SandboxUnsupported, match=r"image 'debian:12' is not offered by http.*; it has host"):
            await ours.create("e", network="none", image="debian:12")
        await sandboxes[0].delete()
        third = await ours.create("e", network="none")
        server.kill()
        with pytest.raises(SandboxLost, match="does not answer: no answer from"):
            await third.exec("true")
        server.start()


async def test_the_reaper_asks_the_server_too(server: Served, tmp_path: Path) -> None:
    """Ids that were written down on a disk that is gone, or by a job on another node, are in the server's list."""
    with subprocess.Popen(["sleep", "941"]) as owner:
        dead = OrchardBackend(tmp_path / "lost", "run_a", Owner.of(owner.pid), url=server.url, key=KEY, options=OWN)
        other = OrchardBackend(tmp_path / "other", "run_b", Owner.of(owner.pid), url=server.url, key=KEY, options=OWN)
        orphan, foreign = await dead.create("e", network="none"), await other.create("e", network="none")
        owner.kill()
    async with backend(server, tmp_path) as ours:
        assert await ours.reap() == [orphan.sandbox_id]
        assert await ours.reap() == []
    assert (await foreign.exec("echo on")).stdout == b"on\n"
    for left in (dead, other):
        await left.close()
