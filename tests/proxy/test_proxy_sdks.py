"""The providers' own Python clients as oracle: they read every stream and answer, and raise their errors."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from proxy_rig import SECRET, Rig
from proxy_stub import Json, completion, recorded

from openforge.software import python_of

# The server's environment holds both clients.
pytestmark = pytest.mark.slow

CLIENT = """
import json, sys
import anthropic, openai

base, key = sys.argv[1:3]
oai = openai.OpenAI(base_url=base + "/v1", api_key=key, max_retries=0)
ant = anthropic.Anthropic(base_url=base, api_key=key, max_retries=0)
schema = {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}
user = [{"role": "user", "content": "hi"}]
told = {}


def chat(**more):
    tools = [{"type": "function", "function": {"name": "bash", "parameters": schema}}]
    return dict(model="m", messages=user, tools=tools, **more)


def responses(**more):
    return dict(model="m", input="hi", tools=[{"type": "function", "name": "bash", "parameters": schema}], **more)


def messages(**more):
    tools = [{"name": "bash", "input_schema": schema}]
    return dict(model="m", messages=user, max_tokens=99, tools=tools, **more)


def of_chat(m):
    calls = [[c.function.name, json.loads(c.function.arguments)] for c in m.tool_calls]
    return [m.reasoning_content, m.content, calls]


def of_responses(r):
    thought = "".join(p.text for i in r.output if i.type == "reasoning" for p in i.content)
    calls = [[i.name, json.loads(i.arguments)] for i in r.output if i.type == "function_call"]
    return [thought, r.output_text, calls, r.status, r.usage.input_tokens, r.usage.output_tokens]


def of_messages(m):
    by = {b.type: b for b in m.content}
    calls = [[b.name, b.input] for b in m.content if b.type == "tool_use"]
    usage = [m.usage.input_tokens, m.usage.output_tokens]
    return [by["thinking"].thinking, by["text"].text, calls, m.stop_reason, *usage]


told["chat"] = of_chat(oai.chat.completions.create(**chat()).choices[0].message)
with oai.chat.completions.stream(**chat(stream_options={"include_usage": True})) as stream:
    done = stream.get_final_completion()
told["chat stream"] = [*of_chat(done.choices[0].message), done.usage.prompt_tokens, done.usage.completion_tokens]
told["responses"] = of_responses(oai.responses.create(**responses()))
with oai.responses.stream(**responses()) as stream:
    told["responses kinds"] = sorted({e.type for e in stream})
    told["responses stream"] = of_responses(stream.get_final_response())
told["messages"] = of_messages(ant.messages.create(**messages()))
with ant.messages.stream(**messages()) as stream:
    told["messages stream"] = of_messages(stream.get_final_message())
told["count"] = ant.messages.count_tokens(model="m", messages=user).input_tokens
told["models"] = [[m.id for m in oai.models.list()], [m.id for m in ant.models.list()]]
told["model"] = [oai.models.retrieve("x").id, ant.models.retrieve("x").display_name]


def raised(ask):
    try:
        ask()
    except Exception as e:
        return [type(e).__module__.split(".")[0], type(e).__name__, getattr(e, "code", None), str(e)]


told["overflow"] = [raised(lambda: ask()) for ask in (
    lambda: oai.chat.completions.create(**chat()),
    lambda: oai.responses.create(**responses()),
    lambda: ant.messages.create(**messages()),
)]
other = dict(api_key="no", max_retries=0)
told["key"] = [
    raised(lambda: openai.OpenAI(base_url=base + "/v1", **other).responses.create(**responses())),
    raised(lambda: anthropic.Anthropic(base_url=base, **other).messages.create(**messages())),
]
print(json.dumps(told))
"""


async def said(body: Json) -> web.StreamResponse:
    reply = completion(body, "I look.", "tool_calls")
    call = {"id": "call_1", "type": "function", "function": {"name": "bash", "arguments": '{"cmd": "ls"}'}}
    reply["choices"][0]["message"] |= {"reasoning": "Let me see.", "tool_calls": [call]}
    return web.json_response(reply)


async def test_the_providers_clients_read_what_the_proxy_says(rig: Rig, tmp_path: Path) -> None:
    overflow = recorded("overflow")
    rig.stub.script.extend([said] * 7)  # the seventh is the count
    for _ in range(3):
        rig.stub.answers(overflow["status"], overflow["body"])
    rig.session()
    script = tmp_path / "client.py"
    script.write_text(CLIENT)
    base = f"http://127.0.0.1:{rig.port}/s/e1"
    process = await asyncio.create_subprocess_exec(
        python_of("serve-cpu"), script, base, SECRET, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    told: dict[str, Any] = json.loads(out)
    answer = ["Let me see.", "I look.", [["bash", {"cmd": "ls"}]]]
    prompt, sampled = len(b"user\nhi") + 3 + len(b"assistant\n"), len("I look.") + 1
    assert told["chat"] == answer
    assert told["chat stream"] == [*answer, prompt, sampled]
    assert told["responses"] == told["responses stream"] == [*answer, "completed", prompt, sampled]
    assert told["messages"] == told["messages stream"] == [*answer, "tool_use", prompt, sampled]
    assert {"response.created", "response.output_text.delta", "response.completed"} <= set(told["responses kinds"])
    assert (told["count"], told["models"], told["model"]) == (prompt, [["policy"], ["policy"]], ["x", "x"])
    one, two, three = told["overflow"]
    assert one[:3] == two[:3] == ["openai", "BadRequestError", "context_length_exceeded"]
    assert three[:2] == ["anthropic", "BadRequestError"] and "prompt is too long: 513 tokens > 512 maximum" in three[3]
    assert [k[:2] for k in told["key"]] == [["openai", "AuthenticationError"], ["anthropic", "AuthenticationError"]]
