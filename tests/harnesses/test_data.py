"""What a harness is told and how its end is read, without running one."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest

from openforge import config, harnesses
from openforge.harnesses import Ended

ROOT = Path(__file__).parents[2]
RECORDED = Path(__file__).parent / "recorded"
PACKAGES = {
    "pi": "@mariozechner/pi-coding-agent",
    "codex": "@openai/codex-linux-x64",
    "claude_code": "@anthropic-ai/claude-code-linux-x64",
    "openclaw": "openclaw",
    "opencode": "opencode-linux-x64",
    "qwen_code": "@qwen-code/qwen-code",
}
BUILT = [n for n in harnesses.NAMES if harnesses.get(n).built]
# What each printed, recorded from the version that is pinned; lines of no interest left out.
PRINTED = ("pi", "codex", "claude_code", "openclaw", "opencode", "qwen_code")


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


# ---- configuration, as each harness's own documentation names it -------------------------------------------------
def test_every_harness_can_be_named_in_a_configuration() -> None:
    assert get_args(config.Harness.model_fields["name"].annotation) == harnesses.NAMES


# `scripted` asks no policy and is told nothing.
@pytest.mark.parametrize("name", [n for n in harnesses.NAMES if n != "scripted"])
def test_the_key_stands_in_no_file_and_no_command_line(name: str, context: Any) -> None:
    harness, ctx = harnesses.get(name), context(api_key="the-key-of-it")
    assert not [f for f, data in harness.files(ctx).items() if b"the-key-of-it" in data]
    assert "the-key-of-it" not in " ".join(harness.argv(ctx))
    assert "the-key-of-it" in harness.env(ctx).values()
    told = [*harness.argv(ctx), (harness.stdin(ctx) or b"").decode()]
    assert len([t for t in told if "Create the file a.txt." in t]) == 1


def test_codex_reads_its_window_and_its_provider(context: Any, tmp_path: Path) -> None:
    (tmp_path / "short.md").write_text("Be short.")
    codex = harnesses.get("codex")
    files = codex.files(context(context_window=32768, options={"instructions": "short.md"}))
    told = tomllib.loads(files[".codex/config.toml"].decode())
    assert (told["model"], told["model_provider"], told["model_context_window"]) == ("policy", "proxy", 32768)
    assert told["model_auto_compact_token_limit"] == 28672
    assert told["model_instructions_file"] == "/home/agent/.codex/instructions.md"
    assert files[".codex/instructions.md"] == b"Be short."
    provider = told["model_providers"]["proxy"]
    assert provider["base_url"] == "http://127.0.0.1:8080/s/e1/v1" and provider["wire_api"] == "responses"
    assert codex.env(context())[provider["env_key"]] == "secret-key"
    assert told["analytics"] == {"enabled": False} and told["features"]["plugins"] is False
    assert "model_instructions_file" not in tomllib.loads(codex.files(context())[".codex/config.toml"].decode())
    assert codex.argv(context())[1] == "exec" and codex.argv(context())[-1] == "-"


def test_claude_code_is_given_its_url_without_v1_and_both_keys(context: Any, tmp_path: Path) -> None:
    (tmp_path / "short.md").write_text("Be short.")
    claude = harnesses.get("claude_code")
    ctx = context(options={"bare": True, "tools": "Bash,Read", "instructions": "short.md"}, turns=7)
    env = claude.env(ctx)
    assert env["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:8080/s/e1"
    assert env["ANTHROPIC_API_KEY"] == env["ANTHROPIC_AUTH_TOKEN"] == "secret-key"
    assert claude.environment()["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"
    argv = claude.argv(ctx)
    assert "--bare" in argv and argv[argv.index("--tools") + 1] == "Bash,Read"
    assert argv[argv.index("--max-turns") + 1] == "7"
    assert argv[argv.index("--system-prompt-file") + 1] == "/home/agent/instructions.md"
    assert claude.files(ctx) == {"instructions.md": b"Be short."}
    plain = claude.argv(context(turns=None))
    assert not {"--bare", "--tools", "--max-turns", "--system-prompt-file"} & set(plain)


def test_openclaw_speaks_responses_and_outlives_our_limit(context: Any) -> None:
    claw = harnesses.get("openclaw")
    told = json.loads(claw.files(context(context_window=32768, seconds=90.0))["openclaw.json"])
    provider = told["models"]["providers"]["proxy"]
    assert (provider["api"], provider["baseUrl"]) == ("openai-responses", "http://127.0.0.1:8080/s/e1/v1")
    assert provider["models"][0]["contextWindow"] == 32768
    assert told["agents"]["defaults"]["model"]["primary"] == "proxy/policy"
    argv = claw.argv(context(seconds=90.0, options={"bare": True}))
    assert argv[-1] == "--local-model-lean" and int(argv[argv.index("--timeout") + 1]) > 90


def test_opencode_has_a_title_and_the_window(context: Any) -> None:
    opencode = harnesses.get("opencode")
    told = json.loads(opencode.files(context(context_window=8192, max_tokens=512))[".config/opencode/opencode.json"])
    provider = told["provider"]["proxy"]
    assert provider["models"]["policy"]["limit"] == {"context": 8192, "output": 512}
    assert provider["options"]["baseURL"] == "http://127.0.0.1:8080/s/e1/v1"
    assert (told["permission"], told["share"], told["autoupdate"]) == ("allow", "disabled", False)
    assert "--title" in opencode.argv(context())


def test_qwen_code_offers_the_tools_that_are_named(context: Any) -> None:
    qwen = harnesses.get("qwen_code")
    told = json.loads(
        qwen.files(context(context_window=8192, options={"tools": "edit, read_file"}))[".qwen/settings.json"]
    )
    assert told["model"]["generationConfig"]["contextWindowSize"] == 8192
    assert told["privacy"]["usageStatisticsEnabled"] is False and told["telemetry"]["enabled"] is False
    assert "run_shell_command" in told["tools"]["disabled"] and "edit" not in told["tools"]["disabled"]
    assert "tools" not in json.loads(qwen.files(context())[".qwen/settings.json"])
    argv = qwen.argv(context(turns=7))
    assert argv[argv.index("--max-session-turns") + 1] == "7"


@pytest.mark.parametrize("name", ["codex", "claude_code", "qwen_code"])
def test_missing_instructions_are_named(name: str, context: Any, tmp_path: Path) -> None:
    harness, ctx = harnesses.get(name), context(options={"instructions": "no.md"})
    with pytest.raises(harnesses.HarnessError, match=rf"harness.instructions: {tmp_path}/no.md does not exist"):
        (harness.files(ctx), harness.argv(ctx))


# ---- ends, as each harness printed them --------------------------------------------------------------------------
SCRIPT_ENDS = "the script ends after 0 turns"


@pytest.mark.parametrize(
    ("name", "kind", "code", "error", "answer"),
    [
        *((n, "done", 0, None, "I am done.") for n in PRINTED),
        ("pi", "failed", 0, SCRIPT_ENDS, ""),
        ("codex", "failed", 1, SCRIPT_ENDS, None),
        ("claude_code", "failed", 1, SCRIPT_ENDS, None),
        ("opencode", "failed", 1, SCRIPT_ENDS, None),
        ("qwen_code", "failed", 1, SCRIPT_ENDS, None),
        ("openclaw", "failed", 1, "provider rejected the request schema", None),
        ("claude_code", "limit", 1, None, ""),
        ("qwen_code", "limit", 53, None, ""),
    ],
)
def test_an_end_is_read_from_what_was_recorded(
    name: str, kind: str, code: int, error: str | None, answer: str | None
) -> None:
    log = (RECORDED / f"{name}-{kind}.log").read_bytes()
    harness = harnesses.get(name)
    output = harness.read_output(Ended(code, log), None)
    assert output.answer == answer
    if error is None:
        assert output.error is None
    else:
        assert output.error is not None and output.error.startswith(f"{name} ended with an error: ")
        assert error in output.error
    # Killed at our limit, it has made no error of its own.
    killed = harness.read_output(Ended(None, log), None)
    assert killed.error is None or kind == "failed"


@pytest.mark.parametrize("name", BUILT)
@pytest.mark.parametrize("log", [b"", b"\xff\xfe", b"{" * 5000, b"[1]\n{}\n", b'{"type": "result"}', b"null\n" * 3])
def test_whatever_a_harness_prints_is_read(name: str, log: bytes) -> None:
    output = harnesses.get(name).read_output(Ended(1, log), None)
    assert output.error is not None and output.error.startswith(f"{name} ")


def test_an_unknown_harness_is_named_with_those_that_exist() -> None:
    with pytest.raises(
        harnesses.HarnessError, match="'aider'; harnesses: mini_swe_agent, pi, codex, claude_code, openclaw"
    ):
        harnesses.get("aider")


@pytest.mark.parametrize("name", BUILT)
def test_pins_are_exact_and_name_no_address(name: str) -> None:
    harness = harnesses.get(name)
    assert harnesses.software_of(name) == [harness.software]
    pins = (ROOT / "envs" / f"{harness.software}.txt").read_text()
    lines = [line.split("#")[0].strip() for line in pins.splitlines()]
    assert all(
        re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][A-Za-z0-9.]*( --hash=sha256:[0-9a-f]{64})?", x) for x in lines if x
    )
    if name == "mini_swe_agent":
        assert f"mini-swe-agent=={harness.version}" in lines
        return
    lock = json.loads((ROOT / "envs" / harness.software / "package-lock.json").read_text())["packages"]
    (wanted,) = lock[""]["dependencies"].values()
    # Codex names its platform in the version of one package.
    assert re.fullmatch(rf"(npm:@openai/codex@)?{re.escape(harness.version)}(-linux-x64)?", wanted)
    assert lock[f"node_modules/{PACKAGES[name]}"]["version"] == wanted.removeprefix("npm:@openai/codex@")
    # What a package carries inside is held by the package's own digest.
    assert all(("integrity" in p or p.get("inBundle")) and "resolved" not in p for key, p in lock.items() if key)


# ---- the tools of a task ----------------------------------------------------------------------------------------
URL = "http://127.0.0.1:8081/s/e1/mcp"


def test_a_harness_with_mcp_is_told_of_the_server_only_where_there_is_one(context: Any) -> None:
    takers = [n for n in harnesses.NAMES if harnesses.get(n).tools == "mcp"]
    assert set(takers) == {"codex", "claude_code", "opencode", "openclaw", "qwen_code"}
    for name in takers:
        harness = harnesses.get(name)
        assert not [f for f, data in harness.files(context()).items() if b"8081" in data]
        assert [f for f, data in harness.files(context(mcp_url=URL)).items() if URL.encode() in data]
    for name in set(harnesses.NAMES) - set(takers):
        assert harnesses.get(name).files(context(mcp_url=URL)) == harnesses.get(name).files(context())


def test_mcp_servers_stand_where_each_harness_reads_them(context: Any) -> None:
    def read(name: str, file: str) -> Any:
        data = harnesses.get(name).files(context(mcp_url=URL))[file].decode()
        return tomllib.loads(data) if file.endswith(".toml") else json.loads(data)

    codex = read("codex", ".codex/config.toml")["mcp_servers"]["task"]
    assert (codex["url"], codex["required"]) == (URL, True)
    assert read("claude_code", "mcp.json") == {"mcpServers": {"task": {"type": "http", "url": URL}}}
    argv = harnesses.get("claude_code").argv(context(mcp_url=URL))
    assert argv[argv.index("--mcp-config") :][:3] == ["--mcp-config", "/home/agent/mcp.json", "--strict-mcp-config"]
    opencode = read("opencode", ".config/opencode/opencode.json")["mcp"]["task"]
    assert (opencode["type"], opencode["url"]) == ("remote", URL)
    openclaw = read("openclaw", "openclaw.json")["mcp"]["servers"]["task"]
    assert (openclaw["url"], openclaw["transport"]) == (URL, "streamable-http")
    assert read("qwen_code", ".qwen/settings.json")["mcpServers"]["task"]["httpUrl"] == URL


def test_commands_of_an_environment_come_last_on_path() -> None:
    for name in harnesses.NAMES:
        harness = harnesses.get(name)
        path = harness.environment()["PATH"].split(":")
        assert path[-1] == "/home/agent/.local/bin" and path[0] == "/usr/local/bin"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("codex", ["exec", "resume", "--last"]),
        ("claude_code", ["--continue"]),
        ("opencode", ["--continue"]),
        ("pi", ["--continue"]),
    ],
)
def test_a_harness_that_resumes_is_told_to(name: str, words: list[str], context: Any) -> None:
    harness = harnesses.get(name)
    assert harness.resumes
    again, first = harness.argv(context(again=True)), harness.argv(context())
    assert [w for w in again if w not in first] == [w for w in words if w not in first]
    assert "--no-session" not in first
