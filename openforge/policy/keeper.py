"""The process that keeps a policy server warm between the jobs of one machine and hands out leases.

    python -m openforge.policy.keeper STATE_DIR KEY SERVER_JSON ROOT

A lease is a connection to the keeper's UNIX socket: it lasts until the connection closes or the job's process
is gone (a forked child may hold the connection open). Leases of one policy are shared; another policy waits
until they are gone, in order of arrival. The keeper ends, and its server with it, when all its owners are gone
and no lease is left. It is one thread that watches everything between blocking steps, so that no two of its
decisions can race.
"""

from __future__ import annotations

import json
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from openforge.config import Server as ServerConfig
from openforge.policy import process
from openforge.policy.probe import PolicyMismatch
from openforge.policy.server import Server, ServerError
from openforge.policy.state import Place, places, send
from openforge.software import SoftwareMissing

TICK = 0.25
REMIND = 30.0


class _Abandoned(Exception):
    """Nobody is left who wants the server that is being started."""


@dataclass(eq=False)
class Client:
    """A connection: a job that waits for a lease or holds one, or another keeper that asks for room."""

    sock: socket.socket
    buffer: bytes = b""
    job: str = ""
    who: process.Identity | None = None
    policy: Path = Path()
    version: str = ""
    state: str = "new"  # new, waiting, leased
    told: str = ""
    told_at: float = field(default_factory=time.monotonic)


class Keeper:
    def __init__(self, cfg: ServerConfig, place: Place, root: Path) -> None:
        self.cfg, self.place, self.root = cfg, place, root
        self.me = process.this()
        self.server: Server | None = None
        self.owners: set[process.Identity] = set()
        self.clients: list[Client] = []
        self.ending = False
        self.born = time.monotonic()
        self.listener = place.listen()
        self.listener.setblocking(False)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ)
        place.write(self.me, None)

    def run(self) -> None:
        """Serve until nobody is left."""
        try:
            while not self._over():
                self._turn(TICK)
                self._grant()
        finally:
            # First the socket: a job that comes now finds no keeper, and waits for this one's end.
            self.place.file("sock").unlink(missing_ok=True)
            if self.server is not None:
                self.server.stop()
            self.place.clear()
            for client in self.clients:
                client.sock.close()

    def _over(self) -> bool:
        if any(c.state != "new" for c in self.clients):
            return False
        if self.ending:
            return True
        if not self.owners:
            # The job that started this keeper has not asked yet; it may have died on the way.
            return time.monotonic() - self.born > 30
        return not any(process.alive(o) for o in self.owners)

    # ---- connections ---------------------------------------------------------------------------------------
    def _turn(self, seconds: float) -> None:
        """Take what has come on any connection, and drop the jobs that are gone."""
        for key, _ in self.selector.select(seconds):
            if key.fileobj is self.listener:
                sock, _ = self.listener.accept()
                sock.settimeout(5)
                client = Client(sock)
                self.clients.append(client)
                self.selector.register(sock, selectors.EVENT_READ, client)
            else:
                self._read(key.data)
        for client in [c for c in self.clients if c.who is not None and not process.alive(c.who)]:
            self._drop(client)

    def _read(self, client: Client) -> None:
        try:
            data = client.sock.recv(65536)
        except OSError:
            data = b""
        if not data:
            self._drop(client)
            return
        client.buffer += data
        while b"\n" in client.buffer:
            line, client.buffer = client.buffer.split(b"\n", 1)
            self._take(client, json.loads(line))

    def _take(self, client: Client, message: dict[str, Any]) -> None:
        if message["op"] == "lease":
            client.job, client.who = message["job"], process.parse(message["client"])
            client.policy, client.version = Path(message["policy"]), message["version"]
            client.state = "waiting"
            self.owners.add(process.parse(message["owner"]))
        elif message["op"] == "end":
            self.ending = True
        elif message["op"] == "make_room":
            idle = all(c.state == "new" for c in self.clients)
            self.ending = self.ending or (idle and process.parse(message["owner"]) in self.owners)
            self._tell(client, {"ending": self.ending})

    def _tell(self, client: Client, message: dict[str, Any]) -> None:
        try:
            send(client.sock, message)
        except OSError:
            self._drop(client)

    def _wait(self, client: Client, why: str) -> None:
        """Tell a waiting job why, again from time to time so that it knows the keeper alive."""
        now = time.monotonic()
        if why != client.told or now - client.told_at > REMIND:
            client.told, client.told_at = why, now
            self._tell(client, {"wait": why})

    def _drop(self, client: Client) -> None:
        if client in self.clients:
            self.clients.remove(client)
            self.selector.unregister(client.sock)
            client.sock.close()

    # ---- leases --------------------------------------------------------------------------------------------
    def _grant(self) -> None:
        """Serve the waiting jobs in order of arrival, as far as the leases in force allow."""
        blocked = False
        for client in [c for c in self.clients if c.state == "waiting"]:
            leased = [c for c in self.clients if c.state == "leased"]
            other = [c for c in leased if c.version != client.version]
            # A job that holds a lease may take a second one past the queue: the queue waits for that job.
            mine = any(c.who == client.who for c in leased)
            if other:
                self._wait(client, f"{other[0].job} holds the server with policy {_short(other[0].version)}")
                blocked = True
            elif blocked and not mine:
                self._wait(client, "jobs that came earlier wait for another policy")
            elif client in self.clients:
                self._serve(client)

    def _serve(self, client: Client) -> None:
        try:
            server = self._ready(client)
        except (PolicyMismatch, ServerError, SoftwareMissing, OSError) as e:
            self._stop()
            self._tell(client, {"error": str(e), "kind": type(e).__name__})
            self._drop(client)
        else:
            client.state = "leased"
            self._tell(client, {"port": server.port, "api_key": server.api_key})

    def _ready(self, client: Client) -> Server:
        """The server, with the client's policy."""
        if self.server is not None and not self.server.healthy():
            print(f"the policy server is dead or ill; {client.job} starts it anew", flush=True)
            self._stop()
        if self.server is None:
            self._wait(client, "the policy server starts")
            self._make_room(client)
            self.server = Server.start(
                self.cfg,
                client.policy,
                client.version,
                log=self.place.log,
                root=self.root,
                started=lambda s: self.place.write(self.me, s.identity),
                waiting=self._while_starting,
            )
        elif self.server.version != client.version:
            self.server.swap(client.policy, client.version)
        return self.server

    def _while_starting(self) -> None:
        self._turn(0)
        for client in list(self.clients):
            if client.state == "waiting":
                self._wait(client, "the policy server starts")
        if self._over():
            raise _Abandoned

    def _stop(self) -> None:
        if self.server is not None:
            self.server.stop()
            self.server = None
        self.place.write(self.me, None)

    def _make_room(self, client: Client) -> None:
        """Ask idle servers of the same owners to end while memory is too small for one more."""
        need = memory_need(self.cfg, client.policy)
        for place in places(self.place.folder):
            if psutil.virtual_memory().available >= need:
                return
            keeper, _ = place.read()
            if place.key == self.place.key or keeper is None:
                continue
            if ask_for_room(place, self.owners):
                wait_until_dead(keeper, 30)
        check_memory(self.cfg, client.policy)


