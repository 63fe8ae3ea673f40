"""The one way out: a listener inside that a process outside accepts from."""

from __future__ import annotations

import asyncio
import socket

import pytest

from openforge.sandboxes import LocalBackend, LocalSandbox, SandboxError


class StubProxy:
    """Adopts a listener and answers every connection with the request's first line."""

    def public_url(self, episode_id: str) -> str:
        raise AssertionError(f"episode {episode_id} is on this host")

    def __init__(self) -> None:
        self.episodes: list[str] = []
        self.servers: list[asyncio.Server] = []

    async def adopt(self, episode_id: str, listener: socket.socket) -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            line = await reader.readline()
            writer.write(f"{episode_id}: ".encode() + line)
            writer.close()

        self.episodes.append(episode_id)
        self.servers.append(await asyncio.start_server(answer, sock=listener))

    def close(self) -> None:
        for server in self.servers:
            server.close()


ASK = "exec 3<>/dev/tcp/127.0.0.1/8080; echo GET /x >&3; cat <&3"


async def test_the_proxy_answers_inside(backend: LocalBackend) -> None:
    proxy = StubProxy()
    sandboxes = [await backend.create(f"e{i}") for i in range(2)]
    assert (await sandboxes[0].exec(ASK)).exit_code != 0, "not before it is routed"
    urls = [await s.route(proxy) for s in sandboxes]
    assert urls == ["http://127.0.0.1:8080/s/e0", "http://127.0.0.1:8080/s/e1"]
    assert proxy.episodes == ["e0", "e1"]
    for i, sandbox in enumerate(sandboxes):
        assert (await sandbox.exec(ASK, timeout=20)).stdout == f"e{i}: GET /x\n".encode()
    await sandboxes[0].end_processes()
    assert (await sandboxes[0].exec(ASK, timeout=20)).stdout == b"e0: GET /x\n", "the route stays"
    with socket.socket() as outside:  # the port is the sandbox's, not the host's
        outside.bind(("127.0.0.1", 0))
        assert all(s.sockets[0].getsockname() == ("127.0.0.1", 8080) for s in proxy.servers)
    proxy.close()


async def test_a_taken_port_and_no_network(backend: LocalBackend, sandbox: LocalSandbox) -> None:
    proxy = StubProxy()
    await sandbox.route(proxy)
    with pytest.raises(SandboxError, match=r"cannot listen on port 8080 inside the sandbox: .*in use"):
        await sandbox.route(proxy)
    closed = await backend.create("e", network="none")
    with pytest.raises(SandboxError, match="network 'none'; a route takes 'proxy'"):
        await closed.route(proxy)
    assert proxy.episodes == ["episode"]
    proxy.close()


SERVE = (
    "import socket; s = socket.create_server(('127.0.0.1', 9100)); print('up', flush=True); "
    "c, _ = s.accept(); c.sendall(c.recv(99).upper())"
)


async def test_connect_reaches_a_service_inside_and_says_when_there_is_none(backend: LocalBackend) -> None:
    sandbox = await backend.create("e1", network="none")
    with pytest.raises(ConnectionRefusedError, match="9100"):
        await sandbox.connect(9100)
    serving = asyncio.create_task(sandbox.exec(["python3", "-c", SERVE], timeout=30))
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


async def test_a_companion_is_apart_and_goes_with_its_sandbox(backend: LocalBackend) -> None:
    sandbox = await backend.create("e1", network="none")
    other = await sandbox.companion()
    await sandbox.upload_content(b"x", "mine.txt")
    assert (await other.exec("ls")).stdout == b""
    await sandbox.delete()
    with pytest.raises(SandboxError):
        await other.exec("true")
    assert not backend.sandboxes
