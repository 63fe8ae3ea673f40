"""Sandboxes off this host: the public address, TLS, and a relay across network namespaces."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from proxy_rig import SAMPLING, SECRET, Rig, assemble, chat
from proxy_stub import StubUpstream

from openforge.proxy import relay
from openforge.proxy.client import ProxyError, start_proxy
from openforge.proxy.journal import read
from openforge.proxy.public import Public, PublicError, candidates, from_environment
from openforge.sandboxes import bwrap

ROOT = Path(__file__).resolve().parent.parent.parent
TLS = Path(__file__).parent / "tls"
KEY = "relay-key-of-some-length"
V = "OPFORGE_VLLM_PROXY_"


# ---- the public address --------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("env", "url", "host", "port"),
    [
        ({"PUBLIC_IP": "192.0.2.7", "PUBLIC_PORT": "8443"}, "http://192.0.2.7:8443", "127.0.0.1", 8443),
        ({"PUBLIC_IP": "2001:db8::7", "PUBLIC_PORT": "80"}, "http://[2001:db8::7]:80", "127.0.0.1", 80),
        (
            {"PUBLIC_IP": "gpu.example.org", "PUBLIC_PORT": "443", "PUBLIC_SCHEME": "https", "BIND": "10.0.0.5:8080"},
            *("https://gpu.example.org:443", "10.0.0.5", 8080),
        ),
        (
            {"PUBLIC_IP": "192.0.2.7", "PUBLIC_PORT": "443", "TLS_CERT": "/c.pem", "BIND": "[::]:8443"},
            *("https://192.0.2.7:443", "::", 8443),
        ),
    ],
)
def test_the_variables_give_an_address(env: dict[str, str], url: str, host: str, port: int) -> None:
    made = from_environment({V + k: v for k, v in env.items()})
    assert made is not None and (made.url, made.host, made.port) == (url, host, port)
    assert made.tls == ((Path("/c.pem"), None) if "TLS_CERT" in env else None)


def test_no_variable_is_no_address() -> None:
    assert from_environment({"PATH": "/bin", V + "PUBLIC_IP": " "}) is None


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ({"PUBLIC_IP": "192.0.2.7"}, "PUBLIC_PORT is not set, but OPFORGE_VLLM_PROXY_PUBLIC_IP is; sandboxes off"),
        ({"PUBLIC_PORT": "80"}, "PUBLIC_IP is not set, but OPFORGE_VLLM_PROXY_PUBLIC_PORT is"),
        ({"BIND": "0.0.0.0:80"}, "PUBLIC_IP is not set, but OPFORGE_VLLM_PROXY_BIND is"),
        ({"PUBLIC_IP": "https://h", "PUBLIC_PORT": "80"}, "PUBLIC_IP is 'https://h'; an IP address or a host's name"),
        ({"PUBLIC_IP": "h/s", "PUBLIC_PORT": "80"}, "PUBLIC_IP is 'h/s'"),
        ({"PUBLIC_IP": "h", "PUBLIC_PORT": "0"}, "PUBLIC_PORT is '0'; a port is a number from 1 to 65535"),
        ({"PUBLIC_IP": "h", "PUBLIC_PORT": "http"}, "PUBLIC_PORT is 'http'"),
        ({"PUBLIC_IP": "h", "PUBLIC_PORT": "80", "PUBLIC_SCHEME": "tcp"}, "PUBLIC_SCHEME is 'tcp'; it must be http or"),
        ({"PUBLIC_IP": "h", "PUBLIC_PORT": "80", "BIND": "8080"}, "BIND is '8080'; it must be HOST:PORT, such as"),
        ({"PUBLIC_IP": "h", "PUBLIC_PORT": "80", "BIND": "0.0.0.0:x"}, "BIND is 'x'; a port is a number"),
        ({"PUBLIC_IP": "h", "PUBLIC_PORT": "80", "TLS_KEY": "k"}, "TLS_KEY is set without OPFORGE_VLLM_PROXY_TLS_CERT"),
    ],
)
def test_a_half_or_wrong_address_is_one_sentence(env: dict[str, str], told: str) -> None:
    with pytest.raises(PublicError) as refused:
        from_environment({V + k: v for k, v in env.items()})
    assert str(refused.value).startswith(V + told)


def test_a_range_of_ports_is_an_address_a_port() -> None:
    env = {V + "PUBLIC_IP": "192.0.2.7", V + "PUBLIC_PORT": "8443-8445"}
    assert [p.url for p in candidates(env)] == [f"http://192.0.2.7:{n}" for n in (8443, 8444, 8445)]
    assert [p.port for p in candidates(env | {V + "BIND": "0.0.0.0:80-82"})] == [80, 81, 82]
    assert [p.port for p in candidates(env | {V + "PUBLIC_PORT": "8443"})] == [8443]
    assert candidates({}) == []


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ({"PUBLIC_IP": "h", "PUBLIC_PORT": "81-80"}, "PUBLIC_PORT is '81-80'; the first port of a range must not be"),
        ({"PUBLIC_IP": "h", "PUBLIC_PORT": "80-x"}, "PUBLIC_PORT is 'x'; a port is a number"),
        (
            {"PUBLIC_IP": "h", "PUBLIC_PORT": "80-82", "BIND": "0.0.0.0:80-81"},
            "PUBLIC_PORT names 3 ports and OPFORGE_VLLM_PROXY_BIND 2; they must be as many",
        ),
        ({"PUBLIC_PORT": "80-81"}, "PUBLIC_IP is not set, but OPFORGE_VLLM_PROXY_PUBLIC_PORT is"),
    ],
)
def test_a_wrong_range_is_one_sentence(env: dict[str, str], told: str) -> None:
    with pytest.raises(PublicError) as refused:
        candidates({V + k: v for k, v in env.items()})
    assert str(refused.value).startswith(V + told)


# ---- TLS -----------------------------------------------------------------------------------------
@pytest.fixture
async def stub() -> AsyncIterator[StubUpstream]:
    made = StubUpstream()
    await made.start()
    yield made
    await made.stop()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as s:
        port: int = s.getsockname()[1]
        return port


async def test_a_proxy_started_for_remote_sandboxes(stub: StubUpstream, tmp_path: Path) -> None:
    port = free_port()
    env = {"PUBLIC_IP": "127.0.0.1", "PUBLIC_PORT": str(port)}
    env |= {"TLS_CERT": str(TLS / "cert.pem"), "TLS_KEY": str(TLS / "key.pem")}
    public = from_environment({V + k: v for k, v in env.items()})
    proxy = await start_proxy(stub.url, tmp_path, public=public)
    try:
        given = {"sampling": SAMPLING, "limits": {}, "deadline_seconds": 60.0, "policy_version": "0@x"}
        await proxy.open_session("e1", secret=SECRET, context_window=512, **given)
        base = proxy.public_url("e1")
        assert base == f"https://127.0.0.1:{port}/s/e1"
        trusted = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=str(TLS / "cert.pem")))
        async with aiohttp.ClientSession(connector=trusted, headers={"x-api-key": SECRET}) as http:
            async with http.post(f"{base}/v1/chat/completions", json=chat("hi")) as r:
                assert (r.status, (await r.json())["choices"][0]["message"]["content"]) == (200, "ok 1")
            async with http.post(f"{base}/v1/chat/completions", json=chat("hi", "ok 1", "on", stream=True)) as r:
                assert assemble(await r.read())["message"]["content"] == "ok 2"
        # Nothing else is spoken there.
        async with aiohttp.ClientSession(headers={"x-api-key": SECRET}) as http:
            with pytest.raises(aiohttp.ClientError):
                await http.post(f"http://127.0.0.1:{port}/s/e1/v1/chat/completions", json=chat("hi"))
        assert (await proxy.close_session("e1", harness_exited=True)).turns == 2
    finally:
        await proxy.stop()


async def test_a_proxy_that_is_not_for_remote_sandboxes_says_so(stub: StubUpstream, tmp_path: Path) -> None:
    proxy = await start_proxy(stub.url, tmp_path)
    try:
        with pytest.raises(ProxyError, match="PUBLIC_IP:OPFORGE_VLLM_PROXY_PUBLIC_PORT, which are not set"):
            proxy.public_url("e1")
    finally:
        await proxy.stop()


@pytest.mark.parametrize("files", [("cert.pem", "other-key.pem"), ("none.pem", None), ("key.pem", None)])
async def test_no_tls_is_one_sentence(stub: StubUpstream, tmp_path: Path, files: tuple[str, str | None]) -> None:
    tls = (TLS / files[0], None if files[1] is None else TLS / files[1])
    with pytest.raises(
        ProxyError, match=r"did not start \(exit code 1\): the recording proxy cannot start: no TLS with"
    ):
        await start_proxy(stub.url, tmp_path, public=Public("https://h:1", "127.0.0.1", free_port(), tls))


# ---- the relay -----------------------------------------------------------------------------------
class Relayed:
    """A relay in this process, in front of the rig's proxy."""

    def __init__(self, tmp_path: Path) -> None:
        self.hosts = str(tmp_path / "hosts")
        self.relay = relay.Relay(KEY)
        self.tasks: list[asyncio.Task[None]] = []
        self.port = 0

    async def start(self) -> None:
        public = await relay.listen(("127.0.0.1", 0), self.relay.client)
        hosts = await relay.listen(self.hosts, self.relay.host)
        self.port = public.sockets[0].getsockname()[1]
        self._servers = [public, hosts]

    def join(self, to: tuple[str, int], key: str = KEY) -> asyncio.Task[None]:
        task = asyncio.create_task(relay.join(self.hosts, to, key))
        self.tasks.append(task)
        return task

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for server in self._servers:
            server.close()


