"""Stub policy server (a mock: it samples nothing) and load of benchmarks/proxy.py.

    python benchmarks/proxy_load.py --response 64        serves until its stdin ends; prints its port

The conversation is the same for all: a history that grows from 6 to 10 KB of JSON over `TURNS` calls. The stub answers
at once in vLLM's shape; its prompt ids are a function of how many messages it is sent, and each prompt extends the one
before and its response. Every answer has a number of its own in its text.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import uvloop

TURNS, BASE_BYTES, TURN_BYTES = 20, 6 * 1024, 200
PROMPT, PER_TURN = 512, 72  # tokens of the first prompt, and of what a turn adds besides the response
NUMBER = b"########"


# ---- the conversation --------------------------------------------------------------------------
def words(n: int) -> str:
    """About n bytes that look like text and do not repeat."""
    return " ".join(f"w{i * 7919 % 10007}" for i in range(n // 6 + 1))[:n]


def messages(turn: int) -> list[dict[str, Any]]:
    """The history of call `turn`, from 0."""
    piece = BASE_BYTES // 8 - 32
    made = [{"role": "system", "content": "You are an agent. " + words(piece)}]
    for i in range(3 + turn):
        size = piece if i < 3 else TURN_BYTES // 2 - 32
        made += [
            {"role": "user", "content": f"{i} {words(size)}"},
            {"role": "assistant", "content": f"{i} {words(size)}"},
        ]
    return [*made, {"role": "user", "content": f"go on {turn}"}]


def prompt_ids(turn: int, response: list[int]) -> list[int]:
    ids = [1000 + i * 31 % 40000 for i in range(PROMPT)]
    for t in range(turn):
        ids += response + [1000 + (t * PER_TURN + i) * 17 % 40000 for i in range(PER_TURN)]
    return ids


def answer(turn: int, tokens: int) -> bytes:
    """vLLM's answer to call `turn`, NUMBER in the place of the answer's number."""
    said = [NUMBER.decode(), *(f" w{i}" for i in range(1, tokens))]
    content = [
        {"token": w, "logprob": -0.5128740072250366 - i / 100, "bytes": list(w.encode()), "top_logprobs": []}
        for i, w in enumerate(said)
    ]
    response = list(range(1000, 1000 + tokens))
    prompt = prompt_ids(turn, response)
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "".join(said)},
        "logprobs": {"content": content},
        "finish_reason": "stop",
        "token_ids": response,
    }
    body = {
        "id": "chatcmpl-stub",
        "object": "chat.completion",
        "created": 1,
        "model": "policy",
        "choices": [choice],
        "usage": {"prompt_tokens": len(prompt), "completion_tokens": tokens, "total_tokens": len(prompt) + tokens},
        "prompt_token_ids": prompt,
    }
    return json.dumps(body).encode()


# ---- the stub ----------------------------------------------------------------------------------
class Stub(asyncio.Protocol):
    """One connection; answers whatever is posted by the number of messages in it."""

    def __init__(self, answers: dict[int, bytes], numbers: Iterable[int]) -> None:
        self._answers, self._numbers = answers, iter(numbers)
        self._got = b""

    def connection_made(self, transport: Any) -> None:
        self._transport: asyncio.Transport = transport

    def data_received(self, data: bytes) -> None:
        self._got += data
        while (end := self._got.find(b"\r\n\r\n")) >= 0:
            head = self._got[:end].lower()
            size = int(head.split(b"content-length:")[1].split(b"\r\n")[0]) if b"content-length:" in head else 0
            whole = end + 4 + size
            if len(self._got) < whole:
                return
            asked, self._got = self._got[end + 4 : whole], self._got[whole:]
            turn = max(0, (asked.count(b'"role"') - 8) // 2)
            body = self._answers[min(turn, TURNS - 1)].replace(NUMBER, b"%08d" % next(self._numbers))
            told = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
            self._transport.write(told + body)


async def serve(tokens: int) -> None:
    answers = {turn: answer(turn, tokens) for turn in range(TURNS)}
    numbers = count()
    server = await asyncio.get_running_loop().create_server(lambda: Stub(answers, numbers), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.close()


# ---- the load ----------------------------------------------------------------------------------
@dataclass
class Load:
    """Closed-loop clients on raw sockets, each with a path and a conversation of its own.

    Attributes:
        took: seconds of each whole answer.
        bodies: called with each whole answer's body.
        broken: whether a connection that breaks ends its client quietly instead of raising.
    """

    port: int
    paths: list[str]
    stream: bool = False
    bodies: Callable[[bytes], None] | None = None
    broken: bool = False
    took: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        same = {"model": "policy", "stream": self.stream, "max_tokens": 64}
        if self.stream:
            same["stream_options"] = {"include_usage": True}
        self._asked = [json.dumps({**same, "messages": messages(t)}).encode() for t in range(TURNS)]

    async def load(self, calls: int = 10**9, each: int = 10**9) -> None:
        """Ask until there are so many answers in all, or to each client."""
        self._left = calls
        await asyncio.gather(*(self._client(path, each) for path in self.paths))

    async def _client(self, path: str, calls: int) -> None:
        r, w = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 22)
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer k\r\nContent-Type: application/json\r\n"
        asked = [f"{head}Content-Length: {len(b)}\r\n\r\n".encode() + b for b in self._asked]
        try:
            for n in range(calls):
                if self._left <= 0:
                    break
                self._left -= 1
                begun = time.perf_counter()
                w.write(asked[n % TURNS])
                body = await _answer(r)
                self.took.append(time.perf_counter() - begun)
                if self.bodies:
                    self.bodies(body)
        except (ConnectionError, asyncio.IncompleteReadError):
            if not self.broken:
                raise
        finally:
            w.close()


async def _answer(r: asyncio.StreamReader) -> bytes:
    head = (await r.readuntil(b"\r\n\r\n")).lower()
    if b"content-length:" in head:
        body = await r.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))
    else:
        body = b""
        while size := int((await r.readuntil(b"\r\n")).split(b";")[0], 16):
            body += (await r.readexactly(size + 2))[:size]
        await r.readexactly(2)
    if int(head[9:12]) != 200:
        raise RuntimeError(f"answered {head[9:12].decode()}: {body[:300]!r}")
    return body


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--response", type=int, default=64, help="sampled tokens")
    uvloop.run(serve(p.parse_args().response))
