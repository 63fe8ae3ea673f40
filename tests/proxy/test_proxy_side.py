"""Requests for a summary that look like the task's own, told by the words that the harnesses ask them with."""

from __future__ import annotations

from typing import Any

import pytest
from proxy_rig import Rig

from openforge.proxy.side import asks_aside

# Beginnings of what each sent last, recorded.
CLAUDE = (
    "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.\n\n- You already have all the context you need.\n\n"
    "Your task is to create a detailed summary of the conversation so far, paying close attention."
)
CODEX = "You are performing a CONTEXT CHECKPOINT COMPACTION. Create a handoff summary for another LLM."
QWEN = "First, reason in your <analysis> block. Then, produce the <state_snapshot> XML."
PI = "<conversation>\n\n</conversation>\n\nThe messages above are a conversation to summarize. Create it."


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


@pytest.mark.parametrize("text", [CLAUDE, CODEX, QWEN, PI])
def test_the_last_message_tells(text: str) -> None:
    before = [user("Do it."), {"role": "assistant", "content": "I will."}]
    assert asks_aside([*before, user(text)])
    assert asks_aside([*before, user([{"type": "text", "text": "<reminder>"}, {"type": "text", "text": text}])])
    # Said earlier, by the agent or in a tool's output, it asks for nothing.
    assert not asks_aside([user(text), *before[1:], user("Go on.")])
    assert not asks_aside([user("Do it."), {"role": "tool", "content": text, "tool_call_id": "c"}])
    assert not asks_aside([user("Do it."), {"role": "assistant", "content": text}])


def test_an_ordinary_task_is_none() -> None:
    assert not asks_aside([])
    assert not asks_aside([user("Write a detailed summary of notes.txt into summary.md.")])
    assert not asks_aside([user(None)])


async def test_a_summary_that_extends_the_thread_is_not_trained_and_what_follows_is(rig: Rig) -> None:
    rig.session()
    tools = [{"type": "function", "function": {"name": "Bash", "parameters": {"type": "object"}}}]
    talk = [user("Do it.")]
    for last in (None, CLAUDE):
        if last is not None:
            talk += [{"role": "assistant", "content": "ok 1"}, user(last)]
        assert (await rig.ask({"model": "m", "messages": talk, "tools": tools}))[0] == 200
    goes_on = [user("This session is being continued. The summary: all is well.")]
    assert (await rig.ask({"model": "m", "messages": goes_on, "tools": tools}))[0] == 200
    await rig.gate.sessions["e1"].close(True)
    rows = rig.rows()
    assert [(r["trainable"], r["reason"]) for r in rows] == [(True, None), (False, "side_call"), (True, None)]
    assert [r["parent"] for r in rows] == [None, 0, None]
