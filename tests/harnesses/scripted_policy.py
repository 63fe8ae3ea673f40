"""Mock of a policy server: a loopback server in the shape of vLLM that renders requests and answers a script.

Nothing is sampled here. Prompts are rendered with the chat template of the tiny model and tokenized by its byte-level
tokenizer (both rebuilt below in a few lines; test_scripted_policy.py holds them against transformers' own). As vLLM
does, text parts are joined, a tool call's arguments are parsed before they are rendered, and a sampled
<tool_call> block comes back as a tool call.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from aiohttp import web
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from openforge.policy import tiny

Json = dict[str, Any]
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
END = "<|im_end|>"
ASIDE = "What was asked beside the task."
BODY_MOST = 1 << 24


@dataclass(frozen=True)
class Turn:
    """What the mock says: a text, or a call of the tool `name`."""

    text: str = ""
    name: str | None = None
    arguments: Json = field(default_factory=dict)

    @property
    def sampled(self) -> str:
        """The text of the sampled tokens, the end of the turn aside."""
        if self.name is None:
            return self.text
        call = f'{{"name": {json.dumps(self.name)}, "arguments": {json.dumps(self.arguments, ensure_ascii=False)}}}'
        return f"{self.text}<tool_call>\n{call}\n</tool_call>"

    def message(self, call_id: str) -> Json:
        """The parsed assistant message."""
        if self.name is None:
            return {"role": "assistant", "content": self.text}
        function = {"name": self.name, "arguments": json.dumps(self.arguments, ensure_ascii=False)}
        call = {"id": call_id, "type": "function", "function": function}
        return {"role": "assistant", "content": self.text or None, "tool_calls": [call]}


class ScriptedPolicy:
    """Answers a request of the task with the turn after as many as its history holds, one beside it with `ASIDE`.

    A request is beside the task if it offers no tools, or if what it asks since the last answer holds the words
    `aside`. Where a user's message holds ASIDE (a summary in the place of the history), the task goes on with its last
    turn.

    Attributes:
        toolless: requests without tools are the task's too.
        asked: how many requests came.
    """

    def __init__(self, script: Sequence[Turn], aside: str | None = None) -> None:
        self.script, self.aside = list(script), aside
        self.toolless = False
        self.asked = 0
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application(client_max_size=BODY_MOST)
        app.router.add_post("/v1/chat/completions", self._answer)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "policy", "object": "model"}]})

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked += 1
        turn = self._turn(body)
        if turn is None:
            error = {"message": f"the script ends after {len(self.script)} turns", "type": "BadRequestError"}
            return web.json_response({"error": error}, status=400)
        return web.json_response(completion(body, turn, f"chatcmpl-tool-{self.asked:04d}"))

    def _turn(self, body: Json) -> Turn | None:
        messages = body["messages"]
        last = max((n for n, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
        asked = "\n".join(str(m["content"]) for m in messages[last + 1 :])
        if not (body.get("tools") or self.toolless) or (self.aside is not None and self.aside in asked):
            return Turn(ASIDE)
        if any(m["role"] == "user" and ASIDE in str(m["content"]) for m in messages):
            return self.script[-1]
        said = sum(m["role"] == "assistant" for m in messages)
        return self.script[said] if said < len(self.script) else None


def completion(body: Json, turn: Turn, call_id: str) -> Json:
    """The answer of vLLM to `body` with this turn; place n of the response has the logprob -0.001 (n + 1)."""
    prompt = encode(render(body["messages"], body.get("tools")))
    ids = encode(turn.sampled + END)
    content = [
        {"token": f"token_id:{t}", "logprob": -0.001 * (n + 1), "bytes": None, "top_logprobs": []}
        for n, t in enumerate(ids)
    ]
    choice = {
        "index": 0,
        "message": {**turn.message(call_id), "refusal": None, "reasoning": None},
        "logprobs": {"content": content},
        "finish_reason": "tool_calls" if turn.name else "stop",
        "stop_reason": None,
        "token_ids": ids,
    }
    counts = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
    head = {"id": "chatcmpl-scripted", "object": "chat.completion", "created": 1, "model": "policy"}
    return {**head, "choices": [choice], "usage": counts, "prompt_token_ids": prompt}


# ---- the tiny model's template and tokenizer -----------------------------------------------------
class _Generation(Extension):
    """{% generation %} marks the assistant's text for training; it renders what it holds."""

    tags = frozenset({"generation"})

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


@cache
def _template() -> jinja2.Template:
    # As transformers sets it up: whitespace around blocks goes, and tojson escapes nothing for HTML.
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation])
    env.filters["tojson"] = _tojson
    return env.from_string(Path(tiny.CHAT_TEMPLATE).read_text())


def render(messages: list[Json], tools: list[Json] | None, prompt: bool = True) -> str:
    """The text of a conversation, with the head of the next answer if `prompt`."""
    return _template().render(messages=[_read(m) for m in messages], tools=tools, add_generation_prompt=prompt)


def _read(message: Json) -> Json:
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(p["text"] for p in content)
    calls = [c["function"] for c in message.get("tool_calls") or ()]
    read = [{"function": {**f, "arguments": json.loads(f["arguments"])}} for f in calls]
    return {**message, "content": content, "tool_calls": read}


@cache
def _ids() -> dict[str, int]:
    """Ids of the bytes and of the special tokens, by character.

    The byte-level alphabet stands printable characters for the bytes; the vocabulary numbers them in their order.
    """
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in plain]
    standing = {b: b for b in plain} | {b: 256 + n for n, b in enumerate(others)}
    ordered = sorted(standing, key=lambda b: standing[b])
    ids = {chr(b): n for n, b in enumerate(ordered)}
    return ids | {s: 256 + n for n, s in enumerate(SPECIAL)}


def encode(text: str) -> list[int]:
    """Token ids: one a byte, one a special token."""
    pieces = [text]
    for token in SPECIAL:
        pieces = [q for p in pieces for q in _split(p, token)]
    ids = _ids()
    return [i for p in pieces for i in ([ids[p]] if p in SPECIAL else [ids[chr(b)] for b in p.encode()])]


def _split(piece: str, token: str) -> list[str]:
    if piece in SPECIAL:
        return [piece]
    parts = piece.split(token)
    return [q for n, p in enumerate(parts) for q in ([token, p] if n else [p]) if q]
