"""A project root with a stub server, and jobs that lease it."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from openforge import software
from openforge.config import Server
from openforge.policy import process
from openforge.policy.keeper import Keeper
from openforge.policy.lease import Endpoint, lease
from openforge.policy.state import Place, places, server_key

HERE = Path(__file__).parent


def until(condition: Callable[[], object], what: str, seconds: float = 30) -> None:
    """Poll for an event; fail with its name after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)


class Job:
    """A job process that leases a policy."""

    def __init__(self, stub: "Stub", policy: str, name: str, owner: process.Identity) -> None:
        argv = [sys.executable, str(HERE / "job.py"), str(stub.root), str(stub.state), str(stub.policy(policy)), name]
        env = {**os.environ, "OPENFORGE_OWNER": str(owner), "PYTHONPATH": str(HERE.parents[1])}
        self.process = subprocess.Popen(
            argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._pump, daemon=True).start()

    def _pump(self) -> None:
        for line in self.process.stdout or ():
            self.lines.put(line.strip())

    def says(self, seconds: float = 30) -> str:
        """Its next line."""
        return self.lines.get(timeout=seconds)

    def leased(self) -> str:
        """Base URL of its lease, after whatever it says before."""
        line = self.says()
        while not line.startswith("leased"):
            assert line.startswith("waiting"), line
            line = self.says()
        return line.split()[1]

    def end(self) -> None:
        """Let it go on and end by itself."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(30) == 0


class Stub:
    """A project root whose serve-cpu Python starts the stub, a state directory, and policies."""

    def __init__(self, folder: Path) -> None:
        self.root, self.state, self.events = folder / "root", folder / "state", folder / "events"
        python = self.root / ".software" / "serve-cpu" / "bin" / "python"
        python.parent.mkdir(parents=True)
        # The launcher's "-m vllm.entrypoints.openai.api_server" is dropped, the rest handed on.
        python.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} {HERE / "stub_vllm.py"} "$@"\n')
        python.chmod(0o755)
        ready = {"pins": software.pins_digest("serve-cpu", self.root)}
        (self.root / ".software" / "serve-cpu" / "ready.json").write_text(json.dumps(ready))
        self.keeper: Keeper
        self.jobs: list[Job] = []
        self.owners: list[subprocess.Popen[bytes]] = []
        self.state.mkdir()

    def policy(self, name: str, *marks: str) -> Path:
        """A policy folder; its probe differs from every other name's."""
        folder = self.root / "policies" / name
        if not folder.exists():
            folder.mkdir(parents=True)
            (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
            (folder / "model.safetensors").write_bytes(name.encode())
            probe = {"ids": [1, 2, 3], "logprobs": [-float(ord(name[0])), -1.0]}
            (folder / "probe.json").write_text(json.dumps(probe))
        for mark in marks:
            (folder / mark).touch()
        return folder

    def owner(self) -> process.Identity:
        """A process that owns warm servers and lives until it is ended."""
        self.owners.append(subprocess.Popen(["sleep", "600"]))
        who = process.identity(self.owners[-1].pid)
        assert who is not None
        return who

    def end_owner(self) -> None:
        self.owners[-1].kill()
        self.owners[-1].wait()

    def job(self, policy: str, name: str = "job", owner: process.Identity | None = None) -> Job:
        self.jobs.append(Job(self, policy, name, owner or process.this()))
        return self.jobs[-1]

    def place(self) -> Place:
        (place,) = places(self.state)
        return place

    def record(self) -> tuple[process.Identity, process.Identity]:
        """Keeper and server in force."""
        until(lambda: places(self.state) and all(self.place().read()), "a keeper with a server")
        keeper, server = self.place().read()
        assert keeper is not None and server is not None
        return keeper, server

    def log(self) -> list[str]:
        """Starts (without pid) and reloads so far."""
        lines = self.events.read_text().splitlines() if self.events.exists() else []
        return [" ".join(line.split()[:2]) for line in lines]

    def close(self) -> None:
        for job in self.jobs:
            job.process.kill()
            job.process.wait()
        for owner in self.owners:
            owner.kill()
            owner.wait()
        for place in places(self.state):
            for who in place.read():
                if who is not None:
                    process.end_session(who, grace=2)


@contextlib.contextmanager
def kept(
    cfg: Server, policy: Path, state: Path, root: Path, owner: process.Identity
) -> Iterator[tuple[Endpoint, Keeper]]:
    """A lease of a policy, and its keeper, which runs in a thread here until `owner` is gone."""
    state.mkdir(exist_ok=True)
    keeper = Keeper(cfg, Place(state, server_key(cfg, policy, root)), root)
    # A daemon: one that never ends must fail its test, and not keep pytest from ending.
    thread = threading.Thread(target=keeper.run, daemon=True)
    thread.start()
    try:
        with lease(cfg, policy, "a@0", state_dir=state, job="j", root=root) as endpoint:
            yield endpoint, keeper
    finally:
        os.kill(owner.pid, signal.SIGKILL)
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    s = Stub(tmp_path)
    monkeypatch.setenv("STUB_EVENTS", str(s.events))
    yield s
    s.close()