def check_memory(cfg: ServerConfig, policy: Path) -> None:
    """Refuse to start a server that the machine would kill, or that would kill others' work.

    Raises:
        ServerError: with what it takes and what there is.
    """
    need, free = memory_need(cfg, policy), psutil.virtual_memory().available
    if free < need:
        raise ServerError(
            f"a policy server needs about {need / 1e9:.1f} GB of memory and {free / 1e9:.1f} GB are free: end what "
            "else runs here, or lower server.kv_cache_gb"
        )


def memory_need(cfg: ServerConfig, policy: Path) -> float:
    """Bytes of memory a server takes, roughly: interpreters, KV cache, weights twice (measured: 2.7-3.7 GB)."""
    if cfg.device != "cpu":
        return 4e9
    return 2.2e9 + cfg.kv_cache_gb * 2**30 + 2 * sum(f.stat().st_size for f in policy.glob("*.safetensors"))


def ask_for_room(place: Place, owners: set[process.Identity]) -> bool:
    """Whether another keeper ends now: it is idle and one of `owners` is its owner."""
    for owner in owners:
        sock = place.connect()
        if sock is None:
            return False
        with sock:
            sock.settimeout(10)
            try:
                send(sock, {"op": "make_room", "owner": str(owner)})
                with sock.makefile("rb") as lines:
                    answer = lines.readline()
            except OSError:
                return False
        if answer and json.loads(answer)["ending"]:
            return True
    return False


def wait_until_dead(who: process.Identity, seconds: float) -> bool:
    """Whether a process ends within `seconds`."""
    deadline = time.monotonic() + seconds
    while process.alive(who):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _short(version: str) -> str:
    iteration, _, sha256 = version.partition("@")
    return f"{iteration}@{sha256[:8]}"


def main(argv: list[str]) -> int:
    state_dir, key, server, root = argv
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    keeper = Keeper(ServerConfig.model_validate_json(server), Place(Path(state_dir), key), Path(root))
    try:
        keeper.run()
    except _Abandoned:
        print("nobody is left who wants the server", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
