"""Every harness for real: a two-turn tool episode through the proxy, against a scripted policy, is one training row."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from episode_rig import Episode, play, told
from scripted_policy import END, Turn, encode

from openforge import harnesses
from openforge.sandboxes import LocalBackend

pytestmark = pytest.mark.slow
DONE = "I am done."
COMMAND = "echo 'made by \"it\" & é' > made.txt; cat note.txt"
MADE = 'made by "it" & é\n'.encode()


@dataclass(frozen=True)
class Case:
    """How one harness runs a command, and what it sends of it.

    Attributes:
        tool: its tool that runs a command.
        key: the argument that holds the command.
        more: its other required arguments.
        last: its last turn.
    """

    name: str
    tool: str
    dialect: str
    key: str = "command"
    more: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    last: Turn = field(default_factory=lambda: Turn(DONE))

    @property
    def script(self) -> list[Turn]:
        return [Turn(name=self.tool, arguments={self.key: COMMAND, **self.more}), self.last]


SUBMIT = Turn(name="bash", arguments={"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})
SHELL = {"is_background": False, "description": "Make the file"}
CASES = {
    "pi": Case("pi", "bash", "chat"),
    "mini_swe_agent": Case("mini_swe_agent", "bash", "chat", options={"launch": "command"}, last=SUBMIT),
    "opencode": Case("opencode", "bash", "chat", more={"description": "Make the file"}),
    "qwen_code": Case("qwen_code", "run_shell_command", "chat", more=SHELL),
    "qwen_code-bare": Case("qwen_code", "run_shell_command", "chat", more=SHELL, options={"bare": True}),
    "codex": Case("codex", "exec_command", "responses", key="cmd"),
    "claude_code-bare": Case("claude_code", "Bash", "messages", options={"bare": True}),
    "claude_code-tools": Case("claude_code", "Bash", "messages", options={"tools": "Bash,Read,Edit,Write"}),
    "openclaw": Case("openclaw", "exec", "responses"),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


async def test_a_two_turn_tool_episode_is_one_training_row(
    case: Case, backend: LocalBackend, context: Any, tmp_path: Path
) -> None:
    harness = harnesses.get(case.name)
    files = {"note.txt": b"what the note says\n"}
    got = await play(backend, harness, case.script, context, tmp_path / "journal", files, options=case.options)

    assert (got.ended.exit_code, got.output.error, got.version) == (0, None, harness.version), told(got)
    assert await got.sandbox.download_content("made.txt") == MADE, told(got)
    assert "what the note says" in said_by_the_tool(got)
    if case.last.text:
        assert got.output.answer == DONE
    assert {c["dialect"] for c in got.calls} == {case.dialect} == {harness.dialect}
    assert [(c["trainable"], c["delivery"]) for c in got.calls] == [(True, "confirmed")] * 2, told(got)

    # One row: both turns as they were sampled, in order, and nothing else is trained.
    assert len(got.rows) == 1 and got.rows[0].calls == [0, 1], told(got)
    (row,) = got.rows
    turns = [encode(turn.sampled + END) for turn in case.script]
    assert [t for t, m in zip(row.token_ids, row.loss_mask, strict=True) if m] == turns[0] + turns[1]
    expected = [-0.001 * (n + 1) for turn in turns for n in range(len(turn))]
    assert [p for p, m in zip(row.logprobs, row.loss_mask, strict=True) if m] == pytest.approx(expected)


def said_by_the_tool(episode: Episode) -> str:
    """What the second request tells of the tool's output."""
    told = [m for m in episode.requests[1]["messages"] if m["role"] == "tool"]
    assert len(told) == 1
    return str(told[0]["content"])
