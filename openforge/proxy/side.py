"""Requests beside the task that look like the task's own, known by the words that a harness asks them with.

A title or a summary that is asked without tools is told from the task by that alone (`trained`). Some harnesses send
their tools along, so that the provider's prompt cache holds, and append the request to the conversation: by ids it
extends the task's thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from openforge.proxy.calls import Json
from openforge.proxy.threads import text_of

#: What is asked, by whom, and words of the last user message; each was recorded from the harness or read in its source.
SIDE_REQUESTS: tuple[tuple[str, str, str], ...] = (
    ("summary", "claude_code 2.1.332", "Your task is to create a detailed summary of the conversation so far"),
    ("summary", "codex 0.171.0", "You are performing a CONTEXT CHECKPOINT COMPACTION."),
    ("summary", "pi 0.73.1", "The messages above are a conversation to summarize."),
    ("summary", "qwen_code 0.24.4", "Then, produce the <state_snapshot> XML."),
)


def asks_aside(messages: Sequence[Json]) -> bool:
    """Whether the last of these chat messages is a known request beside the task."""
    if not messages or messages[-1].get("role") != "user":
        return False
    text = text_of(messages[-1].get("content"))
    return any(words in text for _, _, words in SIDE_REQUESTS)
