"""ZeroClaw's configuration and wire form. The program itself was never run: it is on no package registry."""

from __future__ import annotations

import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from episode_rig import SAMPLING, SECRET, WINDOW
from scripted_policy import END, ScriptedPolicy, Turn, encode

from openforge import config, harnesses
from openforge.proxy.client import Proxy, start_proxy
from openforge.proxy.lineage import call_rows
from openforge.samples.merge import merge
from openforge.sandboxes import LocalBackend

RUN = """
model: tiny-random
tasks: {source: demo}
iterations: 1
harness: {name: zeroclaw}
"""
SHELL = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Runs a command",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


def test_its_configuration_is_that_of_one_agent(context: Any) -> None:
    claw = harnesses.get("zeroclaw")
    ctx = context(turns=7, options={"binary": "zeroclaw", "wire_api": "responses"})
    told = tomllib.loads(claw.files(ctx)[".zeroclaw/config.toml"].decode())
    agent = told["agents"]["main"]
    provider = told["providers"]["models"]["custom"]["proxy"]
    assert agent["model_provider"] == "custom.proxy"
    assert (provider["uri"], provider["model"]) == ("http://127.0.0.1:8080/s/e1/v1", "policy")
    assert (provider["wire_api"], provider["context_window"], provider["max_tokens"]) == ("responses", 4096, 256)
    assert told["risk_profiles"][agent["risk_profile"]] == {"level": "full"}
    assert told["runtime_profiles"][agent["runtime_profile"]] == {"max_tool_iterations": 7}
    assert claw.env(ctx)["ZEROCLAW_CONFIG_DIR"] == "/home/agent/.zeroclaw"


def test_without_its_program_a_run_says_how_to_bring_it(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config/mine.yaml").write_text(RUN)
    with pytest.raises(config.ConfigError, match=r"'harness.binary' is required with zeroclaw, .* name the file"):
        config.load("mine", tmp_path)
    over = {"harness": {"name": "zeroclaw", "binary": "bin/zeroclaw"}}
    assert config.load("mine", tmp_path, over).config.harness.binary == "bin/zeroclaw"
    with pytest.raises(config.ConfigError, match=r"'harness.binary' has no effect while harness.name is"):
        config.load("mine", tmp_path, {"harness": {"name": "pi", "binary": "bin/zeroclaw"}})


async def test_without_its_program_no_shard_starts(tmp_path: Path) -> None:
    claw = harnesses.get("zeroclaw")
    with pytest.raises(harnesses.HarnessError, match=r"harness.binary is required with zeroclaw: .* version 0\.8\.4"):
        await claw.start({"binary": None})
    with pytest.raises(harnesses.HarnessError, match=r"is required"):
        claw.binds()
    with pytest.raises(harnesses.HarnessError, match=r"harness.binary: .*/none does not exist"):
        await type(claw)(tmp_path).start({"binary": "none"})


async def test_a_program_that_is_brought_is_placed_and_run(backend: LocalBackend, context: Any, tmp_path: Path) -> None:
    mock = tmp_path / "mock-zeroclaw"  # a shell script in the place of the program
    mock.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo "zeroclaw 0.8.4" && exit\n'
        'cat "$ZEROCLAW_CONFIG_DIR/config.toml" > seen.toml\necho "$4"\n'
    )
    mock.chmod(0o755)
    claw = type(harnesses.get("zeroclaw"))(tmp_path)
    await claw.start({"binary": "mock-zeroclaw"})
    sandbox = await backend.create("e1", binds=claw.binds())
    assert await claw.place(sandbox) == "0.8.4"
    ctx = context(instruction="--help me", options={"binary": "mock-zeroclaw"})
    ended = await claw.run(sandbox, ctx)
    assert claw.read_output(ended, None) == harnesses.Output(None, "--message=--help me")
    assert tomllib.loads((await sandbox.download_content("seen.toml")).decode())["agents"]["main"]


# ---- its wire form, as its source writes it ------------------------------------------------------------------------
@pytest.fixture
async def policy() -> AsyncIterator[ScriptedPolicy]:
    made = ScriptedPolicy([Turn(name="shell", arguments={"command": "ls"}), Turn("I am done.")])
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def proxy(policy: ScriptedPolicy, tmp_path: Path) -> AsyncIterator[Proxy]:
    made = await start_proxy(policy.url, tmp_path / "journal", port=0)
    yield made
    await made.stop()


async def ask(proxy: Proxy, path: str, body: dict[str, Any]) -> dict[str, Any]:
    url = f"http://127.0.0.1:{proxy.port}/s/e1/v1/{path}"
    headers = {"authorization": f"Bearer {SECRET}"}
    async with aiohttp.ClientSession() as http, http.post(url, json=body, headers=headers) as r:
        assert r.status == 200, await r.text()
        got: dict[str, Any] = await r.json()
        return got


async def opened(proxy: Proxy) -> None:
    await proxy.open_session(
        "e1",
        secret=SECRET,
        sampling=SAMPLING,
        limits={"turns": None, "tokens": None},
        deadline_seconds=60.0,
        policy_version="0@scripted",
        context_window=WINDOW,
    )


async def test_its_chat_form_is_one_row(proxy: Proxy) -> None:
    await opened(proxy)
    system = {"role": "system", "content": "You are ZeroClaw."}
    talk: list[dict[str, Any]] = [system, {"role": "user", "content": "List the files."}]
    fields = {"model": "policy", "temperature": 0.7, "stream": False, "tools": [SHELL], "tool_choice": "auto"}
    first = (await ask(proxy, "chat/completions", {**fields, "messages": talk}))["choices"][0]["message"]
    (call,) = first["tool_calls"]
    # It leaves out what is NULL, content too, and puts a call's own id, type and function into its history.
    talk += [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "a.txt", "tool_call_id": call["id"]},
    ]
    second = await ask(proxy, "chat/completions", {**fields, "messages": talk})
    assert second["choices"][0]["message"]["content"] == "I am done."
    await is_one_row(proxy, "chat", [Turn(name="shell", arguments={"command": "ls"}), Turn("I am done.")])


async def test_its_responses_form_is_one_row(proxy: Proxy, policy: ScriptedPolicy) -> None:
    policy.script = [Turn("Which files?"), Turn("I am done.")]
    await opened(proxy)
    # No tools here: it writes their calls as text. A user's text is a string, its own an item of parts.
    talk: list[dict[str, Any]] = [{"role": "user", "content": "List the files."}]
    fields = {"model": "policy", "instructions": "You are ZeroClaw.", "stream": False}
    policy.toolless = True
    first = (await ask(proxy, "responses", {**fields, "input": talk}))["output"][-1]["content"]
    assert [p["text"] for p in first] == ["Which files?"]
    parts = [{"type": "output_text", "text": first[0]["text"]}]
    talk += [{"type": "message", "role": "assistant", "content": parts}, {"role": "user", "content": "All."}]
    second = await ask(proxy, "responses", {**fields, "input": talk})
    assert second["output"][-1]["content"][0]["text"] == "I am done."
    await is_one_row(proxy, "responses", policy.script)


async def is_one_row(proxy: Proxy, dialect: str, script: list[Turn]) -> None:
    calls, _ = call_rows((await proxy.close_session("e1", harness_exited=True)).records)
    assert [(c["dialect"], c["trainable"]) for c in calls] == [(dialect, True)] * 2, calls
    (row,) = merge(calls)[0]
    sampled = [t for t, m in zip(row.token_ids, row.loss_mask, strict=True) if m]
    assert sampled == [t for turn in script for t in encode(turn.sampled + END)]
