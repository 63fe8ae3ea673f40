"""The process that keeps a policy server warm between the jobs of one machine and hands out leases.

    python -m openforge.policy.keeper STATE_DIR KEY SERVER_JSON ROOT

A lease is a connection to the keeper's UNIX socket: it lasts until the connection closes or the job's process
is gone (a forked child may hold the connection open). Leases of one policy are shared; another policy waits
until they are gone, in order of arrival. The keeper ends, and its server with it, when all its owners are gone
and no lease is left. It is one thread that watches everything between blocking steps, so that no two of its
decisions can race.

A server that dies or hangs under a lease is started again on its port, with its key and its policy: whoever talks to
it need not know. A job that holds a lease says when its work gets on; after RESTARTS restarts without such a word the
leases are told and end.
"""

from __future__ import annotations

import json
import selectors
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from openforge.config import Server as ServerConfig
from openforge.policy import process
from openforge.policy.probe import PolicyMismatch
from openforge.policy.server import HEARTBEAT_SECONDS, Server, ServerError, last_lines
from openforge.policy.state import Place, places, send
from openforge.software import SoftwareMissing

TICK = 0.25
REMIND = 30.0
RESTARTS = 3  # of a server within a lease and without progress
WATCH_SECONDS = 2.0  # between looks at a leased server's health
BEAT_SECONDS = 15.0  # between an answered heartbeat and the next


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


class Heartbeat:
    """Asks a leased server for one token from time to time, in a thread: the answer of one that hangs never comes."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.stopped = False  # the server hangs
        self._next = time.monotonic() + BEAT_SECONDS
        self._thread: threading.Thread | None = None

    def turn(self) -> None:
        if self._thread is not None and not self._thread.is_alive():
            self._thread, self._next = None, time.monotonic() + BEAT_SECONDS
        if self._thread is None and time.monotonic() >= self._next:
            self._thread = threading.Thread(target=self._beat, daemon=True)
            self._thread.start()

    def _beat(self) -> None:
        self.stopped = not self.server.heartbeat(HEARTBEAT_SECONDS)


class Keeper:
    def __init__(self, cfg: ServerConfig, place: Place, root: Path) -> None:
        self.cfg, self.place, self.root = cfg, place, root
        self.me = process.this()
        self.server: Server | None = None
        self.owners: set[process.Identity] = set()
        self.clients: list[Client] = []
        self.ending = False
        self.born = time.monotonic()
        self.restarts = 0
        self.beat: Heartbeat | None = None
        self._look_at = 0.0
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
                self._watch()
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
        elif message["op"] == "progress":
            self.restarts = 0
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

    # ---- the leased server ---------------------------------------------------------------------------------
    def _leased(self) -> list[Client]:
        return [c for c in self.clients if c.state == "leased"]

    def _watch(self) -> None:
        """Restart a leased server that died or hangs."""
        if self.server is None or not self._leased():
            self.beat, self.restarts = None, 0
            return
        if self.beat is None or self.beat.server is not self.server:
            self.beat = Heartbeat(self.server)
        self.beat.turn()
        if self.beat.stopped:
            self._revive(f"it hangs: one token was not sampled within {HEARTBEAT_SECONDS:g} s")
        elif time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + WATCH_SECONDS
            fault = self.server.fault()
            if fault is not None:
                self._revive(fault)

    def _revive(self, why: str) -> None:
        """Start the server again as it was; without progress since RESTARTS restarts, give its leases up."""
        server, leased = self.server, self._leased()
        assert server is not None
        at = (server.port, server.api_key)
        while self.restarts < RESTARTS:
            self.restarts += 1
            print(f"the policy server is started again ({self.restarts}): {why}", flush=True)
            for client in leased:
                self._tell(client, {"restart": why})
            self._stop()
            try:
                self.server = self._start(leased[0], at)
                return
            except ServerError as e:
                why = str(e)
            except (PolicyMismatch, SoftwareMissing, OSError) as e:
                why = f"it cannot be started again: {e}"
                break
        end = "" if last_lines(self.place.log) in why else last_lines(self.place.log)
        said = f"the policy server was lost after {self.restarts} restarts without progress: {why}{end}"
        self._stop()
        self.restarts = 0
        for client in self._leased():
            self._tell(client, {"lost": said})
            self._drop(client)

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
        # Under a lease `_watch` restarts it; without one nobody knows its port.
        if self.server is not None and not self._leased() and not self.server.healthy():
            print(f"the policy server is dead or ill; {client.job} starts it anew", flush=True)
            self._stop()
        if self.server is None:
            self._wait(client, "the policy server starts")
            self._make_room(client)
            self.restarts = 0
            self.server = self._start(client, None)
        elif self.server.version != client.version:
            self.server.swap(client.policy, client.version)
        return self.server

    def _start(self, client: Client, at: tuple[int, str] | None) -> Server:
        return Server.start(
            self.cfg,
            client.policy,
            client.version,
            log=self.place.log,
            root=self.root,
            at=at,
            started=lambda s: self.place.write(self.me, s.identity),
            waiting=self._while_starting,
        )

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
