"""Cost of local sandboxes: `python benchmarks/sandboxes.py [--json FILE] [-n N]`.

Prints, and writes as JSON: {n, create_ms, exec_ms, upload_ms, delete_ms} (wall, median) and {create_cpu_ms,
exec_cpu_ms} (mean, user + system of every process of ours, the sandbox's own included).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import tempfile
import time
from pathlib import Path

from openforge.sandboxes import LocalBackend, LocalSandbox, Owner


def cpu_seconds(spawner: int) -> float:
    """CPU of this process and of the spawner with all that it has reaped."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    fields = Path(f"/proc/{spawner}/stat").read_bytes().rpartition(b")")[2].split()
    return own.ru_utime + own.ru_stime + sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


async def timed(times: list[float], work: object) -> object:
    """Await `work` and note its milliseconds."""
    start = time.perf_counter()
    result = await work  # type: ignore[misc]
    times.append((time.perf_counter() - start) * 1000)
    return result


async def measure(root: Path, n: int) -> dict[str, float]:
    """The figures over `n` sandboxes and 10 n execs."""
    create: list[float] = []
    run: list[float] = []
    upload: list[float] = []
    delete: list[float] = []
    async with LocalBackend(root, "benchmark", Owner.current()) as backend:
        warm = await backend.create("warm")
        await warm.exec("true")
        pid = backend.spawner.pid
        assert pid is not None
        start = cpu_seconds(pid)
        for _ in range(10 * n):
            await timed(run, warm.exec("true"))
        exec_cpu = cpu_seconds(pid) - start
        for _ in range(n):
            await timed(upload, warm.upload_content(b"x" * 1000, "file"))
        start = cpu_seconds(pid)
        for _ in range(n):
            sandbox = await timed(create, backend.create("one"))
            assert isinstance(sandbox, LocalSandbox)
            await timed(delete, sandbox.delete())
        create_cpu = cpu_seconds(pid) - start
    walls = {"create": create, "exec": run, "upload": upload, "delete": delete}
    figures = {f"{name}_ms": round(statistics.median(v), 2) for name, v in walls.items()}
    cpu = {"create_delete_cpu_ms": create_cpu / n * 1000, "exec_cpu_ms": exec_cpu / (10 * n) * 1000}
    return {"n": n, **figures, **{k: round(v, 2) for k, v in cpu.items()}}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Cost of local sandboxes.")
    parser.add_argument("--json", type=Path)
    parser.add_argument("-n", type=int, default=50)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        figures = asyncio.run(measure(Path(root), args.n))
    print(json.dumps(figures, indent=2))
    if args.json:
        args.json.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
