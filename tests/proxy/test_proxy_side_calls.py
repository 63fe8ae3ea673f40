"""The decision table on hand-made episodes of real harnesses: what is trained under the task's reward and what is not.

The shapes are those of codex 0.171.0 (responses), claude 2.1.332 (messages), pi 0.73.1 and opencode 1.18.33 (chat), in
the internal form. Ids stand for a template that renders system text and tools at the head: other tools, another head.
"""

from __future__ import annotations

import zlib
from typing import Any

import pytest
from test_proxy_lineage import call, rows_of

Json = dict[str, Any]
TOOLS = [{"type": "function", "function": {"name": "shell", "parameters": {}}}]
READ = [{"type": "function", "function": {"name": "Read", "parameters": {}}}]
SUMMARY = "The agent listed the folder and found a.txt.\nIt has still to write b.txt."


def system(text: str) -> Json:
    return {"role": "system", "content": text}


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def said(text: str, tool: str | None = None) -> Json:
    calls = [{"id": "c", "type": "function", "function": {"name": tool, "arguments": "{}"}}]
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if tool else {})}


def result(text: str) -> Json:
    return {"role": "tool", "tool_call_id": "c", "content": text}


class Agent:
    """Makes an episode's calls: ids are hashes of what is rendered, so that equal histories have equal ones."""

    def __init__(self) -> None:
        self.calls: list[Json] = []

    def ask(self, messages: list[Json], answer: Json, tools: Any = TOOLS, **asked: Any) -> list[Json]:
        """One call; the history with its answer."""
        prompt = [len(str(tools)), *(self._id(m) for m in messages)]
        given = {"messages": messages, "response": answer, "tools": tools, "asked": asked}
        self.calls.append(call(len(self.calls), prompt, [self._id(answer)], **given))
        return [*messages, answer]

    @staticmethod
    def _id(message: Json) -> int:
        return zlib.crc32(str(message).encode()) >> 2

    def reasons(self) -> list[str | None]:
        return [r["reason"] for r in rows_of(*self.calls)]

    def parents(self) -> list[int | None]:
        return [r["parent"] for r in rows_of(*self.calls)]


TASK = [system("You are an agent."), user("make b.txt like a.txt")]


def test_codex_compaction_inline() -> None:
    """The history and a request for a summary, without tools; the new thread begins with the summary in a user text."""
    a = Agent()
    history = a.ask(TASK, said("", "shell"))
    a.ask([*history, result("a.txt"), user("Summarise for another model.")], said(SUMMARY), tools=None)
    fresh = a.ask([*TASK, user(f"Another model began this work. Its summary:\n{SUMMARY}")], said("", "shell"))
    a.ask([*fresh, result("ok")], said("done"))
    assert a.reasons() == [None, "side_call", None, None]
    assert a.parents() == [None, None, None, 2]


def test_a_compaction_that_keeps_the_tools_extends_the_thread_and_is_known_by_what_becomes_of_it() -> None:
    """claude, qwen: the request stands at the end of the thread; the harness takes the summary out of its tags."""
    a = Agent()
    history = a.ask(TASK, said("", "shell"))
    answer = f"<analysis>\nfirst\n</analysis>\n<summary>\n{SUMMARY}\n</summary>"
    a.ask([*history, result("a.txt"), user("Your task is to summarise.")], said(answer))
    fresh = a.ask([TASK[0], user(f"This session goes on from an earlier one.\n{SUMMARY}")], said("", "shell"))
    a.ask([*fresh, result("ok")], said("done"))
    assert a.parents() == [None, 0, None, 2]
    assert a.reasons() == [None, "side_call", None, None]


def test_pi_summarises_under_another_system_text() -> None:
    """The conversation as one text, no tools; the summary heads the next thread."""
    a = Agent()
    a.ask([system("You summarise."), user("<conversation>...</conversation>")], said(SUMMARY), tools=None)
    head = [TASK[0], user(f"<summary>\n{SUMMARY}\n</summary>"), TASK[1]]
    history = a.ask(head, said("", "shell"))
    a.ask([*history, result("ok")], said("done"))
    assert a.reasons() == ["side_call", None, None]


def test_a_summary_is_a_side_call_where_no_call_has_tools() -> None:
    """Text-only harnesses: nothing but what becomes of it tells a summary from the task."""
    a = Agent()
    history = a.ask(TASK, said("ls"), tools=None)
    a.ask([*history, user("a.txt"), user("Summarise.")], said(SUMMARY), tools=None)
    a.ask([*TASK, user(SUMMARY)], said("done"), tools=None)
    assert a.reasons()[1:] == ["side_call", None]


def test_opencode_title_and_claude_probe() -> None:
    a = Agent()
    a.ask([user("quota")], said("#"), tools=None, max_tokens=1)
    a.ask([system("You write titles."), user("make b.txt like a.txt")], said("Copying a file"), tools=None)
    history = a.ask(TASK, said("", "shell"), max_tokens=32000)
    a.ask([*history, result("a.txt")], said("done"))
    assert a.reasons() == ["side_call", "side_call", None, None]


def test_a_probe_is_one_where_no_call_has_tools_either() -> None:
    a = Agent()
    a.ask([user("quota")], said("#"), tools=None, max_tokens=1)
    a.ask(TASK, said("done"), tools=None, max_tokens=100)
    assert a.reasons() == ["side_call", None]


def test_a_retried_title_is_a_side_call_as_a_whole() -> None:
    """Two turns of one thread without tools: that the first is continued does not make it the task's."""
    a = Agent()
    title = a.ask([system("You write titles."), user("task")], said("A very long title that is refused"), tools=None)
    a.ask([*title, user("Shorter.")], said("Copying"), tools=None)
    a.ask(TASK, said("done"))
    assert a.reasons() == ["side_call", "side_call", None]


@pytest.mark.parametrize("answers_in", ["tool", "user"])
def test_claude_sub_agents_are_trained(answers_in: str) -> None:
    """Their own system text and tools; what they found comes back into the main thread, which goes on."""
    a = Agent()
    main = a.ask(TASK, said("I delegate", "Task"))
    sub = a.ask([system("You search."), user("find the files")], said("", "Read"), tools=READ)
    a.ask([*sub, result("a.txt")], said(SUMMARY), tools=READ)
    found = [result(SUMMARY)] if answers_in == "tool" else [result("see below"), user(SUMMARY)]
    a.ask([*main, *found], said("done"))
    assert a.reasons() == [None] * 4
    assert a.parents() == [None, None, 1, 0]


def test_a_final_answer_without_tools_after_the_tools_thread_is_kept_out() -> None:
    """A last call without tools may be a summary that nobody read any more: not trained rather than wrongly."""
    a = Agent()
    history = a.ask(TASK, said("", "shell"))
    a.ask([*history, result("x"), user("No more tools. Say what you did.")], said(SUMMARY), tools=None)
    assert a.reasons() == [None, "side_call"]


def test_a_first_call_without_tools_that_goes_on_with_them_is_the_task() -> None:
    a = Agent()
    a.ask(TASK, said("I plan"), tools=None)
    a.ask([*TASK, said("I plan"), user("Go on.")], said("done"))
    assert a.reasons() == [None, None]


def test_short_answers_are_no_quotations() -> None:
    a = Agent()
    a.ask(TASK, said("done"))
    a.ask([TASK[0], user("another task, not yet done")], said("ok"))
    assert a.reasons() == [None, None]