@pytest.fixture
async def relayed(tmp_path: Path) -> AsyncIterator[Relayed]:
    made = Relayed(tmp_path)
    await made.start()
    yield made
    await made.stop()


async def test_many_clients_at_once_and_each_byte_as_it_is(rig: Rig, relayed: Relayed) -> None:
    rig.session()
    relayed.join(("127.0.0.1", rig.port))
    direct, rig.port = rig.port, relayed.port
    text = "x" * 300_000
    answers = await asyncio.gather(*(rig.ask(chat(f"{n}{text}")) for n in range(3 * relay.READY)))
    assert [status for status, _ in answers] == [200] * (3 * relay.READY)
    said = {json.loads(raw)["choices"][0]["message"]["content"] for _, raw in answers}
    assert said == {f"ok {n}" for n in range(1, 3 * relay.READY + 1)}
    assert {b["messages"][0]["content"] for b in rig.stub.bodies} == {f"{n}{text}" for n in range(3 * relay.READY)}
    assert direct != relayed.port


async def test_hanging_up_at_the_relay_aborts_the_generation(rig: Rig, relayed: Relayed) -> None:
    rig.stub.hold = asyncio.Event()
    rig.session()
    relayed.join(("127.0.0.1", rig.port))
    rig.port = relayed.port
    await rig.hang_up(chat("hi"))
    await rig.stub.aborted.get()


