"""What a harness is told and how its end is read, without running one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from openforge import harnesses
from openforge.harnesses import Ended

ROOT = Path(__file__).parents[2]


def test_mini_is_given_the_documented_command_line(context: Any, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("agent: {}\n")
    mini = harnesses.get("mini_swe_agent")
    ctx = context(options={"config": "own.yaml", "launch": "fork"}, turns=8, instruction="-t is no option")
    argv = mini.argv(ctx)
    assert argv[0].endswith("/.software/harness-mini/bin/mini")
    assert argv[1:6] == ["-m", "openai/policy", "-y", "--exit-immediately", "-l"]
    assert argv[-6:] == ["-c", "/home/agent/config.yaml", "-c", "agent.step_limit=8", "-t", "-t is no option"]
    assert mini.files(ctx) == {"config.yaml": b"agent: {}\n"}
    assert mini.env(ctx) == {"OPENAI_API_BASE": "http://127.0.0.1:8080/s/e1/v1", "OPENAI_API_KEY": "secret-key"}
    assert not [a for a in mini.argv(context(turns=None)) if "step_limit" in a]


def test_a_missing_config_is_named(context: Any, tmp_path: Path) -> None:
    with pytest.raises(harnesses.HarnessError, match=rf"harness.config: {tmp_path}/no.yaml does not exist"):
        harnesses.get("mini_swe_agent").files(context(options={"config": "no.yaml"}))


def test_mini_answer_is_the_last_assistant_message_of_its_trajectory() -> None:
    mini = harnesses.get("mini_swe_agent")
    messages = [{"role": "assistant", "content": "ls"}, {"role": "user", "content": "a"}, {"role": "exit"}]
    record = json.dumps({"messages": messages}).encode()
    assert mini.read_output(Ended(0, b""), record) == harnesses.Output(None, "ls")
    told = mini.read_output(Ended(1, b"Traceback\nValueError: no such thing\n"), None)
    assert told == harnesses.Output("mini_swe_agent exited with code 1: ValueError: no such thing", None)


@pytest.mark.parametrize("record", [b"", b"[" * 100_000, b"[1]", b'{"messages": {"role": 3}}', b"\xff"])
def test_a_trajectory_that_the_agent_spoilt_is_no_answer(record: bytes) -> None:
    assert harnesses.get("mini_swe_agent").read_output(Ended(0, b""), record) == harnesses.Output(None, None)


def test_pi_is_configured_for_the_served_window(context: Any) -> None:
    files = harnesses.get("pi").files(context(context_window=4096, max_tokens=256))
    provider = json.loads(files[".pi/agent/models.json"])["providers"]["proxy"]
    assert provider["api"] == "openai-completions" and provider["baseUrl"] == "http://127.0.0.1:8080/s/e1/v1"
    assert (provider["models"][0]["contextWindow"], provider["models"][0]["maxTokens"]) == (4096, 256)
    assert b"secret-key" not in files[".pi/agent/models.json"]
    compaction = json.loads(files[".pi/agent/settings.json"])["compaction"]
    assert compaction["reserveTokens"] + compaction["keepRecentTokens"] < 4096


def event(**message: Any) -> bytes:
    return json.dumps({"type": "message_end", "message": message}).encode() + b"\n"


def test_pi_end_is_read_from_its_events() -> None:
    pi = harnesses.get("pi")
    said = event(role="assistant", content=[{"type": "text", "text": "Hi."}], stopReason="stop")
    failed = event(role="assistant", content=[], stopReason="error", errorMessage="404 used up")
    assert pi.read_output(Ended(0, b'cut": 1}\n' + said), None) == harnesses.Output(None, "Hi.")
    assert pi.read_output(Ended(0, said + failed), None).error == "pi ended with an error: 404 used up"
    assert (
        pi.read_output(Ended(0, event(role="user", content="x")), None).error
        == "pi ended without a message of the model's"
    )
    assert pi.read_output(Ended(None, said), None).error is None


def test_an_unknown_harness_is_named_with_those_that_exist() -> None:
    with pytest.raises(
        harnesses.HarnessError, match="'aider'; harnesses: mini_swe_agent, pi, codex, claude_code, openclaw"
    ):
        harnesses.get("aider")


@pytest.mark.parametrize("name", ["mini_swe_agent", "pi"])
def test_pins_are_exact_and_name_no_address(name: str) -> None:
    harness = harnesses.get(name)
    pins = (ROOT / "envs" / f"{harness.software}.txt").read_text()
    lines = [line.split("#")[0].strip() for line in pins.splitlines()]
    assert all(
        re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][A-Za-z0-9.]*( --hash=sha256:[0-9a-f]{64})?", x) for x in lines if x
    )
    if name == "mini_swe_agent":
        assert f"mini-swe-agent=={harness.version}" in lines
        return
    lock = json.loads((ROOT / "envs" / harness.software / "package-lock.json").read_text())["packages"]
    assert lock["node_modules/@mariozechner/pi-coding-agent"]["version"] == harness.version
    assert all("integrity" in p and "resolved" not in p for key, p in lock.items() if key)
