"""What is known of an episode when it is judged, as files of one folder.

The environment writes the folder once the agent is dead; verifiers and graders read it, its place is the word
`{evidence}` of `verifier.command`. Nothing of it was ever within the agent's reach, the answer aside.

    episode.json      {"episode_id", "task_id", "model", "answer", "user_rounds"}; answer is null where there was none
    messages.json     the conversation, [{"role", "content": [block, ...]}, ...] in time order
    dispatches.jsonl  every call of the task's tools in time order, one object a line (DISPATCH)
    audit.json        {service: what GET /<service>/audit answered} after the agent's end
    snapshot.json     {"cmd:COMMAND": {"exit_code", "stdout", "stderr"}, "file:PATH": {"encoding", "content"},
                      "local_file:PATH": {"encoding": "base64", "content"}}, or {"error": why} in an entry's place
    answer            the agent's last message as text; empty where there was none

A block is {"type": "text", "text"}, {"type": "tool_use", "id", "name", "input"} or {"type": "tool_result",
"tool_use_id", "content": [text blocks], "is_error"}; results stand in messages of role user. Files that are not text
have encoding base64, text has utf-8. These are ClawEval's own shapes, so that its graders read them as they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# Where the folders that a task's services and grader need stand in a companion sandbox (`setup.Tree`).
TREE = "/srv/tree"
# Members of a dispatch. A call that never reached its service has the status that the agent was answered with (400 for
# bad arguments), and endpoint_url is where it would have gone.
DISPATCH = (
    *("tool_use_id", "tool_name", "endpoint_url", "request_body", "response_status", "response_body"),
    *("latency_ms", "timestamp"),
)
# Exit code of a grader whose judge could not be reached: judge_failed, not verifier_failed (sysexits' EX_TEMPFAIL).
JUDGE_FAILED = 75
# Names of environment variables by which a grader is told of its judge: an OpenAI-compatible endpoint, with its /v1.
JUDGE_URL, JUDGE_MODEL, JUDGE_KEY = "OPENFORGE_JUDGE_URL", "OPENFORGE_JUDGE_MODEL", "OPENFORGE_JUDGE_KEY"

Row = dict[str, Any]


@dataclass(frozen=True)
class Evidence:
    """The evidence of one episode; `files` are what the folder holds.

    Attributes:
        messages: see the module; `messages_of` makes them of a chat.
        dispatches: mappings with the members DISPATCH.
        audit: by service name.
        snapshot: None where the task asks for none.
        user_rounds: messages of the simulated user after the first.
    """

    episode_id: str
    task_id: str
    model: str
    answer: str | None
    messages: Sequence[Mapping[str, Any]] = ()
    dispatches: Sequence[Mapping[str, Any]] = ()
    audit: Mapping[str, Any] = field(default_factory=dict)
    snapshot: Mapping[str, Any] | None = None
    user_rounds: int = 0

    @classmethod
    def of(cls, episode: Mapping[str, Any], model: str, chat: Iterable[Mapping[str, Any]]) -> Evidence:
        """The evidence in a row of the episodes table.

        Args:
            chat: its conversation (`traces.conversation`).
        """
        return cls(
            episode_id=episode["episode_id"],
            task_id=episode["task_id"],
            model=model,
            answer=episode["answer"],
            messages=messages_of(chat),
            dispatches=dispatches_of(episode),
            audit=json.loads(episode["audit"] or "{}"),
            snapshot=json.loads(episode["snapshot"] or "null"),
            user_rounds=episode["user_rounds"],
        )

    def files(self) -> dict[str, bytes]:
        """Content by file name."""
        # An agent that asks no policy leaves no conversation, but it may have an answer.
        said = [] if self.answer is None else messages_of([{"role": "assistant", "content": self.answer}])
        about = {k: getattr(self, k) for k in ("episode_id", "task_id", "model", "answer", "user_rounds")}
        return {
            "episode.json": _json(about),
            "messages.json": _json(list(self.messages) or said),
            "dispatches.jsonl": b"".join(_json(dict(d)) + b"\n" for d in self.dispatches),
            "audit.json": _json(dict(self.audit)),
            "snapshot.json": _json(self.snapshot if self.snapshot is None else dict(self.snapshot)),
            "answer": (self.answer or "").encode(errors="replace"),
        }


def dispatches_of(episode: Mapping[str, Any]) -> list[Row]:
    """The column `dispatches` of an episode's row as DISPATCH mappings."""
    return [
        {
            "tool_use_id": f"dispatch_{i}",
            "tool_name": d["tool"],
            "endpoint_url": d["endpoint"],
            "request_body": _arguments(d["arguments"]),
            "response_status": d["status"],
            "response_body": json.loads(d["response"]),
            "latency_ms": d["latency"] * 1000,
            "timestamp": d["time"],
        }
        for i, d in enumerate(episode["dispatches"] or ())
    ]


def messages_of(chat: Iterable[Mapping[str, Any]]) -> list[Row]:
    """The messages of a chat in OpenAI's form (as the proxy records it) in the evidence's form.

    A tool's result becomes a block of a user's message; neighbours of that kind share one. Images are left out: a
    grader judges what was said and done.
    """
    out: list[Row] = []
    for message in chat:
        role = message.get("role")
        if role == "tool":
            block = {
                "type": "tool_result",
                "tool_use_id": message.get("tool_call_id") or "",
                "content": list(_texts(message.get("content"))),
                "is_error": False,
            }
            if out and out[-1]["role"] == "user" and any(b["type"] == "tool_result" for b in out[-1]["content"]):
                out[-1]["content"].append(block)
            else:
                out.append({"role": "user", "content": [block]})
            continue
        blocks = list(_texts(message.get("content")))
        row: Row = {"role": "system" if role == "developer" else role, "content": blocks}
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            blocks.append(
                {
                    "type": "tool_use",
                    "id": call.get("id") or "",
                    "name": function.get("name") or "",
                    "input": _arguments(function.get("arguments")),
                }
            )
        if message.get("reasoning_content"):
            row["reasoning_content"] = message["reasoning_content"]
        out.append(row)
    return out


def _texts(content: Any) -> Iterator[Row]:
    """Text blocks of a message's content: a text, or a list of parts."""
    if isinstance(content, str):
        parts: list[Any] = [{"type": "text", "text": content}] if content else []
    else:
        parts = list(content or ())
    for part in parts:
        if isinstance(part, Mapping) and isinstance(part.get("text"), str):
            yield {"type": "text", "text": part["text"]}


def _arguments(given: Any) -> Row:
    """A call's arguments as an object; what is none is kept under `arguments`."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            return {"arguments": given}
    return dict(given) if isinstance(given, Mapping) else {} if given is None else {"arguments": given}


def _json(value: Any) -> bytes:
    # A lone surrogate, which an agent may send, is no UTF-8: it goes as \ud800.
    return json.dumps(value, ensure_ascii=True).encode()
