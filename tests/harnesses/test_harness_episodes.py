"""Every harness for real: a two-turn tool episode through the proxy, against a scripted policy, is one training row."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from episode_rig import NOTE, Episode, play
from scripted_policy import ASIDE, END, Turn, encode

from openforge import harnesses
from openforge.harnesses.claude_code import ClaudeCode
from openforge.harnesses.opencode import Opencode
from openforge.proxy.lineage import prompt_ids
from openforge.sandboxes import LocalBackend

pytestmark = pytest.mark.slow
DONE = "I am done."
COMMAND = "echo 'made by \"it\" & é' > made.txt; cat note.txt"
MADE = 'made by "it" & é\n'.encode()


@dataclass(frozen=True)
class Case:
    """How one harness runs a command.

    Attributes:
        tool: its tool that runs a command.
        key: the argument that holds the command.
        more: its other required arguments.
        last: its last turn.
        group: episodes whose prompts must be the same; 1 where the harness says that they cannot be.
    """

    name: str
    tool: str
    dialect: str
    key: str = "command"
    more: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    last: Turn = field(default_factory=lambda: Turn(DONE))
    group: int = 2

    def runs(self, command: str) -> Turn:
        return Turn(name=self.tool, arguments={self.key: command, **self.more})

    def script(self) -> list[Turn]:
        return [self.runs(COMMAND), self.last]


SUBMIT = Turn(name="bash", arguments={"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})
SHELL = {"is_background": False, "description": "Make the file"}
FEW = {"tools": "run_shell_command,read_file,edit,write_file"}
CASES = {
    "pi": Case("pi", "bash", "chat"),
    "mini_swe_agent": Case("mini_swe_agent", "bash", "chat", options={"launch": "command"}, last=SUBMIT),
    "codex": Case("codex", "exec_command", "responses", key="cmd"),
    "claude_code-bare": Case("claude_code", "Bash", "messages", options={"bare": True}),
    "claude_code-tools": Case("claude_code", "Bash", "messages", options={"tools": "Bash,Read,Edit,Write"}),
    "opencode": Case("opencode", "bash", "chat", more={"description": "Make the file"}),
    "qwen_code": Case("qwen_code", "run_shell_command", "chat", more=SHELL),
    "openclaw": Case("openclaw", "exec", "responses", group=1),
}


@pytest.mark.parametrize("name", CASES)
async def test_a_two_turn_tool_episode_is_one_training_row(
    name: str, backend: LocalBackend, context: Any, tmp_path: Path
) -> None:
    case = CASES[name]
    harness = harnesses.get(case.name)
    script = case.script()
    group = await play(backend, harness, script, context, tmp_path, episodes=case.group, options=case.options)
    for got in group:
        assert (got.ended.exit_code, got.output.error, got.version) == (0, None, harness.version), got.told()
        assert await got.sandbox.download_content("made.txt") == MADE, got.told()
        assert NOTE in said_by_the_tool(got)
        if case.last.text:
            assert got.output.answer == DONE
        assert {c["dialect"] for c in got.calls} == {case.dialect} == {harness.dialect}
        assert [(c["trainable"], c["delivery"]) for c in got.calls] == [(True, "confirmed")] * 2, got.told()
        is_one_row(got, script)
    # Whatever differed in the prompts of a group would be compared as if the policy had made it.
    assert len({tuple(prompt_ids(got.calls, 0)) for got in group}) == 1


def is_one_row(episode: Episode, script: list[Turn]) -> None:
    """Both turns as they were sampled, in order, with their logprobs; nothing else is trained."""
    assert [r.calls for r in episode.rows] == [[0, 1]], episode.told()
    (row,) = episode.rows
    turns = [encode(turn.sampled + END) for turn in script]
    assert [t for t, m in zip(row.token_ids, row.loss_mask, strict=True) if m] == turns[0] + turns[1]
    expected = [-0.001 * (n + 1) for turn in turns for n in range(len(turn))]
    assert [p for p, m in zip(row.logprobs, row.loss_mask, strict=True) if m] == pytest.approx(expected)


def said_by_the_tool(episode: Episode, call: int = 1) -> str:
    """What a request tells of the one tool's output."""
    told = [m for m in episode.requests[call]["messages"] if m["role"] == "tool"]
    assert len(told) == 1
    return str(told[0]["content"])


# Windows into which the start prompt fits, but not together with a tool's output of 28,000 bytes: the answer that
# counts them is the second one.
LONG = "head -c 28000 /dev/zero | tr '\\0' x"
SUMMARIES = {
    "codex": (CASES["codex"], 34_000, "CONTEXT CHECKPOINT COMPACTION"),
    "claude_code": (CASES["claude_code-bare"], 30_000, "create a detailed summary of the conversation"),
    "pi": (CASES["pi"], 20_000, None),
    "opencode": (CASES["opencode"], 50_000, None),
    "qwen_code": (replace(CASES["qwen_code"], options=FEW), 90_000, None),
}


