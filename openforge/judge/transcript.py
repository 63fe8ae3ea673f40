"""What an agent did and said, as text for a judge, from its recorded calls."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from openforge.judge.rubric import cut

RESULT = 4_000  # characters of one message or result
Row = Mapping[str, Any]


def transcript(calls: Sequence[Row]) -> str:
    """The main thread of an episode: every message after the instructions, tool calls and results included.

    The main thread is the one of most calls, the earlier of equals; what its last call's prompt held and what it
    answered is the whole of it. Empty without calls.
    """
    threads = Counter(c["thread"] for c in calls)
    if not calls:
        return ""
    most = max(threads.values())
    main = min(t for t, n in threads.items() if n == most)
    last = max((c for c in calls if c["thread"] == main), key=lambda c: int(c["call"]))
    messages = [*_history(calls, last), _parsed(last["response"])]
    return "\n\n".join(_text(m) for m in messages if isinstance(m, dict))


def _history(calls: Sequence[Row], last: Row) -> list[Any]:
    """Messages of a call's prompt: a row holds what is new since the call whose prefix it shares."""
    by_index = {c["call"]: c for c in calls}
    chain = [last]
    while (before := chain[-1]["prefix_of"]) is not None and before in by_index:
        chain.append(by_index[before])
    return [m for c in reversed(chain) for m in _list(_parsed(c["messages"]))]


def _parsed(text: str | None) -> Any:
    try:
        return None if text is None else json.loads(text)
    except ValueError:
        return None


def _list(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list) else []


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        parts = [p.get("text", f"[{p.get('type', 'part')}]") for p in content if isinstance(p, dict)]
        content = "\n".join(map(str, parts))
    lines = [f"[{message.get('role', 'message')}]", cut(str(content or ""), RESULT)]
    for made in _list(message.get("tool_calls")):
        function = made.get("function") if isinstance(made, dict) else None
        if isinstance(function, dict):
            lines.append(f"[calls {function.get('name')}] {cut(str(function.get('arguments') or ''), RESULT)}")
    return "\n".join(line for line in lines if line)
