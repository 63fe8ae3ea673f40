"""Cost of sandboxes, on this machine and through the server: `python benchmarks/sandboxes.py [--json FILE]`.

    create_p50_ms.{local,server}   from the call to the end of a first `true` inside, median
    exec_p50_ms, exec_cpu_ms       `true` through the server: median, and user + system time of server, keeper and all
                                   that they started (the command's own shell included), mean
    shell_cpu_ms                   the shell's part of it: `bash -c true` started by itself here
    upload_s, download_s           20 MiB each way through the server
    alive                          sandboxes alive at once, each of which answered
    cycles                         sandboxes created and deleted in a row
    killed_jobs                    jobs that ran when the server was killed with SIGKILL: {jobs, whole, twice}
    left                           what remained after the end: processes, mounts, files, descriptors of the server
    load                           the machine's load when it began: on a busy one, wall times are not the program's

`--scale 0.05` is a twentieth of it. The exit code says whether nothing was left and every killed job was whole.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Collection
from pathlib import Path
from typing import Any

import httpx

from openforge.sandboxes import LocalBackend, Owner
from openforge.sandboxes.keeper import SOCKET
from openforge.tables import write_beside

MEBIBYTES = 20
KEY = "a-key-of-the-benchmark"


class Server:
    """`openforge sandboxes serve` on a state folder."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "openforge", "sandboxes", "serve", "--state", str(self.state), "--port", "0"]
        command += ["--max-sandboxes", "100000"]
        env = os.environ | {"API_KEYS": KEY}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
        assert self.process.stdout is not None
        base = self.process.stdout.readline().strip().partition("=")[2]
        limits = httpx.Limits(max_connections=1000)
        self.api = httpx.AsyncClient(base_url=base, headers={"X-API-Key": KEY}, timeout=300, limits=limits)

    async def end(self, how: signal.Signals) -> None:
        self.process.send_signal(how)
        await asyncio.to_thread(self.process.communicate)
        await self.api.aclose()

    async def create(self, **fields: Any) -> str:
        answer = await self.api.post("/sandboxes", json={"wait": True, **fields})
        answer.raise_for_status()
        return str(answer.json()["sandbox_id"])

    async def exec(self, sandbox: str, command: str, **fields: Any) -> dict[str, Any]:
        answer = await self.api.post(f"/sandboxes/{sandbox}/exec", json={"command": command, "wait": True, **fields})
        answer.raise_for_status()
        job: dict[str, Any] = answer.json()
        return job

    def keeper(self) -> int:
        label = next(self.state.glob("sandboxes/*.json"))
        return int(json.loads(label.read_text())["owner"]["pid"])

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


def cpu_seconds(pids: Collection[int]) -> float:
    """CPU time of processes, of all that descend from them, and of all that these have reaped."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()
            parents[int(name)], ticks[int(name)] = int(fields[1]), sum(map(int, fields[11:15]))
    found = set(pids)
    while more := {p for p, parent in parents.items() if parent in found} - found:
        found |= more
    return sum(ticks[p] for p in found) / os.sysconf("SC_CLK_TCK")


async def timed(times: list[float], work: Awaitable[Any]) -> Any:
    """Await `work` and note its milliseconds."""
    start = time.perf_counter()
    result = await work
    times.append((time.perf_counter() - start) * 1000)
    return result


async def local_creates(root: Path, n: int) -> list[float]:
    times: list[float] = []
    async with LocalBackend(root, "benchmark", Owner.current()) as backend:

        async def one() -> Any:
            sandbox = await backend.create("one")
            await sandbox.exec("true")
            return sandbox

        await (await one()).delete()  # the spawner starts with the first
        for _ in range(n):
            await (await timed(times, one())).delete()
    return times


async def server_creates(server: Server, n: int) -> list[float]:
    times: list[float] = []

    async def one() -> str:
        sandbox = await server.create()
        await server.exec(sandbox, "true")
        return sandbox

    for _ in range(n):
        await server.api.delete(f"/sandboxes/{await timed(times, one())}")
    return times


async def execs(server: Server, n: int) -> dict[str, float]:
    sandbox = await server.create()
    for _ in range(20):
        await server.exec(sandbox, "true")
    pids = (server.process.pid, server.keeper())
    before = cpu_seconds(pids)
    times: list[float] = []
    for _ in range(n):
        await timed(times, server.exec(sandbox, "true"))
    cpu = (cpu_seconds(pids) - before) / n * 1000
    data = os.urandom(MEBIBYTES << 20)
    files = f"/sandboxes/{sandbox}/files/raw"
    up: list[float] = []
    down: list[float] = []
    for _ in range(3):
        await timed(up, server.api.put(files, params={"path": "big"}, content=data))
        back = await timed(down, server.api.get(files, params={"path": "big"}))
    assert back.content == data
    await server.api.delete(f"/sandboxes/{sandbox}")
    seconds = {"upload_s": statistics.median(up) / 1000, "download_s": statistics.median(down) / 1000}
    return {"exec_p50_ms": statistics.median(times), "exec_cpu_ms": cpu, **seconds}


def shell_cpu(n: int) -> float:
    """Milliseconds of CPU time that `bash -c true` takes by itself."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for _ in range(n):
        os.waitpid(os.posix_spawn("/bin/bash", ["bash", "-c", "true"], {}), 0)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / n * 1000


