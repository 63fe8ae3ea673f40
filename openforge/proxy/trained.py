"""The decision table: which calls are trained under the task's reward.

The main thread and sub-agents are. All else is kept, with the reason why not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from openforge.proxy.side import asks_aside
from openforge.proxy.threads import Call, text_of

# vLLM's stand-in for a log-probability of minus infinity.
_NO_LOGPROB = -9999.0
# Shorter lines of an answer may stand anywhere.
_LINE_LEAST = 16


@dataclass(frozen=True)
class Episode:
    """What a decision looks at beside the call.

    Attributes:
        exited: the harness ended by itself.
        tools: some call has tools.
        heads: for each call that begins a thread its index, and its user and system texts.
    """

    exited: bool
    tools: bool
    heads: list[tuple[int, str]]

    @classmethod
    def of(cls, calls: list[Call], exited: bool) -> Episode:
        heads = [(c.index, _asked(c)) for c in calls if not c.continues]
        return cls(exited, any(c.record["tools"] for c in calls), heads)


Test = Callable[[Call, Episode], bool]


def confirmed(c: Call, episode: Episode) -> bool:
    """The harness has read it: a later prompt holds it, or the body went out whole and the harness then ended."""
    return c.contained or (c.sent and episode.exited)


# ---- side calls --------------------------------------------------------------------------------
def _asked(c: Call) -> str:
    said = [m for m in c.record["messages"] if m.get("role") in ("user", "system")]
    return "\n".join(text_of(m.get("content")) for m in said)


def _quoted(c: Call, episode: Episode) -> bool:
    answer = c.record["response"]
    if c.contained or answer.get("tool_calls"):
        return False
    lines = [line.strip() for line in text_of(answer.get("content")).splitlines()]
    lines = [line for line in lines if len(line) >= _LINE_LEAST]
    whole = sum(map(len, lines))
    # Most of it: a harness takes the summary out of what stands around it.
    return whole > 0 and any(
        2 * sum(len(line) for line in lines if line in text) >= whole for at, text in episode.heads if at > c.index
    )


def _probe(c: Call, episode: Episode) -> bool:
    return c.record["asked"].get("max_tokens") == 1 and not c.continues and not c.contained


#: Calls beside the task: name -> (meaning, test).
SIDE_CALLS: dict[str, tuple[str, Test]] = {
    "no_tools": (
        "no call of its thread has tools and others have: a title, a summary, a look at a page",
        lambda c, e: e.tools and c.bare,
    ),
    "asked_aside": (
        "its last message asks for a summary in a harness's known words (side.py)",
        lambda c, _: asks_aside(c.record["messages"]),
    ),
    "compaction": ("most of what it says stands in the user or system text that a later thread begins with", _quoted),
    "probe": ("one token was asked for, to see whether anybody answers", _probe),
}


# ---- one call ----------------------------------------------------------------------------------
def _count_mismatch(c: Call, _: Episode) -> bool:
    r = c.record
    told = r["usage"].get("prompt_tokens"), r["usage"].get("completion_tokens")
    counted = len(r["prompt_token_ids"]), len(r["response_token_ids"])
    return r["logprobs"] is None or len(r["logprobs"]) != counted[1] or told != counted


def _no_logprob(c: Call, _: Episode) -> bool:
    return any(not math.isfinite(p) or p <= _NO_LOGPROB or p > 0 for p in c.record["logprobs"])


def _forced(c: Call, _: Episode) -> bool:
    choice = c.record["asked"].get("tool_choice")
    return choice == "required" or isinstance(choice, dict)


def _format(c: Call, _: Episode) -> bool:
    given = c.record["asked"].get("response_format") or {}
    return bool(given.get("type", "text") != "text")


def _images(c: Call, _: Episode) -> bool:
    lists = [m["content"] for m in c.record["messages"] if isinstance(m.get("content"), list)]
    parts = [p for parts in lists for p in parts if isinstance(p, dict)]
    return any(p.get("type") not in (None, "text", "refusal") for p in parts)


def _rejected(c: Call, _: Episode) -> bool:
    return c.sent and not c.contained and any(other.contained for other in c.drafts)


#: Why a call is not trained, the first that holds: name -> (meaning, test).
REASONS: dict[str, tuple[str, Test]] = {
    "no_token_ids": (
        "upstream gave no prompt or response ids",
        lambda c, _: not c.has_ids or not c.record["prompt_token_ids"],
    ),
    "foreign_policy": (
        "an endpoint's weights are not ours",
        lambda c, _: c.record["policy_version"].startswith("none@"),
    ),
    "empty": ("nothing was sampled", lambda c, _: not c.ids),
    "count_mismatch": ("ids, logprobs and usage disagree in number", _count_mismatch),
    "no_logprob": ("a sampled token has no usable log-probability", _no_logprob),
    "aborted": ("the generation was cut off by the server", lambda c, _: c.record["finish_reason"] == "abort"),
    "forced_tool": ("a grammar forced a tool call: forced tokens have logprob 0", _forced),
    "forced_format": ("a grammar forced the format", _format),
    "images": ("image tokens are not recorded by this version", _images),
    "duplicate": ("another call has the same prompt and response", lambda c, _: c.duplicate),
    "ambiguous_parent": ("its prompt extends several identical calls", lambda c, _: c.ambiguous),
    "rejected_draft": ("another answer to the same prompt was continued", _rejected),
    "side_call": (
        "a title, summary or probe beside the task (SIDE_CALLS)",
        lambda c, e: any(holds(c, e) for _, holds in SIDE_CALLS.values()),
    ),
    "unconfirmed": ("the harness cannot be shown to have read it", lambda c, e: not confirmed(c, e)),
}


def reason(c: Call, episode: Episode) -> str | None:
    """Why a call is not trained; None where it is."""
    return next((name for name, (_, holds) in REASONS.items() if holds(c, episode)), None)


def markdown() -> str:
    """The part of docs/statuses.md on calls."""
    out = [
        "## Why a call is not trained on",
        "",
        "Rendered from `openforge/proxy/trained.py`. The column `reason` of the table `calls` holds the first of these "
        "that is true of a call; it is NULL where the call may be trained on (`trainable`).",
        "",
        "| reason | meaning |",
        "|---|---|",
        *(f"| {name} | {meaning} |" for name, (meaning, _) in REASONS.items()),
        "",
        "A `side_call` is one of these:",
        "",
        "| kind | meaning |",
        "|---|---|",
        *(f"| {name} | {meaning} |" for name, (meaning, _) in SIDE_CALLS.items()),
        "",
    ]
    return "\n".join(out)