async def test_who_does_not_know_the_key_is_no_host(
    rig: Rig, relayed: Relayed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(relay, "WAIT_SECONDS", 0.05)
    rig.session()
    relayed.join(("127.0.0.1", rig.port), key="another-key-of-some-length")
    direct, rig.port = rig.port, relayed.port
    # A host that says nothing, or anything, is none either.
    silent = await asyncio.open_unix_connection(relayed.hosts)
    wrong = await asyncio.open_unix_connection(relayed.hosts)
    wrong[1].write(b"0" * 64 + b"\n")
    with pytest.raises((aiohttp.ClientError, ConnectionError)):
        await rig.ask(chat("hi"))
    assert rig.stub.bodies == [] and not relayed.relay._idle
    said = ""
    while "is its OPENFORGE_RELAY_KEY another one?" not in said:
        await asyncio.sleep(0)
        said += capsys.readouterr().err
    for _, writer in (silent, wrong):
        writer.close()
    monkeypatch.setattr(relay, "WAIT_SECONDS", 30.0)
    relayed.join(("127.0.0.1", direct))
    assert (await rig.ask(chat("hi")))[0] == 200


async def test_a_host_that_went_away_is_passed_by(rig: Rig, relayed: Relayed) -> None:
    rig.session()
    first = relayed.join(("127.0.0.1", rig.port))
    while len(relayed.relay._idle) < relay.READY:
        await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    relayed.join(("127.0.0.1", rig.port))
    rig.port = relayed.port
    assert (await rig.ask(chat("hi")))[0] == 200


@pytest.mark.parametrize("text", ["8080", "h:", ":80", "h:x", "h:99999", "unix:"])
def test_a_wrong_address_is_one_sentence(text: str) -> None:
    with pytest.raises(relay.RelayError, match="must be HOST:PORT or unix:PATH"):
        relay.address(text)
    assert relay.address("[::1]:80") == ("::1", 80) and relay.address("unix:/a/b") == "/a/b"


def test_the_relay_needs_nothing_but_python_and_a_key(tmp_path: Path) -> None:
    alone = tmp_path / "relay.py"
    alone.write_bytes((ROOT / "openforge" / "proxy" / "relay.py").read_bytes())
    words = ["serve", "--public", "127.0.0.1:0", "--hosts", f"unix:{tmp_path}/h"]
    for env, told in (({}, "must be set to the same secret"), ({"OPENFORGE_RELAY_KEY": "short"}, "at least 16")):
        done = subprocess.run([sys.executable, "-I", alone, *words], capture_output=True, text=True, env=env)
        assert done.returncode == 2 and told in done.stderr and done.stderr.count("\n") == 1


# ---- across network namespaces -------------------------------------------------------------------
# Each side has a network of its own, with nothing but its loopback; what they share is the file system, where the
# relay's socket for hosts is. PROXY, RELAY and PUBLIC are the same numbers on both sides: they are other places.
GPU_HOST = """
vllm serve m --port 8000 >vllm.log &
until grep -q complete vllm.log; do sleep 0.1; done
python -m openforge proxy --upstream http://127.0.0.1:8000 --port 8080 --journal calls --session e1 \\
  --tls-cert cert.pem --tls-key key.pem &
python relay.py join --relay unix:hosts.sock --to 127.0.0.1:8080
"""
RELAY = "python relay.py serve --public 127.0.0.1:8443 --hosts unix:hosts.sock"
SANDBOX = """
import json, os, ssl, urllib.request
try:
    urllib.request.urlopen("http://127.0.0.1:8080/")
except OSError:
    print("the proxy's own port is out of reach")
base, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
body = json.dumps({"messages": [{"role": "user", "content": "over the relay"}]}).encode()
asked = urllib.request.Request(f"{base}/chat/completions", body, {"authorization": f"Bearer {key}"})
answer = urllib.request.urlopen(asked, context=ssl.create_default_context(cafile="cert.pem"))
print(base, json.load(answer)["choices"][0]["message"]["content"])
"""


def test_a_sandbox_reaches_a_gpu_host_without_public_ports(tmp_path: Path) -> None:
    """docs/remote-sandboxes.md: `relay.py` between two network namespaces, TLS from end to end."""
    # As every test of a sandbox needs: .ci/run installs bubblewrap.
    assert bwrap.probe()["why"] is None, "no network namespaces here"
    (tmp_path / "relay.py").write_bytes((ROOT / "openforge" / "proxy" / "relay.py").read_bytes())
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).write_bytes((TLS / name).read_bytes())
    (tmp_path / "bin").mkdir()
    for name, words in (("vllm", f"{ROOT}/tests/proxy/mock_vllm.py"), ("python", "")):
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        (tmp_path / "bin" / name).chmod(0o755)
    env = os.environ | {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{ROOT}/tests/proxy",
        "OPENFORGE_RELAY_KEY": KEY,
        V + "PUBLIC_IP": "127.0.0.1",
        V + "PUBLIC_PORT": "8443",
    }
    network = [
        "bwrap",
        "--unshare-net",
        "--unshare-pid",
        "--die-with-parent",
        "--dev-bind",
        "/",
        "/",
        "--chdir",
        tmp_path,
    ]
    relay_and_sandbox = f"{RELAY} &\nuntil test -s calls/e1.env; do sleep 0.1; done\n. calls/e1.env\npython sandbox.py"
    (tmp_path / "sandbox.py").write_text(SANDBOX)
    with open(tmp_path / "host.log", "wb") as log:
        host = subprocess.Popen([*network, "sh", "-c", GPU_HOST], env=env, stdout=log, stderr=log)
    try:
        done = subprocess.run(
            [*network, "sh", "-c", relay_and_sandbox], env=env, capture_output=True, text=True, timeout=120
        )
    finally:
        host.terminate()
        host.wait()
    lines = done.stdout.splitlines()
    assert lines[-2:] == [
        "the proxy's own port is out of reach",
        "https://127.0.0.1:8443/s/e1/v1 echo over the relay",
    ], (done.stdout, done.stderr, (tmp_path / "host.log").read_text())
    assert [r["record"] for r in read(tmp_path / "calls")] == ["open", "call", "delivery"]