@pytest.mark.parametrize("name", SUMMARIES)
async def test_a_summary_is_asked_beside_the_task_and_the_task_goes_on(
    name: str, backend: LocalBackend, context: Any, tmp_path: Path
) -> None:
    case, window, words = SUMMARIES[name]
    over: dict[str, Any] = {"options": case.options, "context_window": window, "max_tokens": 500}
    harness = harnesses.get(case.name)
    script = [case.runs(LONG), *case.script()]
    (got,) = await play(backend, harness, script, context, tmp_path, aside=words, **over)
    assert (got.ended.exit_code, got.output.error, got.output.answer) == (0, None, DONE), got.told()
    assert await got.sandbox.download_content("made.txt") == MADE, got.told()
    aside = [c for c, r in zip(got.calls, got.requests, strict=True) if r["response"]["content"] == ASIDE]
    assert aside and all((c["trainable"], c["reason"]) == (False, "side_call") for c in aside), got.told()
    assert all(c["trainable"] for c in got.calls if c not in aside), got.told()


async def test_a_sub_agent_is_a_row_of_its_own(backend: LocalBackend, context: Any, tmp_path: Path) -> None:
    words = "COUNT THE FILES."
    task = {"description": "Count", "prompt": words, "subagent_type": "general-purpose", "run_in_background": False}
    script = [Turn(name="Agent", arguments=task), Turn(DONE)]
    (got,) = await play(backend, harnesses.get("claude_code"), script, context, tmp_path, aside=words)
    assert (got.ended.exit_code, got.output.answer) == (0, DONE), got.told()
    # The agent's two turns, and between them the sub-agent's one; all are trained under the task's reward.
    assert [r.calls for r in got.rows] == [[0, 2], [1]] and not got.dropped, got.told()
    assert got.requests[1]["response"]["content"] == ASIDE
    assert ASIDE in said_by_the_tool(got, 2)


async def test_a_title_is_asked_beside_the_task(backend: LocalBackend, context: Any, tmp_path: Path) -> None:
    class Untitled(Opencode):
        def argv(self, ctx: Any) -> list[str]:
            words = super().argv(ctx)
            at = words.index("--title")
            return words[:at] + words[at + 2 :]

    case = CASES["opencode"]
    (got,) = await play(backend, Untitled(), case.script(), context, tmp_path)
    titles = [c for c in got.calls if c["tools_sha256"] is None]
    assert [(c["trainable"], c["reason"]) for c in titles] == [(False, "side_call")], got.told()
    assert [len(r.calls) for r in got.rows] == [2], got.told()


async def test_a_look_whether_anybody_is_there_is_no_call(backend: LocalBackend, context: Any, tmp_path: Path) -> None:
    class Looks(ClaudeCode):
        # With it, it does not look first.
        constants = {k: v for k, v in ClaudeCode.constants.items() if "NONESSENTIAL" not in k}  # noqa: RUF012

    case = CASES["claude_code-bare"]
    (got,) = await play(backend, Looks(), case.script(), context, tmp_path)
    assert (got.ended.exit_code, got.output.answer) == (0, DONE), got.told()
    assert [r.calls for r in got.rows] == [[0, 1]] and len(got.calls) == 2, got.told()


@pytest.mark.parametrize(("name", "code"), [("claude_code-bare", 1), ("qwen_code", 53)])
async def test_a_harness_that_stops_at_its_own_turn_limit_has_completed(
    name: str, code: int, backend: LocalBackend, context: Any, tmp_path: Path
) -> None:
    case = CASES[name]
    harness = harnesses.get(case.name)
    (got,) = await play(backend, harness, case.script(), context, tmp_path, turns=1, options=case.options)
    assert (got.ended.exit_code, got.output.error) == (code, None), got.told()
    assert [(c["trainable"], c["delivery"]) for c in got.calls] == [(True, "confirmed")], got.told()
    assert await got.sandbox.download_content("made.txt") == MADE


@pytest.mark.parametrize("name", ["codex", "claude_code-bare"])
async def test_an_error_of_the_policy_server_is_one_sentence(
    name: str, backend: LocalBackend, context: Any, tmp_path: Path
) -> None:
    case = CASES[name]
    harness = harnesses.get(case.name)
    (got,) = await play(backend, harness, [], context, tmp_path, options=case.options)
    assert got.output.error is not None and got.output.error.startswith(f"{case.name} ended with an error: ")
    assert got.calls == []


@pytest.mark.parametrize("name", ["pi", "codex", "claude_code-bare"])
async def test_a_budget_that_is_used_up_ends_a_harness_and_keeps_what_it_read(
    name: str, backend: LocalBackend, context: Any, tmp_path: Path
) -> None:
    case = CASES[name]
    harness = harnesses.get(case.name)
    (got,) = await play(backend, harness, case.script(), context, tmp_path, budget=1, options=case.options)
    # It gave up by itself, without asking until our time was over.
    assert not got.ended.timed_out and got.output.error is not None, got.told()
    assert [(c["trainable"], c["delivery"]) for c in got.calls] == [(True, "confirmed")], got.told()
    assert await got.sandbox.download_content("made.txt") == MADE
