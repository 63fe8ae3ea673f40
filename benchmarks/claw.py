"""Episodes with services: what they cost, that none sees another's state, and that nothing is left of them.

    python benchmarks/claw.py --episodes 200 --json claw.json

Plays episodes of two small services two at a time, through the environment itself; the agent is a shell script that
calls tools, so that no policy is needed. Each checks that it found its services as they start and left them as it
should. Then CPU seconds an episode, of this process and everything below it, one episode at a time in a backend of its
own: without services, with them, and with calls. The differences are what the phases cost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import resource
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import psutil

from openforge.environments import create_env, llm_args
from openforge.environments.claw_eval.evidence import TREE
from openforge.environments.claw_eval.folder import make_verifier
from openforge.environments.claw_eval.setup import KEY, Service, Setup, Tool, Tree, digest
from openforge.harnesses.base import Context, Ended, Harness, Output, python_binds
from openforge.sandboxes import LocalBackend, Owner
from openforge.sandboxes.protocol import Bind, Sandbox
from openforge.tables import write_beside

SERVICES = {"mail": 9100, "notes": 9105}
CALLS = 5

_SERVICE = """
import json, os
from http.server import BaseHTTPRequestHandler, HTTPServer
items = ["first"]
class Handler(BaseHTTPRequestHandler):
    def answer(self):
        size = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(size) or b"{}")
        if self.path.endswith("/reset"):
            items[:] = ["first"]
        if self.path.endswith("/add"):
            items.append(body["text"])
        data = json.dumps({"items": items}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    do_GET = do_POST = answer
    def log_message(self, *_):
        pass
HTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
"""
_VERIFY = """
import json, pathlib, sys
at, own = pathlib.Path(sys.argv[1]), sys.argv[2]
audit = json.loads((at / "audit.json").read_text())
calls = (at / "dispatches.jsonl").read_text().splitlines()
expected = ["first", own] if calls else ["first"]
right = all(a["items"] == expected for a in audit.values())
print(json.dumps({"score": float(right), "passed": right, "services": len(audit), "calls": len(calls)}))
"""


class Script(Harness):
    """An agent that is a shell script, the first part of its instruction."""

    name, version, software, dialect = "script", "1", "none", "chat"
    cannot = ()
    constants: ClassVar[dict[str, str]] = {}

    def binds(self, root: Path | None = None) -> list[Bind]:
        return python_binds()

    async def place(self, sandbox: Sandbox) -> str:
        return self.version

    def files(self, ctx: Context) -> dict[str, bytes]:
        return {"task.sh": ctx.instruction.partition("\n\n")[0].encode()}

    def env(self, ctx: Context) -> dict[str, str]:
        return {}

    def argv(self, ctx: Context) -> list[str]:
        return ["bash", f"{ctx.home}/task.sh"]

    def version_argv(self) -> list[str]:
        return ["true"]

    def read_output(self, ended: Ended, record: bytes | None) -> Output:
        return Output(None, ended.log.decode())


def setup(source: Path) -> Setup:
    """Two services, a tool each."""
    schema = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    services, tools = [], []
    for name, port in SERVICES.items():
        base = f"http://localhost:{port}/{name}"
        services.append(
            Service(name, "python3 -I -S lib/service.py", port, f"{base}/health", "POST", 10.0, f"{base}/reset", {})
        )
        tools.append(Tool(f"{name}_add", "Add a text.", schema, f"{base}/add", "POST"))
    return Setup(
        services=tuple(services), tools=tuple(tools), tree=(Tree(str(source), "lib", digest(source)),), cwd=TREE
    )


async def episode(backend: LocalBackend, number: int, needs: Setup, calls: int) -> dict[str, Any]:
    """One episode: its status, verdict and seconds by phase."""
    own = f"episode-{number}"
    harness = Script()
    agent = "true"
    if calls:
        # Each service gets its text once; the others are calls with bad arguments, which reach none.
        adds = [f'tool {name}_add \'{{"text": "{own}"}}\'' for name in SERVICES]
        agent = "\n".join([*adds, *["tool mail_add '{}' || true"] * (calls - len(adds))])
    files = [{"path": "verify.py", "content": _VERIFY.encode(), "mode": 0o644}]
    task = {
        "task_id": own,
        "payload": json.dumps({KEY: needs.payload()}),
        "instruction": agent,
        "files": [],
        "verifier": make_verifier("bench", ("python3", "-I", "verify.py", "{evidence}", own), files, 60.0),
        "sampling": {"max_tokens": 16},
    }

    async def close(harness_exited: bool) -> None:
        return None

    start = time.monotonic()
    sandbox = await backend.create(own, binds=harness.binds())
    created = time.monotonic() - start
    try:
        result = await create_env("claw_eval", sandbox).run(
            task=task,
            llm_args=llm_args(f"http://127.0.0.1:8080/s/{own}", "key", "policy", 2048),
            harness=harness,
            harness_options={},
            limits={"turns": None, "tokens": None, "seconds": 60.0},
            session=close,
        )
    finally:
        await sandbox.delete()
    verdict = json.loads(result.verifier_output or "{}")
    return {"status": result.status, "passed": verdict.get("passed"), "seconds": {"create": created, **result.seconds}}


async def many(root: Path, episodes: int, needs: Setup, at_once: int = 2) -> list[dict[str, Any]]:
    """So many episodes with calls, `at_once` at a time, in one backend."""
    free = asyncio.Semaphore(at_once)
    async with LocalBackend(root, "bench", Owner.current()) as backend:

        async def one(number: int) -> dict[str, Any]:
            async with free:
                return await episode(backend, number, needs, CALLS)

        return await asyncio.gather(*(one(n) for n in range(episodes)))


def cpu() -> float:
    """CPU seconds so far of this process and of every one below it that has ended."""
    usage = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(u.ru_utime + u.ru_stime for u in usage)


async def costs(root: Path, episodes: int, needs: Setup, calls: int) -> list[float]:
    """CPU seconds of each of so many episodes, one at a time; the backend's own start is in each."""
    found = []
    for number in range(episodes):
        before = cpu()
        async with LocalBackend(root, "bench", Owner.current()) as backend:
            done = await episode(backend, number, needs, calls)
        if done["passed"] is not True:
            raise SystemExit(f"an episode went wrong: {done}")
        found.append(cpu() - before)
    return found


def left_over(root: Path, source: Path) -> list[str]:
    """Files of sandboxes and processes of episodes that are still there."""
    words = (str(root), str(source), "lib/service.py")
    found = [str(p) for p in root.iterdir()]
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or ())
        if process.pid != psutil.Process().pid and any(w in line for w in words):
            found.append(f"pid {process.pid}: {line[:100]}")
    return found


def quantiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {"median": statistics.median(ordered), "p90": ordered[math.ceil(0.9 * len(ordered)) - 1], "max": ordered[-1]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--costs", type=int, default=20, help="episodes a variant whose CPU time is measured")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="openforge-claw-") as folder:
        root, source = Path(folder) / "sandboxes", Path(folder) / "lib"
        source.mkdir()
        (source / "service.py").write_text(_SERVICE)
        needs = setup(source)
        start = time.monotonic()
        done = asyncio.run(many(root, args.episodes, needs))
        wall = time.monotonic() - start
        left = left_over(root, source)
        variants = {"none": (Setup(), 0), "services": (needs, 0), "services and calls": (needs, CALLS)}
        spent = {name: asyncio.run(costs(root, args.costs, *of)) for name, of in variants.items()}
        left += left_over(root, source)
    phases = {p: quantiles([d["seconds"][p] for d in done]) for p in done[0]["seconds"]}
    figures = {
        "episodes": len(done),
        "ends": Counter(f"{d['status']}, {'passed' if d['passed'] else 'not passed'}" for d in done),
        "episodes_a_minute": 60 * len(done) / wall,
        "seconds": phases,
        "cpu_seconds": {name: quantiles(values) for name, values in spent.items()},
        "left_over": left,
    }
    text = json.dumps(figures, indent=1)
    print(text)
    if args.json is not None:
        write_beside(args.json, text)
    return 0 if not left and all(d["passed"] is True for d in done) else 1


if __name__ == "__main__":
    sys.exit(main())
