"""One task with services under every harness, for real: the same verdict, the same dispatches, one training row."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from claw_rig import play
from scripted_policy import Turn
from service_setup import setup

from openforge import harnesses
from openforge.sandboxes import LocalBackend

pytestmark = pytest.mark.slow

DONE = "All sent."
TEXT = 'made by "it" & é'
# Passes when the mail and the note are there, and the task's tools were called in this order.
VERIFY = f"""
import json, pathlib, sys
at = pathlib.Path(sys.argv[1])
audit = json.loads((at / "audit.json").read_text())
calls = [json.loads(l)["tool_name"] for l in (at / "dispatches.jsonl").read_text().splitlines()]
messages = json.loads((at / "messages.json").read_text())
passed = {TEXT!r} in audit["mail"]["items"] and "n" in audit["notes"]["items"]
roles = sorted(set(m["role"] for m in messages))
print(json.dumps({{"score": float(passed), "passed": passed, "calls": calls, "roles": roles}}))
"""


@dataclass(frozen=True)
class Case:
    """How one harness calls a tool of the task: by MCP under a name of its own making, or in its shell.

    Attributes:
        prefix: of the tools' names; None for the shell.
        checks: it refuses arguments that do not fit the schema itself.
    """

    name: str
    prefix: str | None = None
    shell: str = "bash"
    options: dict[str, Any] = field(default_factory=dict)
    checks: bool = False
    last: Turn = field(default_factory=lambda: Turn(DONE))

    def calls(self, tool: str, **arguments: str) -> Turn:
        if self.prefix is not None:
            return Turn(name=f"{self.prefix}{tool}", arguments=arguments)
        quoted = json.dumps(arguments, ensure_ascii=False).replace("'", "'\\''")
        return Turn(name=self.shell, arguments={"command": f"tool {tool} '{quoted}'"})

    def script(self) -> list[Turn]:
        return [
            self.calls("mail_add", text=TEXT),
            self.calls("mail_add", wrong="x"),
            self.calls("notes_add", text="n"),
            self.last,
        ]


SUBMIT = Turn(name="bash", arguments={"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})
CASES = {
    "pi": Case("pi"),
    "mini_swe_agent": Case("mini_swe_agent", options={"launch": "fork"}, last=SUBMIT),
    "codex": Case("codex", "mcp__task__"),
    "claude_code": Case("claude_code", "mcp__task__", options={"tools": "Bash,Read"}),
    "opencode": Case("opencode", "task_"),
    "qwen_code": Case("qwen_code", "mcp__task__", checks=True),
    "openclaw": Case("openclaw", "task__", checks=True),
}


@pytest.mark.parametrize("name", CASES)
async def test_the_same_task_has_the_same_verdict_under_every_harness(
    name: str, backend: LocalBackend, tmp_path: Path
) -> None:
    case = CASES[name]
    harness = harnesses.get(case.name)
    got = await play(backend, harness, case.script(), setup(), VERIFY, tmp_path, options=case.options)
    assert got.result.status == "completed", got.told()
    verdict = json.loads(got.result.verifier_output or "null")
    assert verdict is not None and verdict["passed"] is True, got.told()
    expected = [("mail_add", 200), ("mail_add", 400), ("notes_add", 200)]
    if case.checks:
        del expected[1]
    assert verdict["calls"] == [name for name, _ in expected], got.told()
    assert {"user", "assistant"} <= set(verdict["roles"])
    assert got.result.dispatches is not None
    assert [(d["tool"], d["status"]) for d in got.result.dispatches] == expected, got.told()
    assert json.loads(got.result.dispatches[0]["arguments"]) == {"text": TEXT}
    # The agent was told of its mistake.
    told = [str(m["content"]) for m in got.requests[2]["messages"] if m["role"] == "tool"]
    assert re.search("required propert", told[-1]) and "text" in told[-1], told[-1]
    assert [r.calls for r in got.rows] == [[0, 1, 2, 3]] and not got.dropped, got.told()
