"""What the recording proxy adds to a call: the same requests straight to a stub policy server and through the proxy.

    python benchmarks/proxy.py --json out.json [--seconds 3] [--prompt 512] [--response 64]

The stub answers at once, in vLLM's shape, with token ids and logprobs. Rounds straight and through the proxy take
turns, so that a busy machine slows both. `cpu_ms` is the proxy's own CPU time a call, which other load does not blur.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from openforge.proxy.client import Proxy, start_proxy

TICK = os.sysconf("SC_CLK_TCK")
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": 512}
ROUNDS = 4


def stub_answer(prompt: int, response: int) -> dict[str, Any]:
    content = [{"token": "w", "logprob": -0.5 - i / 100, "bytes": [119], "top_logprobs": []} for i in range(response)]
    return {
        "id": "chatcmpl-stub",
        "object": "chat.completion",
        "created": 1,
        "model": "policy",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "w" * response},
                "logprobs": {"content": content},
                "finish_reason": "stop",
                "token_ids": list(range(1000, 1000 + response)),
            }
        ],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": response,
            "total_tokens": prompt + response,
        },
        "prompt_token_ids": list(range(1000, 1000 + prompt)),
    }


async def stub(prompt: int, response: int) -> None:
    """A process of its own: serves until its stdin ends; prints its port."""
    body = json.dumps(stub_answer(prompt, response)).encode()

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=body, content_type="application/json")

    app = web.Application(client_max_size=2**26)
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


async def load(url: str, concurrency: int, seconds: float, body: bytes) -> list[float]:
    """Closed loop of `concurrency` clients; seconds of each call."""
    took: list[float] = []
    headers = {"authorization": "Bearer k", "content-type": "application/json"}
    until = time.perf_counter() + seconds

    async def client(http: aiohttp.ClientSession) -> None:
        while (begun := time.perf_counter()) < until:
            async with http.post(url, data=body, headers=headers) as r:
                await r.read()
                if r.status != 200:
                    raise RuntimeError(f"{url} answered {r.status}")
            took.append(time.perf_counter() - begun)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        await asyncio.gather(*(client(http) for _ in range(concurrency)))
    return took


def cpu(pid: int) -> float:
    """CPU seconds a process has used, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICK


async def compare(
    direct: str, through: str, proxy: Proxy, concurrency: int, seconds: float, body: bytes
) -> dict[str, Any]:
    straight, proxied, used = list[float](), list[float](), 0.0
    for _ in range(ROUNDS):
        straight += await load(direct, concurrency, seconds / ROUNDS, body)
        before = cpu(proxy.pid)
        proxied += await load(through, concurrency, seconds / ROUNDS, body)
        used += cpu(proxy.pid) - before
    a, b = (1000 * statistics.median(x) for x in (straight, proxied))
    return {
        "concurrency": concurrency,
        "direct_ms": round(a, 3),
        "proxy_ms": round(b, 3),
        "overhead_ms": round(b - a, 3),
        "proxy_p99_ms": round(1000 * statistics.quantiles(proxied, n=100)[98], 3),
        "cpu_ms": round(1000 * used / len(proxied), 3),
        "calls": len(proxied),
    }


async def main(args: argparse.Namespace) -> None:
    command = [sys.executable, __file__, "--stub", "--prompt", str(args.prompt), "--response", str(args.response)]
    upstream = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert upstream.stdout is not None and upstream.stdin is not None
    base = f"http://127.0.0.1:{int(await upstream.stdout.readline())}"
    # About four characters a token, as in English text.
    text = "word " * (args.prompt * 4 // 5)
    messages = [{"role": "system", "content": "You are an agent."}, {"role": "user", "content": text}]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        proxy = await start_proxy(base, Path(folder), port=0)
        try:
            limits: dict[str, Any] = {"turns": None, "tokens": None}
            await proxy.open_session(
                "bench",
                secret="k",
                sampling=SAMPLING,
                limits=limits,
                deadline_seconds=3600,
                policy_version="0@bench",
                context_window=1 << 20,
            )
            through = f"http://127.0.0.1:{proxy.port}/s/bench/v1/chat/completions"
            for stream in (False, True):
                body = json.dumps({"model": "policy", "messages": messages, "stream": stream}).encode()
                for concurrency in (1, 16):
                    row = await compare(f"{base}/v1/chat/completions", through, proxy, concurrency, args.seconds, body)
                    rows.append({"stream": stream, **row})
                    print(json.dumps(rows[-1]), flush=True)
        finally:
            await proxy.stop()
            upstream.stdin.close()
            await upstream.wait()
    result = {"prompt_tokens": args.prompt, "response_tokens": args.response, "cpus": os.cpu_count(), "rows": rows}
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--json", type=Path, metavar="F", help="also write the figures to F")
    p.add_argument("--seconds", type=float, default=3.0, help="measured time a cell and way")
    p.add_argument("--prompt", type=int, default=512, help="prompt tokens")
    p.add_argument("--response", type=int, default=64, help="sampled tokens")
    p.add_argument("--stub", action="store_true", help=argparse.SUPPRESS)
    o = p.parse_args()
    asyncio.run(stub(o.prompt, o.response) if o.stub else main(o))
