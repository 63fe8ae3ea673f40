"""Lease the policy server: what a rollout or evaluation job uses to reach its policy."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openforge import software
from openforge.config import Server as ServerConfig
from openforge.policy import process
from openforge.policy.endpoint import Endpoint, Link, attach
from openforge.policy.keeper import wait_until_dead
from openforge.policy.probe import PolicyMismatch
from openforge.policy.server import MODEL, ServerError, last_lines
from openforge.policy.state import Place, send, server_key, sweep
from openforge.policy.weights import check_kept

__all__ = ["Endpoint", "Link", "PolicyMismatch", "ServerError", "lease"]


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def lease(
    cfg: ServerConfig,
    policy_dir: Path | None,
    version: str,
    *,
    state_dir: Path,
    job: str,
    root: Path | None = None,
    progress: Callable[[str], None] = _report,
) -> Iterator[Endpoint]:
    """Reach `policy_dir` for the length of the context; nobody changes the server's weights meanwhile.

    With `cfg.url` the server is someone else's and used as it is. With `cfg.warm` it stays for the next job
    until its owner ends: the process that OPENFORGE_OWNER (PID:STARTTIME) names, else the parent of the first
    job. Without, it is this job's and ends with the context. Blocks while the server starts or another policy is
    leased.

    Args:
        policy_dir: a checkpoint folder; unused with `cfg.url`.
        version: its policy_version.
        state_dir: sockets, records and logs of this machine's servers (a local disk).
        job: a name for messages.
        root: project root, for software environments and the chat template.
        progress: takes a line when the reason of waiting changes.

    Raises:
        ServerError: the server cannot be started or reached.
        PolicyMismatch: it does not serve the checkpoint's weights; the run must stop.
        CheckpointError: the weights of `policy_dir` were pruned.
        SoftwareMissing: its environment is not built.
    """
    if cfg.url is not None:
        yield attach(cfg, version, progress)
        return
    if policy_dir is not None:
        check_kept(policy_dir)
    if policy_dir is None or not (policy_dir / "config.json").is_file():
        raise ServerError(f"{job}: a policy folder with config.json is needed to start a server, not {policy_dir}")
    software.python_of(f"serve-{cfg.device}", root)
    state_dir.mkdir(parents=True, exist_ok=True)
    place = Place(state_dir.resolve(), server_key(cfg, policy_dir, root) + ("" if cfg.warm else f"-{os.getpid()}"))
    request = {
        "op": "lease",
        "policy": str(policy_dir.resolve()),
        "version": version,
        "job": job,
        "client": str(process.this()),
        "owner": str(_owner() if cfg.warm else process.this()),
    }
    try:
        sock, answer = _ask(cfg, place, request, root or software.ROOT, progress)
        base_url = f"http://127.0.0.1:{answer['port']}/v1"
        with sock:
            yield Endpoint(base_url, answer["api_key"], MODEL, cfg.max_model_len, version, seeded=True, link=Link(sock))
    finally:
        if not cfg.warm:
            _end(place)


def _owner() -> process.Identity:
    named = os.environ.get("OPENFORGE_OWNER")
    if named:
        return process.parse(named)
    return process.identity(os.getppid()) or process.this()


def _ask(
    cfg: ServerConfig, place: Place, request: dict[str, Any], root: Path, progress: Callable[[str], None]
) -> tuple[socket.socket, dict[str, Any]]:
    """The connection that is the lease, and the keeper's answer."""
    for _ in range(5):
        sock = _connect(cfg, place, root)
        # The keeper speaks at least twice a minute, except while it changes weights (600 s a step at most).
        sock.settimeout(660)
        try:
            send(sock, request)
            answer = _answer(sock, progress)
        except TimeoutError as e:
            sock.close()
            raise ServerError(
                f"the keeper of the policy server has been silent for 11 minutes; see {place.folder}"
            ) from e
        except OSError:
            answer = None
        except BaseException:
            sock.close()
            raise
        if answer is not None:
            return sock, answer
        # The keeper was about to end, or was killed: start anew.
        sock.close()
    raise ServerError(f"the keeper of the policy server died five times{last_lines(place.file('keeper.log'))}")


def _answer(sock: socket.socket, progress: Callable[[str], None]) -> dict[str, Any] | None:
    """The keeper's answer to a lease request; None if the connection ended without one."""
    told = None
    # Unbuffered: what the keeper says after its answer is the lease holder's to read.
    with sock.makefile("rb", buffering=0) as lines:
        for line in lines:
            message: dict[str, Any] = json.loads(line)
            if "error" in message:
                error = PolicyMismatch if message["kind"] == "PolicyMismatch" else ServerError
                raise error(message["error"])
            if "port" in message:
                return message
            if message["wait"] != told:
                told = message["wait"]
                progress(f"waiting for the policy: {told}")
    return None


def _connect(cfg: ServerConfig, place: Place, root: Path) -> socket.socket:
    """A connection to the keeper, which is started where none runs."""
    with place.locked():
        sock = place.connect()
        if sock is not None:
            return sock
        keeper, _ = place.read()
        # A keeper without a socket is ending; it stops its server first.
        if keeper is not None and not wait_until_dead(keeper, 60):
            process.end_session(keeper)
        sweep(place.folder)
        return _start_keeper(cfg, place, root)


def _start_keeper(cfg: ServerConfig, place: Place, root: Path) -> socket.socket:
    argv = [sys.executable, "-m", "openforge.policy.keeper"]
    argv += [str(place.folder), place.key, cfg.model_dump_json(), str(root)]
    package_root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([package_root, *filter(None, [os.environ.get("PYTHONPATH")])])
    # A keeper serves several runs and ends by itself: it is nobody's orphan (openforge/run_start.py).
    env = {k: v for k, v in os.environ.items() if k != "OPENFORGE_RUNS"}
    with open(place.file("keeper.log"), "ab") as log:
        child = subprocess.Popen(
            argv,
            env={**env, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = time.monotonic() + 60
    while child.poll() is None and time.monotonic() < deadline:
        sock = place.connect()
        if sock is not None:
            return sock
        time.sleep(0.02)
    raise ServerError(f"the keeper of the policy server did not start{last_lines(place.file('keeper.log'))}")


def _end(place: Place) -> None:
    """End a keeper that serves one job, and wait until its server is gone."""
    keeper, _ = place.read()
    sock = place.connect()
    if sock is not None:
        with sock:
            send(sock, {"op": "end"})
    if keeper is not None and not wait_until_dead(keeper, 60):
        process.end_session(keeper)
        sweep(place.folder)
