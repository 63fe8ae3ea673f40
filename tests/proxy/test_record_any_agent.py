"""docs/record-any-agent.md as it is written: every command of the page runs, in order, against a MOCK vLLM.

Codex and Claude Code are mocks in the fast test and the real programs in the slow one. Everything runs in a network
namespace of its own: the page's ports are free there, and nothing outside is reachable.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from openforge.sandboxes import bwrap

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "record-any-agent.md"
CODEX_PACKAGE = ".software/harness-codex/npm/node_modules/@openai/codex-linux-x64"
REAL = {
    "codex": f"{CODEX_PACKAGE}/vendor/x86_64-unknown-linux-musl/bin/codex",
    "claude": ".software/harness-claude/npm/node_modules/@anthropic-ai/claude-code-linux-x64/claude",
}
# A MOCK of the options of curl that the page uses, for machines without curl.
CURL = """
import sys, urllib.error, urllib.request
words = iter(sys.argv[1:]); url, method, headers, data = "", None, {}, None
for w in words:
    if w == "-X": method = next(words)
    elif w == "-d": data = next(words).encode()
    elif w == "-H":
        name, _, value = next(words).partition(": "); headers[name] = value
    elif w != "-s": url = w
try:
    answer = urllib.request.urlopen(urllib.request.Request(url, data, headers, method=method))
except urllib.error.HTTPError as e:
    answer = e