async def at_once(server: Server, n: int) -> int:
    """Have `n` sandboxes alive; how many of them answer then."""
    gate = asyncio.Semaphore(8)

    async def one(i: int) -> str:
        async with gate:
            return await server.create(labels={"n": str(i)})

    sandboxes = await asyncio.gather(*(one(i) for i in range(n)))
    answers = await asyncio.gather(*(server.exec(s, f"echo {i}") for i, s in enumerate(sandboxes)))
    alive: int = sum(a["stdout"] == f"{i}\n" for i, a in enumerate(answers))
    await asyncio.gather(*(server.api.delete(f"/sandboxes/{s}") for s in sandboxes))
    return alive


async def cycles(server: Server, n: int) -> int:
    """Create and delete `n` sandboxes, four at a time."""

    async def some(count: int) -> None:
        for _ in range(count):
            sandbox = await server.create()
            (await server.api.delete(f"/sandboxes/{sandbox}")).raise_for_status()

    parts = [n // 4 + (i < n % 4) for i in range(4)]
    await asyncio.gather(*(some(p) for p in parts))
    return n


async def killed(server: Server, n: int) -> dict[str, int]:
    """Kill the server while `n` jobs run; how many end with their whole output, and how many began twice."""
    sandboxes = [await server.create() for _ in range(min(n, 10))]
    for i in range(n):
        command = f"echo begun >> log-{i}; until [ -e go ]; do sleep 0.05; done; seq {i + 1}"
        asked = {"command": command, "job_id": f"job-{i}", "parallel": True}
        (await server.api.post(f"/sandboxes/{sandboxes[i % len(sandboxes)]}/exec", json=asked)).raise_for_status()
    for i, sandbox in enumerate(sandboxes):
        logs = " ".join(f"log-{j}" for j in range(i, n, len(sandboxes)))
        wait = f"for f in {logs}; do until [ -e $f ]; do sleep 0.01; done; done"
        await server.exec(sandbox, wait, parallel=True)
    await server.end(signal.SIGKILL)
    server.start()
    for sandbox in sandboxes:
        await server.exec(sandbox, "touch go", parallel=True)
    whole = twice = 0
    for i in range(n):
        told = (await server.api.get(f"/jobs/job-{i}/wait", params={"timeout": 120})).json()
        whole += told["stdout"] == "".join(f"{k}\n" for k in range(1, i + 2)) and told["exit_code"] == 0
        log = await server.exec(sandboxes[i % len(sandboxes)], f"cat log-{i}")
        twice += log["stdout"] != "begun\n"
    for sandbox in sandboxes:
        await server.api.delete(f"/sandboxes/{sandbox}")
    return {"jobs": n, "whole": whole, "twice": twice}


def remains(state: Path) -> dict[str, int]:
    """What is left of a server that has ended."""
    word, processes = os.fsencode(state), 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            line = Path(f"/proc/{name}/cmdline").read_bytes()
            processes += int(name) != os.getpid() and word in line + Path(f"/proc/{name}/mountinfo").read_bytes()
        except OSError:
            continue
    files = [p for p in state.rglob("*") if p.name != "server.lock"]
    mounts = Path("/proc/self/mountinfo").read_bytes().count(word)
    return {"processes": processes, "mounts": mounts, "files": len(files), "socket": (state / SOCKET).exists()}


async def measure(root: Path, scale: float) -> dict[str, Any]:
    """The figures."""

    def of(n: int) -> int:
        return max(2, round(n * scale))

    figures: dict[str, Any] = {"scale": scale, "load": os.getloadavg()[0]}
    local = await local_creates(root / "local", of(100))
    server = Server(root / "state")
    first = await server.create()
    await server.exec(first, "true")
    await server.api.delete(f"/sandboxes/{first}")
    descriptors = server.descriptors()
    served = await server_creates(server, of(100))
    figures["create_p50_ms"] = {"local": statistics.median(local), "server": statistics.median(served)}
    figures |= await execs(server, of(1000))
    figures["shell_cpu_ms"] = shell_cpu(of(200))
    figures["alive"] = await at_once(server, of(200))
    figures["cycles"] = await cycles(server, of(1000))
    # Connections that are kept alive for the next call are not left behind.
    await server.api.aclose()
    await asyncio.sleep(0.5)
    more = server.descriptors() - descriptors
    await server.end(signal.SIGTERM)
    left = remains(root / "state")
    server.start()
    figures["killed_jobs"] = await killed(server, of(50))
    await server.end(signal.SIGTERM)
    again = remains(root / "state")
    figures["left"] = {name: int(left[name]) + int(again[name]) for name in left} | {"descriptors": max(0, more)}
    return figures


def rounded(value: Any) -> Any:
    """Floats with three digits."""
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    return round(value, 3) if isinstance(value, float) else value


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--scale", type=float, default=1.0, metavar="X", help="of the numbers of everything (1)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        figures = rounded(asyncio.run(measure(Path(root), args.scale)))
    text = json.dumps(figures, indent=2)
    print(text)
    if args.json:
        write_beside(args.json, text + "\n")
    jobs = figures["killed_jobs"]
    whole = jobs["whole"] == jobs["jobs"] and jobs["twice"] == 0
    return 0 if whole and not any(figures["left"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
