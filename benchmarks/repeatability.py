"""How far seeds make sampling repeatable, and what they cost: conversations against a vLLM of ours, seeded and not.

    python benchmarks/repeatability.py --json out.json [--model M] [--conversations 48] [--turns 4]

Each measurement runs the same conversations twice with the same seeds, from an empty prefix cache, one at a time or 16
at once, and counts the calls that came out the same token by token. A conversation's next prompt holds the answer
before it, so that a token that differs is inherited by the rest. Rounds with and without seeds take turns, so that a
busy machine slows both; `tok_per_cpu_s` counts the server's own CPU time, which other load does not blur.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from openforge.config import Server as ServerConfig
from openforge.policy.models import prepare
from openforge.policy.server import Server
from openforge.policy.weights import read_checkpoint
from openforge.proxy import chat, wire

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
Call = tuple[list[int], list[int], list[float]]  # prompt, response, logprobs


class Client:
    def __init__(self, server: Server, tokens: int) -> None:
        self.server, self.tokens = server, tokens
        self.url = f"http://127.0.0.1:{server.port}"
        self.head = {"authorization": f"Bearer {server.api_key}"}

    async def conversation(self, http: aiohttp.ClientSession, number: int, turns: int, seeded: bool) -> list[Call]:
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"Copy file{number}.txt to backup{number}.txt."}]
        calls: list[Call] = []
        for turn in range(turns):
            request = chat.parse(json.dumps({"messages": messages}).encode(), {})
            seed = wire.call_seed(number, turn) if seeded else None
            body = wire.payload("vllm", request, "policy", SAMPLING, self.tokens, seed)
            async with http.post(f"{self.url}/v1/chat/completions", json=body) as r:
                got = await r.json()
            assert r.status == 200, got
            choice = got["choices"][0]
            logprobs = [t["logprob"] for t in choice["logprobs"]["content"]]
            calls.append((got["prompt_token_ids"], choice["token_ids"], logprobs))
            content = choice["message"]["content"] or ""
            messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "Go on."}]
        return calls

    async def round(self, concurrency: int, conversations: int, turns: int, seeded: bool) -> tuple[list[Call], dict]:
        async with aiohttp.ClientSession(headers=self.head, timeout=aiohttp.ClientTimeout(total=1800)) as http:
            async with http.post(f"{self.url}/reset_prefix_cache") as r:
                assert r.status == 200
            gate = asyncio.Semaphore(concurrency)

            async def one(number: int) -> list[Call]:
                async with gate:
                    return await self.conversation(http, number, turns, seeded)

            began, cpu = time.perf_counter(), cpu_seconds(self.server)
            calls = [c for many in await asyncio.gather(*map(one, range(conversations))) for c in many]
            seconds, cpu = time.perf_counter() - began, cpu_seconds(self.server) - cpu
            tokens = sum(len(c[1]) for c in calls)
            return calls, {"tok_per_s": tokens / seconds, "tok_per_cpu_s": tokens / cpu}


def cpu_seconds(server: Server) -> float:
    top = psutil.Process(server.identity.pid)
    return sum(sum(p.cpu_times()[:2]) for p in [top, *top.children(recursive=True)])


def compare(a: list[Call], b: list[Call], turns: int) -> dict[str, Any]:
    """Shares of calls that are the same, and the largest difference of logprobs while the tokens are."""
    same = [x[:2] == y[:2] for x, y in zip(a, b, strict=True)]
    first = same[::turns]
    apart = [abs(p - q) for x, y in zip(a, b, strict=True) if x[:2] == y[:2] for p, q in zip(x[2], y[2], strict=True)]
    return {
        "calls": len(same),
        "same_calls": sum(same) / len(same),
        "same_first_calls": sum(first) / len(first),
        "same_conversations": sum(all(same[i : i + turns]) for i in range(0, len(same), turns)) / len(first),
        "logprob_apart_max": max(apart, default=None),
    }


async def measure(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    client, out, kept = Client(server, args.tokens), {}, {}
    await client.round(16, 16, 1, False)  # warm
    for concurrency, conversations in ((1, args.conversations // 4), (16, args.conversations)):
        rounds: dict[bool, list[tuple[list[Call], dict[str, float]]]] = {True: [], False: []}
        for seeded in (True, False, False, True):
            rounds[seeded].append(await client.round(concurrency, conversations, args.turns, seeded))
            print(f"concurrency {concurrency} seeded {seeded}: {rounds[seeded][-1][1]}", file=sys.stderr, flush=True)
        kept[concurrency] = rounds[True][0][0]
        for seeded, two in rounds.items():
            speed = {k: statistics.mean(r[1][k] for r in two) for k in two[0][1]}
            name = f"concurrency_{concurrency}_{'seeded' if seeded else 'unseeded'}"
            out[name] = compare(two[0][0], two[1][0], args.turns) | speed
    # Another concurrency is another mixture of batches: what it changes in the last bit can change a token.
    out["concurrency_1_against_16_seeded"] = compare(kept[1], kept[16][: len(kept[1])], args.turns)
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--model", default="tiny-random")
    parser.add_argument("--conversations", type=int, default=48)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=24)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        policy = Path(folder) / "policy"
        prepare(args.model, policy)
        cfg = ServerConfig(max_model_len=1024, chat_template="config/templates/plain.jinja")
        version = read_checkpoint(policy)["policy_version"]
        server = Server.start(cfg, policy, version, log=Path(folder) / "vllm.log")
        try:
            result = asyncio.run(measure(server, args))
        finally:
            server.stop()
    args.json.write_text(json.dumps({"model": args.model, **vars(args), **result}, indent=1, default=str) + "\n")
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