sys.stdout.write(answer.read().decode())
"""
# A MOCK of Codex: one streamed request of its dialect, at the provider that `-c` names.
CODEX = """
import json, os, sys, urllib.request
config = dict(w.split("=", 1) for i, w in enumerate(sys.argv) if sys.argv[i - 1] == "-c")
provider = "model_providers." + config["model_provider"]
assert config[provider + ".wire_api"] == "responses" and sys.argv[1] == "exec"
body = {"model": config["model"], "stream": True, "store": False, "tools": [],
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": sys.argv[-1]}]}]}
key = os.environ[config[provider + ".env_key"]]
asked = urllib.request.Request(config[provider + ".base_url"] + "/responses", json.dumps(body).encode(),
                               {"authorization": "Bearer " + key, "content-type": "application/json"})
events = urllib.request.urlopen(asked).read().decode()
assert "response.completed" in events
print("mock codex is answered")
"""
# A MOCK of Claude Code: one streamed request of its dialect.
CLAUDE = """
import json, os, sys, urllib.request
assert os.environ["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0" and sys.argv[1] == "-p"
body = {"model": sys.argv[sys.argv.index("--model") + 1], "max_tokens": 32000, "stream": True,
        "messages": [{"role": "user", "content": sys.argv[2]}]}
asked = urllib.request.Request(os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages?beta=true", json.dumps(body).encode(),
                               {"x-api-key": os.environ["ANTHROPIC_API_KEY"], "anthropic-version": "2023-06-01"})
events = urllib.request.urlopen(asked).read().decode()
assert "message_stop" in events
print("mock claude is answered")
"""


def blocks() -> list[tuple[str, str]]:
    """(language, text) of the page's code blocks."""
    return re.findall(r"^```(sh|python)\n(.*?)^```$", PAGE.read_text(), re.M | re.S)


def script() -> str:
    """The page as one shell script: servers go to the background, and what follows waits for their words."""
    out = ["set -eu", "mkdir -p work && cd work"]
    for n, (language, text) in enumerate(blocks()):
        out.append(f"echo '=== {n}'")
        if language == "python":
            out.append(f"python - <<'END_OF_PAGE'\n{text}END_OF_PAGE")
        elif text.startswith("vllm serve"):
            out.append(f"{text.rstrip()} >../vllm.log 2>&1 &\n{waiting('startup complete', '../vllm.log')}")
        elif "openforge proxy" in text:
            # The last line is the server; what it exports is for the other terminals too.
            out.append(f"{text.rstrip()} >../proxy.log 2>&1 &\n{waiting('is open', '../proxy.log')}")
        else:
            out.append(text.rstrip())
    return "\n".join(out)


def waiting(words: str, log: str) -> str:
    return f"until grep -q '{words}' {log}; do kill -0 $! || {{ cat {log}; exit 1; }}; sleep 0.1; done"


def run(folder: Path, agents: dict[str, str]) -> tuple[list[str], list[dict[str, object]]]:
    """Run the page with `agents` in place; its output by block, and the calls that its last query wrote."""
    # As every test of a sandbox needs: .ci/run installs bubblewrap.
    assert bwrap.probe()["why"] is None, "no network namespaces here"
    (folder / "bin").mkdir()
    programs = {
        "vllm": f"{shlex.quote(sys.executable)} {ROOT}/tests/proxy/mock_vllm.py",
        "openforge": f"{shlex.quote(sys.executable)} -m openforge",
        "python": shlex.quote(sys.executable),
        **agents,
    }
    if shutil.which("curl") is None:
        programs["curl"] = mock(folder, "curl", CURL)
    for name, words in programs.items():
        (folder / "bin" / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        (folder / "bin" / name).chmod(0o755)
    (folder / "page.sh").write_text(script())
    env = {
        "PATH": f"{folder}/bin:{os.environ['PATH']}",
        "HOME": str(folder),
        "PYTHONPATH": f"{ROOT}:{ROOT}/tests/proxy",
        "IS_SANDBOX": "1",  # Claude Code's own question of a root user
    }
    network = ["bwrap", "--unshare-net", "--unshare-pid", "--die-with-parent", "--dev-bind", "/", "/"]
    done = subprocess.run(
        [*network, "--proc", "/proc", "--chdir", folder, "sh", "page.sh"],
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
        stdin=subprocess.DEVNULL,
    )
    logs = "".join(p.read_text() for p in folder.glob("*.log"))
    assert done.returncode == 0, (done.stdout, done.stderr, logs)
    return re.split(r"=== \d+\n", done.stdout)[1:], json.loads((folder / "work/calls.json").read_text())


def mock(folder: Path, name: str, source: str) -> str:
    (folder / f"mock_{name}.py").write_text(source)
    return f"{shlex.quote(sys.executable)} {folder}/mock_{name}.py"


def test_the_page_runs_as_written(tmp_path: Path) -> None:
    outputs, calls = run(
        tmp_path, {"codex": mock(tmp_path, "codex", CODEX), "claude": mock(tmp_path, "claude", CLAUDE)}
    )
    assert len(outputs) == len(blocks()) == 10
    assert json.loads(outputs[2])["choices"][0]["message"]["content"] == "echo Say hello."
    assert outputs[3:5] == ["mock codex is answered\n", "mock claude is answered\n"]
    closed = json.loads((tmp_path / "work/closed.json").read_text())
    assert (closed["calls"], closed["turns"], closed["closed"]) == (3, 3, True)
    assert [(c["dialect"], c["trainable"], c["reason"]) for c in calls] == [
        ("chat", True, None),
        ("responses", True, None),
        ("messages", True, None),
    ]
    table = [line.split() for line in outputs[6].splitlines()]
    # The mock's tokens are the bytes: START user newline text END START assistant newline, and the answer with its END.
    prompt = len("user\nSay hello.") + 3 + len("assistant\n")
    assert table[2] == ["try", "0", "chat", str(prompt), str(len("echo Say hello.") + 1), "True", "NULL"]
    assert outputs[8].startswith(f"try [(0, {prompt}, None), (1, ")
    opened, state = map(json.loads, outputs[9].replace("}{", "}\n{").splitlines())
    assert opened["base_url"] == "http://127.0.0.1:8080/s/task-7" and state["closed"] is False


@pytest.mark.slow
def test_the_page_runs_with_the_real_codex_and_claude_code(tmp_path: Path) -> None:
    outputs, calls = run(tmp_path, {name: str(ROOT / path) for name, path in REAL.items()})
    # The mock says the last message again; Claude Code puts its own words behind the user's.
    assert outputs[3] == "echo List the files here.\n" and outputs[4].startswith("echo ")
    assert any("What is in this folder?" in str(c["messages"]) for c in calls if c["dialect"] == "messages")
    found = Counter((c["dialect"], c["trainable"]) for c in calls)
    assert found["responses", True] >= 1 and found["messages", True] >= 1
    # A call without tools in a session of agents with tools.
    assert [c["reason"] for c in calls if c["dialect"] == "chat"] == ["side_call"]
