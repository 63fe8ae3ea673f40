"""The proxy as a process: start, hand-over of listeners, kill -9, the end of its parent."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from proxy_rig import SAMPLING, SECRET, chat
from proxy_stub import StubUpstream

from openforge.proxy.client import Proxy, ProxyError, start_proxy
from openforge.proxy.control import door_of
from openforge.proxy.journal import read

HEADERS = {"authorization": f"Bearer {SECRET}"}


@pytest.fixture
async def stub() -> AsyncIterator[StubUpstream]:
    made = StubUpstream()
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def proxy(stub: StubUpstream, tmp_path: Path) -> AsyncIterator[Proxy]:
    made = await start_proxy(stub.url, tmp_path / "journal", upstream_key="sk-up", port=0)
    yield made
    await made.stop()


async def opened(proxy: Proxy, episode_id: str) -> None:
    await proxy.open_session(
        episode_id,
        secret=SECRET,
        sampling=SAMPLING,
        limits={"turns": 100, "tokens": None, "seconds": 1.0},
        deadline_seconds=30.0,
        policy_version="0@x",
        context_window=512,
    )


async def ask(base: str, text: str, connector: aiohttp.BaseConnector | None = None) -> tuple[int, bytes]:
    async with (
        aiohttp.ClientSession(connector=connector, headers=HEADERS) as http,
        http.post(f"{base}/v1/chat/completions", json=chat(text)) as r,
    ):
        return r.status, await r.read()


async def test_an_episode_through_the_port(proxy: Proxy, stub: StubUpstream) -> None:
    await opened(proxy, "e1")
    status, raw = await ask(f"http://127.0.0.1:{proxy.port}/s/e1", "hi")
    assert (status, json.loads(raw)["choices"][0]["message"]["content"]) == (200, "ok 1")
    assert (await proxy.session("e1"))["turns"] == 1
    summary = await proxy.close_session("e1", harness_exited=True)
    assert (summary.calls, summary.turns, summary.response_tokens) == (1, 1, len("ok 1") + 1)
    assert (summary.budget_exhausted, summary.policy_failed) == (False, None)
    assert [r["record"] for r in summary.records] == ["open", "call", "delivery", "close"]
    assert summary.records == read(proxy.journal.parent)
    assert await proxy.close_session("e1", harness_exited=False) == summary


async def test_listeners_handed_over_serve_their_session_until_it_closes(proxy: Proxy, tmp_path: Path) -> None:
    await opened(proxy, "e1")
    await opened(proxy, "e2")
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(tmp_path / "u"))
        unix.listen()
        base = f"http://127.0.0.1:{tcp.getsockname()[1]}/s"
        await proxy.adopt("e1", tcp)
        await proxy.adopt("e1", unix)
    assert (await ask(f"{base}/e1", "hi"))[0] == 200
    assert (await ask("http://sandbox/s/e1", "hi", aiohttp.UnixConnector(str(tmp_path / "u"))))[0] == 200
    # Another session's secret and path are of no use on this listener.
    assert (await ask(f"{base}/e2", "hi"))[0] == 404
    assert (await proxy.close_session("e1", harness_exited=True)).turns == 2
    with pytest.raises((aiohttp.ClientConnectionError, ConnectionError)):
        while True:
            assert (await ask(f"{base}/e1", "late"))[0] == 409
    assert (await ask(f"http://127.0.0.1:{proxy.port}/s/e1", "late"))[0] == 409


async def test_a_hand_over_that_cannot_be_is_refused(proxy: Proxy) -> None:
    with socket.create_server(("127.0.0.1", 0)) as tcp, pytest.raises(ProxyError, match="no open session 'e9'"):
        await proxy.adopt("e9", tcp)
    await opened(proxy, "e1")
    with socket.socket() as idle, pytest.raises(ProxyError, match="does not listen"):
        await proxy.adopt("e1", idle)
    # The door still opens after refusals.
    with socket.create_server(("127.0.0.1", 0)) as tcp:
        await proxy.adopt("e1", tcp)


async def test_control_sockets_are_this_users_only(proxy: Proxy) -> None:
    for path in (proxy.control, door_of(proxy.control)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_what_control_refuses_is_a_sentence(proxy: Proxy) -> None:
    await opened(proxy, "e1")
    with pytest.raises(ProxyError, match="session e1 exists"):
        await opened(proxy, "e1")
    with pytest.raises(ProxyError, match="no session 'e7'"):
        await proxy.close_session("e7", harness_exited=True)
    with pytest.raises(ProxyError, match="it is part of a URL"):
        await opened(proxy, "a/b")


async def test_kill_9_loses_no_delivered_call(proxy: Proxy) -> None:
    await opened(proxy, "e1")
    base = f"http://127.0.0.1:{proxy.port}/s/e1"
    delivered: list[str] = []

    async def harness(n: int) -> None:
        async with aiohttp.ClientSession(headers=HEADERS) as http:
            while True:
                async with http.post(f"{base}/v1/chat/completions", json=chat(f"{n}")) as r:
                    answer = await r.json()
                delivered.append(answer["choices"][0]["message"]["content"])
                if len(delivered) == 60:
                    os.kill(proxy.pid, signal.SIGKILL)

    results = await asyncio.gather(*(harness(n) for n in range(8)), return_exceptions=True)
    assert all(isinstance(r, aiohttp.ClientError) for r in results)
    assert len(delivered) >= 60
    on_disk = [r["response"]["content"] for r in read(proxy.journal.parent) if r["record"] == "call"]
    assert set(delivered) <= set(on_disk)
    await proxy.process.wait()
    with pytest.raises(ProxyError, match="exited with code -9"):
        await proxy.session("e1")


PARENT = """
import asyncio, sys
from pathlib import Path
from openforge.proxy.client import start_proxy

async def main():
    proxy = await start_proxy("http://127.0.0.1:9", Path(sys.argv[1]))
    print(proxy.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    gone = os.pidfd_open(pid)
    parent.kill()
    parent.wait()
    import select

    ready, _, _ = select.select([gone], [], [], 20)
    os.close(gone)
    parent.stdout.close()
    assert ready, f"the proxy {pid} outlived its parent"


async def test_a_start_that_fails_says_why(stub: StubUpstream, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ProxyError, match=r"did not start \(exit code 1\): .*Address already in use"):
            await start_proxy(stub.url, tmp_path / "a", port=port)
    with pytest.raises(ProxyError, match="longer than the 107 bytes"):
        await start_proxy(stub.url, tmp_path / "b", control=tmp_path / ("c" * 108))


async def test_stop_leaves_the_journal_and_nothing_else(stub: StubUpstream, tmp_path: Path) -> None:
    control = tmp_path / "control"
    proxy = await start_proxy(stub.url, tmp_path / "j", control=control, fsync_seconds=0.01)
    await opened(proxy, "e1")
    await proxy.stop()
    await proxy.stop()
    assert proxy.process.returncode == 0
    assert not control.exists() and not door_of(control).exists()
    assert [r["record"] for r in read(tmp_path / "j")] == ["open"]
