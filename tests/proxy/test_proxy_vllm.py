"""Against a real vLLM with the tiny random model: the recorded ids and logprobs are the server's own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from proxy_rig import SECRET, assemble

from openforge.config import Server as ServerConfig
from openforge.policy.models import prepare
from openforge.policy.server import Server
from openforge.policy.weights import read_checkpoint
from openforge.proxy.client import Summary, start_proxy
from openforge.proxy.lineage import call_rows, prompt_ids

pytestmark = pytest.mark.slow

WINDOW = 512
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_tokens": 16}
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("policy")
    prepare("tiny-random", folder / "tiny")
    cfg = ServerConfig(max_model_len=WINDOW, max_num_seqs=16, tool_call_parser="hermes")
    version = read_checkpoint(folder / "tiny")["policy_version"]
    server = Server.start(cfg, folder / "tiny", version, log=folder / "vllm.log")
    yield server
    server.stop()


async def harness(base: str) -> list[tuple[int, bytes]]:
    """Four turns, plain and streamed, with and without tools, then one over the window."""
    answers = []
    messages: list[dict[str, Any]] = [{"role": "user", "content": "list the files"}]
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {SECRET}"}) as http:
        for turn in range(5):
            if turn == 4:
                messages.append({"role": "user", "content": "x" * WINDOW})
            body = {"model": "m", "messages": messages, "stream": turn % 2 == 1, "seed": 3, "temperature": 0}
            if turn >= 2:
                body |= {"tools": TOOLS, "tool_choice": "auto"}
            async with http.post(f"{base}/v1/chat/completions", json=body) as r:
                answers.append((r.status, await r.read()))
            if turn < 4:
                status, raw = answers[-1]
                assert status == 200, raw
                said = assemble(raw)["message"] if turn % 2 else json.loads(raw)["choices"][0]["message"]
                messages += [said, {"role": "user", "content": "go on"}]
    return answers


async def episodes(vllm: Server, journal: Path) -> list[tuple[list[tuple[int, bytes]], Summary]]:
    proxy = await start_proxy(f"http://127.0.0.1:{vllm.port}", journal, upstream_key=vllm.api_key, port=0)
    try:
        names = [f"e{i}" for i in range(4)]
        for name in names:
            await proxy.open_session(
                name,
                secret=SECRET,
                sampling=SAMPLING,
                limits={"turns": None, "tokens": None},
                deadline_seconds=300,
                policy_version=vllm.version or "",
                context_window=WINDOW,
            )
        said = await asyncio.gather(*(harness(f"http://127.0.0.1:{proxy.port}/s/{n}") for n in names))
        return [(s, await proxy.close_session(n, harness_exited=True)) for n, s in zip(names, said, strict=True)]
    finally:
        await proxy.stop()


def rescored(vllm: Server, prompt: list[int], response: list[int]) -> list[float]:
    """The server's own logprobs of a response, asked for anew by ids."""
    body = {"model": "policy", "prompt": [*prompt, *response], "max_tokens": 1, "prompt_logprobs": 0}
    headers = {"authorization": f"Bearer {vllm.api_key}"}
    answer = httpx.post(f"http://127.0.0.1:{vllm.port}/v1/completions", json=body, headers=headers, timeout=120)
    scored = answer.json()["choices"][0]["prompt_logprobs"][len(prompt) :]
    return [at[str(t)]["logprob"] for at, t in zip(scored, response, strict=True)]


async def test_episodes_are_recorded_token_for_token(vllm: Server, tmp_path: Path) -> None:
    found = await episodes(vllm, tmp_path)
    for answers, summary in found:
        assert [status for status, _ in answers] == [200, 200, 200, 200, 400]
        assert json.loads(answers[-1][1])["error"]["code"] == "context_length_exceeded"
        rows, _ = call_rows(summary.records)
        assert (summary.turns, len(rows), summary.policy_failed) == (4, 4, None)
        for row in rows:
            prompt, response = prompt_ids(rows, row["call"]), row["response_token_ids"]
            assert (len(prompt), row["delivery"]) == (row["prompt_tokens"], "confirmed")
            assert 1 <= len(response) <= 16
            scored = rescored(vllm, prompt, response)
            assert row["logprobs"] == pytest.approx(scored, abs=1e-3)
        assert summary.response_tokens == sum(len(r["response_token_ids"]) for r in rows)
    # Sampling is the session's: at the temperature and with the seed that the harness asked for, all would agree.
    assert len({json.dumps(call_rows(s.records)[0][0]["response_token_ids"]) for _, s in found}) > 1


async def test_other_dialects_are_recorded_token_for_token(vllm: Server, tmp_path: Path) -> None:
    """Strict tools and at most one call are grammars to vLLM: not asked for, so that logprobs are the model's."""
    schema = {"type": "object", "properties": {"cmd": {"type": "string"}}, "additionalProperties": False}
    tool = {"name": "bash", "description": "run", "strict": True}
    user = [{"role": "user", "content": [{"type": "text", "text": "list the files"}]}]
    asked: list[tuple[str, dict[str, Any]]] = [
        (
            "responses",
            {
                "input": "list the files",
                "tools": [{"type": "function", "parameters": schema, **tool}],
                "parallel_tool_calls": False,
                "stream": True,
            },
        ),
        (
            "messages",
            {
                "messages": user,
                "max_tokens": 9,
                "tools": [{"input_schema": schema, **tool}],
                "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            },
        ),
        ("messages/count_tokens", {"messages": user, "tools": [{"input_schema": schema, **tool}]}),
    ]
    proxy = await start_proxy(f"http://127.0.0.1:{vllm.port}", tmp_path, upstream_key=vllm.api_key, port=0)
    try:
        await proxy.open_session(
            "e",
            secret=SECRET,
            sampling=SAMPLING,
            limits={"turns": None, "tokens": None},
            deadline_seconds=300,
            policy_version=vllm.version or "",
            context_window=WINDOW,
        )
        async with aiohttp.ClientSession(headers={"x-api-key": SECRET}) as http:
            for path, body in asked:
                async with http.post(f"http://127.0.0.1:{proxy.port}/s/e/v1/{path}", json=body) as r:
                    raw = await r.read()
                    assert r.status == 200, raw
        summary = await proxy.close_session("e", harness_exited=True)
    finally:
        await proxy.stop()
    rows, _ = call_rows(summary.records)
    assert [(r["dialect"], r["reason"]) for r in rows] == [("responses", None), ("messages", None)]
    prompts = [prompt_ids(rows, r["call"]) for r in rows]
    # The same conversation is the same prompt, and the count is that prompt's.
    assert prompts[0] == prompts[1] and json.loads(raw) == {"input_tokens": len(prompts[0])}
    for row, prompt in zip(rows, prompts, strict=True):
        assert row["logprobs"] == pytest.approx(rescored(vllm, prompt, row["response_token_ids"]), abs=1e-3)
