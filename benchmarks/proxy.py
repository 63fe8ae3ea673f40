"""What the recording proxy costs: CPU, latency, memory and disk a call; what kill -9 loses; what lineage takes.

    python benchmarks/proxy.py --json out.json [--quick] [--only cpu latency disk sessions memory kills lineage]

The policy server is a stub (benchmarks/proxy_load.py) that answers at once with token ids and logprobs; 8 KB of
history, 64 sampled tokens. `cpu_ms` is the proxy process's own CPU time a call, the median of several rounds, which
other load on the machine hardly blurs. --quick does a twentieth of the work.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
import tracemalloc
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvloop
from proxy_load import TURNS, Load

from openforge.proxy import journal, lineage
from openforge.proxy.client import Proxy, start_proxy
from openforge.samples.merge import merge

Json = dict[str, Any]
SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "max_tokens": 512,
}
CONCURRENCY = (1, 32, 256)


@asynccontextmanager
async def stub() -> AsyncIterator[int]:
    """A stub policy server in a process of its own; its port."""
    here = Path(__file__).with_name("proxy_load.py")
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, str(here), stdin=pipe, stdout=pipe)
    assert process.stdout is not None and process.stdin is not None
    try:
        yield int(await process.stdout.readline())
    finally:
        process.stdin.close()
        await process.wait()


class Bench:
    """A proxy before the stub, its journal in a folder of its own."""

    def __init__(self, upstream: int, proxy: Proxy, folder: Path) -> None:
        self.upstream, self.proxy, self.folder = upstream, proxy, folder

    @classmethod
    @asynccontextmanager
    async def started(cls, upstream: int) -> AsyncIterator[Bench]:
        with tempfile.TemporaryDirectory() as folder:
            proxy = await start_proxy(f"http://127.0.0.1:{upstream}", Path(folder), port=0)
            try:
                yield cls(upstream, proxy, Path(folder))
            finally:
                await proxy.stop()

    async def open(self, names: list[str]) -> list[str]:
        """Open sessions; the paths of their chat completions."""
        for name in names:
            await self.proxy.open_session(
                name,
                secret="k",
                sampling=SAMPLING,
                limits={"turns": None, "tokens": None},
                deadline_seconds=36000,
                policy_version="0@bench",
                context_window=1 << 20,
            )
        return [f"/s/{name}/v1/chat/completions" for name in names]

    def load(self, paths: list[str], **how: Any) -> Load:
        assert self.proxy.port is not None
        return Load(self.proxy.port, paths, **how)

    def cpu(self) -> float:
        """CPU seconds of the proxy process so far, all its threads."""
        tasks = Path(f"/proc/{self.proxy.pid}/task")
        return sum(int((t / "schedstat").read_text().split()[0]) for t in tasks.iterdir()) / 1e9

    def rss(self) -> int:
        """Resident bytes of the proxy process."""
        pages = Path(f"/proc/{self.proxy.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def written(self) -> int:
        """Bytes of the journal."""
        return sum(f.stat().st_size for f in self.folder.glob("*.jsonl"))


# ---- sections ----------------------------------------------------------------------------------
def calibration() -> float:
    """CPU milliseconds of a fixed loop: how much slower than alone everything runs on a busy machine."""
    begun = time.process_time()
    total = 0
    for i in range(200_000):
        total += i * i % 7
    return 1000 * (time.process_time() - begun)


async def cpu(upstream: int, share: float) -> Json:
    found: Json = {"cpu_ms": {"plain": {}, "stream": {}}}
    loops: list[float] = []
    rounds = 3 if share < 1 else 7
    async with Bench.started(upstream) as b:
        for mode in ("plain", "stream"):
            for c in CONCURRENCY:
                paths = await b.open([f"{mode}-{c}-{i}" for i in range(c)])
                await b.load(paths, stream=mode == "stream").load(calls=2 * c)
                used = []
                for _ in range(rounds):
                    load, before = b.load(paths, stream=mode == "stream"), b.cpu()
                    await load.load(calls=max(c, int(1000 * share)))
                    used.append(1000 * (b.cpu() - before) / len(load.took))
                    loops.append(calibration())
                found["cpu_ms"][mode][str(c)] = round(statistics.median(used), 3)
        events: list[int] = []
        load = b.load(paths, stream=True, bodies=lambda body: events.append(body.count(b"\n\ndata: ")))
        await load.load(calls=1)
    slow = {"median": round(statistics.median(loops), 1), "best": round(min(loops), 1)}
    return found | {"stream_events": events[0], "calibration_ms": slow}


async def latency(upstream: int, share: float) -> Json:
    straight, proxied = list[float](), list[float]()
    async with Bench.started(upstream) as b:
        paths = await b.open(["one"])
        for _ in range(10):
            direct, through = Load(b.upstream, ["/v1/chat/completions"]), b.load(paths)
            for load in (direct, through):
                await load.load(calls=max(10, int(200 * share)))
            straight += direct.took
            proxied += through.took
    a, p = (1000 * statistics.median(x) for x in (straight, proxied))
    return {"added_p50_ms": round(p - a, 3), "direct_p50_ms": round(a, 3)}


async def disk(upstream: int, share: float) -> Json:
    async with Bench.started(upstream) as b:
        episodes = max(2, int(40 * share))
        paths = await b.open([f"e{i}" for i in range(episodes)])
        before = b.written()
        await b.load(paths).load(each=1)
        first = (b.written() - before) / episodes
        paths = await b.open([f"f{i}" for i in range(episodes)])
        before = b.written()
        await b.load(paths).load(each=TURNS)
        whole = (b.written() - before) / (TURNS * episodes)
    return {"bytes_per_call": round(whole), "bytes_first_call": round(first)}


async def sessions(upstream: int, share: float) -> Json:
    n = int(1000 * share)
    answers: list[bytes] = []
    async with Bench.started(upstream) as b:
        paths = await b.open([f"e{i}" for i in range(n)])
        for at in range(0, n, 250):
            part = paths[at : at + 250]
            await b.load(part, bodies=answers.append).load(each=2)
        states = [await b.proxy.session(f"e{i}") for i in range(n)]
    errors = 2 * n - len(answers) + sum(s["closed"] or s["calls"] < 1 for s in states)
    return {"open_sessions": n, "open_sessions_errors": errors}


async def memory(upstream: int, share: float) -> Json:
    async with Bench.started(upstream) as b:
        paths = await b.open([f"e{i}" for i in range(64)])
        await b.load(paths).load(calls=int(10_000 * share))
        before = b.rss()
        await b.load(paths).load(calls=int(90_000 * share))
        return {"rss_growth_mb": round((b.rss() - before) / 2**20, 1), "rss_mb": round(b.rss() / 2**20, 1)}


async def kills(upstream: int, share: float) -> Json:
    total: Counter[str] = Counter()
    rounds = max(2, int(10 * share))
    for n in range(rounds):
        async with Bench.started(upstream) as b:
            answers: list[bytes] = []
            load = b.load(await b.open([f"e{i}" for i in range(64)]), broken=True, bodies=answers.append)
            task = asyncio.create_task(load.load())
            enough = 64 + random.Random(n).randrange(int(3000 * max(share, 0.1)))
            while len(answers) < enough:
                await asyncio.sleep(0.001)
            os.kill(b.proxy.pid, signal.SIGKILL)
            await task
            whole = [json.loads(raw)["choices"][0]["message"]["content"] for raw in answers]
            on_disk = Counter(r["response"]["content"] for r in journal.read(b.folder) if r["record"] == "call")
            total["answers"] += len(whole)
            total["lost"] += sum(not on_disk[text] for text in whole)
            total["doubled"] += sum(times > 1 for times in on_disk.values())
    return {"kills": {"rounds": rounds, **{k: total[k] for k in ("answers", "lost", "doubled")}}}


# ---- lineage -----------------------------------------------------------------------------------
AGENTS, CALLS, TOKENS = 4, 16, 1_300_000


def interleaved(order: list[int], tokens: int) -> list[Json]:
    """Records of `AGENTS` x `CALLS` calls in this order of arrival; every agent's prompts extend one another."""
    draw = random.Random(0)
    step = 2 * tokens // (AGENTS * CALLS * (CALLS + 1))
    response = array("i", [draw.randrange(50000) for _ in range(64)])
    made: dict[int, tuple[array[int], list[Json]]] = {}
    shared = array("i", [draw.randrange(50000) for _ in range(step // 2)])
    for agent in range(AGENTS):
        prompt, said = array("i", shared), list[Json]()
        prompt.extend(draw.randrange(50000) for _ in range(step - len(shared)))
        for turn in range(CALLS):
            said = [*said, {"role": "user", "content": f"agent {agent} turn {turn}"}]
            made[agent * CALLS + turn] = prompt, said
            prompt = prompt + response + array("i", [draw.randrange(50000) for _ in range(step - 64)])
            said = [*said, {"role": "assistant", "content": f"answer {agent} {turn}"}]
    records: list[Json] = []
    for n, slot in enumerate(order):
        prompt, said = made[slot]
        records.append(
            {
                "record": "call",
                "episode_id": "e",
                "call": n,
                "dialect": "chat",
                "model": "m",
                "arrived": 1.7e9 + n,
                "latency": 0.1,
                "policy_version": "0@bench",
                "sampling": SAMPLING,
                "asked": {},
                "retry": 0,
                "body_sha256": str(slot),
                "messages": said,
                "tools": None,
                "response": {"role": "assistant", "content": f"answer {slot // CALLS} {slot % CALLS}"},
                "finish_reason": "stop",
                "usage": {"prompt_tokens": len(prompt), "completion_tokens": 64},
                "prompt_token_ids": prompt,
                "response_token_ids": response,
                "logprobs": array("d", [-0.5] * 64),
            }
        )
        records.append({"record": "delivery", "episode_id": "e", "call": n, "state": "sent"})
    return [*records, {"record": "close", "episode_id": "e", "harness_exited": True}]


async def rows(_upstream: int, share: float) -> Json:
    took, counts, peak, total = [], set[int](), 0, 0
    for n in range(3 if share < 1 else 15):
        order = list(range(AGENTS * CALLS))
        random.Random(n).shuffle(order)
        records = interleaved(order, int(TOKENS * share))
        total = sum(len(r["prompt_token_ids"]) for r in records if r["record"] == "call")
        begun = time.process_time()  # nothing here waits, and the machine is shared
        calls, _ = lineage.call_rows(records)
        merged, _ = merge(calls)
        took.append(1000 * (time.process_time() - begun))
        counts.add(len(merged))
    del calls, merged
    tracemalloc.start()
    merge(lineage.call_rows(records)[0])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    (found,) = counts
    ms = round(statistics.median(took), 1)
    return {"lineage": {"ms": ms, "rows": found, "prompt_tokens": total, "memory_x": round(peak / (4 * total), 2)}}


SECTIONS: dict[str, Callable[[int, float], Awaitable[Json]]] = {
    "cpu": cpu,
    "latency": latency,
    "disk": disk,
    "sessions": sessions,
    "memory": memory,
    "kills": kills,
    "lineage": rows,
}


def table(found: Json) -> list[str]:
    """The figures as lines of a Markdown table."""
    lines = ["| | |", "|---|---|"]
    for key, value in found.items():
        inner = value.items() if isinstance(value, dict) else [("", value)]
        for name, v in inner:
            told = ", ".join(f"{k}: {x}" for k, x in v.items()) if isinstance(v, dict) else v
            lines.append(f"| {key} {name} | {told} |".replace("  ", " "))
    return lines


async def main(args: argparse.Namespace) -> Json:
    found: Json = {"cpus": os.cpu_count(), "quick": args.quick}
    async with stub() as upstream:
        for name in args.only:
            found |= await SECTIONS[name](upstream, 0.05 if args.quick else 1.0)
    return found


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--json", type=Path, metavar="F", help="also write the figures to F")
    p.add_argument("--quick", action="store_true", help="a twentieth of the work")
    p.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS), metavar="SECTION")
    args = p.parse_args()
    result = uvloop.run(main(args))
    print("\n".join(table(result)))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
