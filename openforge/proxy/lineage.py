"""From an episode's journal records to its rows of the calls table: prefixes, parents, threads, trainability.

Everything rests on token ids as upstream gave them. Nothing is tokenised here, no prefix is assumed, and the
order of arrival decides nothing but names: a parent is found by comparing ids, wherever it stands.
"""

from __future__ import annotations

import hashlib
import json
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from openforge.proxy.calls import Json
from openforge.proxy.side import asks_aside
from openforge.tables import SAMPLING

QUARANTINE = -1
_WIDTH = array("i").itemsize
# vLLM's stand-in for a log-probability of minus infinity.
_NO_LOGPROB = -9999.0


@dataclass
class _Call:
    """A call record and what lineage finds out about it; prompt and full (prompt + response) are id bytes."""

    index: int
    record: Json
    sent: bool
    prompt: bytes
    full: bytes
    ids: list[int]
    parent: int | None = None
    ambiguous: bool = False
    duplicate: bool = False
    rejected: bool = False
    has_child: bool = False
    contained: bool = False
    confirmed: bool = False
    side: bool = False
    thread: int = QUARANTINE

    @cached_property
    def hashes(self) -> list[str]:
        """Digests of the request's messages."""
        return [_hash(m) for m in self.record["messages"]]

    @cached_property
    def response_hash(self) -> str:
        return _hash(self.record["response"])

    @property
    def quarantined(self) -> bool:
        return self.ambiguous or self.duplicate


# ---- what is trained ---------------------------------------------------------------------------
def _no_ids(c: _Call) -> bool:
    return c.record["prompt_token_ids"] is None or c.record["response_token_ids"] is None


def _count_mismatch(c: _Call) -> bool:
    r = c.record
    told = r["usage"].get("prompt_tokens"), r["usage"].get("completion_tokens")
    counted = len(r["prompt_token_ids"]), len(r["response_token_ids"])
    return r["logprobs"] is None or len(r["logprobs"]) != counted[1] or told != counted


def _no_logprob(c: _Call) -> bool:
    return any(not math.isfinite(p) or p <= _NO_LOGPROB or p > 0 for p in c.record["logprobs"])


def _forced(c: _Call) -> bool:
    choice = c.record["asked"].get("tool_choice")
    return choice == "required" or isinstance(choice, dict)


def _format(c: _Call) -> bool:
    given = c.record["asked"].get("response_format") or {}
    return bool(given.get("type", "text") != "text")


def _images(c: _Call) -> bool:
    lists = [m["content"] for m in c.record["messages"] if isinstance(m.get("content"), list)]
    parts = [p for parts in lists for p in parts if isinstance(p, dict)]
    return any(p.get("type") not in (None, "text", "refusal") for p in parts)


#: Why a call is not trained, the first that holds: name -> (meaning, test).
REASONS: dict[str, tuple[str, Callable[[_Call], bool]]] = {
    "no_token_ids": ("upstream gave no prompt or response ids", _no_ids),
    "foreign_policy": ("an endpoint's weights are not ours", lambda c: c.record["policy_version"].startswith("none@")),
    "empty": ("nothing was sampled", lambda c: not c.ids),
    "count_mismatch": ("ids, logprobs and usage disagree in number", _count_mismatch),
    "no_logprob": ("a sampled token has no usable log-probability", _no_logprob),
    "aborted": ("the generation was cut off by the server", lambda c: c.record["finish_reason"] == "abort"),
    "forced_tool": ("a grammar forced a tool call: forced tokens have logprob 0", _forced),
    "forced_format": ("a grammar forced the format", _format),
    "images": ("image tokens are not recorded by this version", _images),
    "duplicate": ("another call has the same prompt and response", lambda c: c.duplicate),
    "ambiguous_parent": ("its prompt extends several identical calls", lambda c: c.ambiguous),
    "rejected_draft": ("another answer to the same prompt was continued", lambda c: c.rejected),
    "side_call": ("a title, summary or probe beside the task", lambda c: c.side),
    "unconfirmed": ("the harness cannot be shown to have read it", lambda c: not c.confirmed),
}


def call_rows(episode_records: Sequence[Json]) -> tuple[list[Json], list[Json]]:
    """Rows of `tables.CALLS` and `tables.BLOBS` of one episode.

    Args:
        episode_records: the journal's records of one episode, in any order (see `journal`).

    Returns:
        The calls by order of arrival, and the blobs (each hash once) that their rows name.
    """
    calls = _calls(episode_records)
    _find_parents(calls)
    _find_contained(calls)
    _judge(calls, harness_exited=any(r.get("harness_exited") is True for r in episode_records))
    _number_threads(calls)
    blobs: dict[str, Json] = {}
    return [_row(calls, c, _storage_prefix(calls, c), blobs) for c in calls], list(blobs.values())


def prompt_ids(rows: Sequence[Mapping[str, Any]], call: int) -> list[int]:
    """The whole prompt of one call, rebuilt from the stored prefixes.

    Args:
        rows: all rows of the episode.
        call: its column `call`.

    Raises:
        KeyError: a row that a prefix names is not among `rows`.
    """
    by_call = {r["call"]: r for r in rows}
    row = by_call[call]
    pieces, need = [list(row["prompt_suffix_ids"])], int(row["prefix_len"])
    at = row["prefix_of"]
    # Walk back along the prefixes: `need` is how much of prompt + response of `at` is still missing.
    while need:
        row = by_call[at]
        start = int(row["prefix_len"])
        own = [*row["prompt_suffix_ids"], *row["response_token_ids"]]
        if need > start:
            pieces.append(own[: need - start])
            need = start
        at = row["prefix_of"]
    return [t for piece in reversed(pieces) for t in piece]


def _calls(records: Sequence[Json]) -> list[_Call]:
    sent = {r["call"] for r in records if r["record"] == "delivery"}
    found = sorted((r for r in records if r["record"] == "call"), key=lambda r: r["call"])
    calls = []
    for i, r in enumerate(found):
        prompt = array("i", r["prompt_token_ids"] or ()).tobytes()
        ids = r["response_token_ids"] or []
        full = prompt + array("i", ids).tobytes()
        calls.append(_Call(i, r, r["call"] in sent, prompt, full, ids))
    return calls


def _find_parents(calls: list[_Call]) -> None:
    able = [c for c in calls if not _no_ids(c) and c.ids]  # an empty generation is nobody's parent
    twins: dict[bytes, list[_Call]] = {}
    for c in able:
        twins.setdefault(c.full, []).append(c)
    candidates = []
    for same in twins.values():
        sent = [c for c in same if c.sent]
        if len(same) > 1 and len(sent) == 1:
            same = sent  # the harness got one of them only
        for c in same:
            c.duplicate = len(same) > 1
        candidates.append(same)
    candidates.sort(key=lambda same: len(same[0].full), reverse=True)
    for c in calls:
        if _no_ids(c):
            continue
        for same in candidates:
            if c.prompt.startswith(same[0].full):
                for parent in same:
                    parent.has_child = True
                if len(same) == 1:
                    c.parent = same[0].index
                else:
                    c.ambiguous = True
                break


def _find_contained(calls: list[_Call]) -> None:
    """A call is contained where another prompt holds it: by ids or, re-tokenised, by parsed messages."""
    for c in calls:
        c.contained = c.has_child or any(_echoes(c, later) for later in calls)
        if c.contained and not c.sent and any(o.sent and _says_the_same(o, c) for o in calls):
            c.contained = c.has_child  # what the harness got is the one that was sent


def _echoes(c: _Call, later: _Call) -> bool:
    """Whether the other's history is this call's history and then its response."""
    history, n = later.record["messages"], len(c.record["messages"])
    return (
        len(history) > n
        and history[n].get("role") == "assistant"
        and later.hashes[n] == c.response_hash
        and later.hashes[:n] == c.hashes
    )


def _says_the_same(a: _Call, b: _Call) -> bool:
    return a.response_hash == b.response_hash and a.hashes == b.hashes


def _judge(calls: list[_Call], harness_exited: bool) -> None:
    tools = any(c.record["tools"] for c in calls)
    prompts: dict[bytes, list[_Call]] = {}
    for c in calls:
        c.confirmed = c.contained or (c.sent and harness_exited)
        alone = tools and not c.record["tools"] and c.parent is None and not c.contained
        c.side = alone or asks_aside(c.record["messages"])
        if not _no_ids(c) and c.ids:
            prompts.setdefault(c.prompt, []).append(c)
    for same in prompts.values():
        if any(c.contained for c in same):
            for c in same:
                c.rejected = c.sent and not c.contained


def _number_threads(calls: list[_Call]) -> None:
    """A thread is a chain of calls that extend one another; at a branch the first to arrive carries it on."""
    continued: set[int] = set()
    threads: dict[int, int] = {}
    # A parent's prompt is shorter than its child's, so parents come first here.
    for c in sorted(calls, key=lambda c: (len(c.prompt), c.index)):
        if c.quarantined:
            continue
        if c.parent in threads and c.parent not in continued:
            continued.add(c.parent)
            threads[c.index] = threads[c.parent]
        else:
            threads[c.index] = c.index
    names = {first: n for n, first in enumerate(dict.fromkeys(threads[i] for i in sorted(threads)))}
    for c in calls:
        c.thread = names[threads[c.index]] if c.index in threads else QUARANTINE


def _storage_prefix(calls: list[_Call], c: _Call) -> tuple[int | None, int]:
    """The earlier call with the longest common prefix, and its length in tokens."""
    best, length = None, 0
    for other in reversed(calls[: c.index]):
        if c.prompt[: length + _WIDTH] == other.full[: length + _WIDTH] and len(c.prompt) > length:
            longer = _common(c.prompt, other.full)
            if longer > length:
                best, length = other.index, longer
    return best, length // _WIDTH


def _common(a: bytes, b: bytes) -> int:
    """Length in bytes of the longest common prefix, a multiple of the width of an id."""
    low, high = 0, min(len(a), len(b)) // _WIDTH
    while low < high:
        middle = (low + high + 1) // 2
        if a[low * _WIDTH : middle * _WIDTH] == b[low * _WIDTH : middle * _WIDTH]:
            low = middle
        else:
            high = middle - 1
    return low * _WIDTH


# ---- rows --------------------------------------------------------------------------------------
def _row(calls: list[_Call], c: _Call, prefix: tuple[int | None, int], blobs: dict[str, Json]) -> Json:
    r, (prefix_of, prefix_len) = c.record, prefix
    reason = next((name for name, (_, holds) in REASONS.items() if holds(c)), None)
    system, messages = split_system(r["messages"])
    if prefix_of is not None:
        before = split_system(calls[prefix_of].record["messages"])[1]
        messages = messages[_shared(before, messages) :]
    tools = _blob(blobs, "application/json", _dump(r["tools"])) if r["tools"] else None
    return {
        "episode_id": r["episode_id"],
        "call": c.index,
        "thread": c.thread,
        "dialect": r["dialect"],
        "model": r["model"],
        "prefix_of": prefix_of,
        "prefix_len": prefix_len,
        "prompt_suffix_ids": (r["prompt_token_ids"] or [])[prefix_len:],
        "prompt_tokens": len(c.prompt) // _WIDTH or _told(r["usage"].get("prompt_tokens")),
        "parent": c.parent,
        "response_token_ids": c.ids,
        "logprobs": r["logprobs"] or [],
        "finish_reason": r["finish_reason"],
        "sampling": {f.name: r["sampling"].get(f.name) for f in SAMPLING},
        "policy_version": r["policy_version"],
        "messages": _dump(messages),
        "response": _dump(r["response"]),
        "tools_sha256": tools,
        "system_sha256": None if system is None else _blob(blobs, "text/plain; charset=utf-8", system),
        "images": [],
        "delivery": "confirmed" if c.confirmed else "sent" if c.sent else "generated",
        "trainable": reason is None,
        "reason": reason,
        "arrived": datetime.fromtimestamp(r["arrived"], UTC),
        "latency": r["latency"],
    }


def _told(count: Any) -> int | None:
    """A count that upstream told; NULL for none, never a guess."""
    return count if isinstance(count, int) and not isinstance(count, bool) else None


def split_system(messages: list[Json]) -> tuple[str | None, list[Json]]:
    """The leading system messages as one text, and the messages after them."""
    n = next((i for i, m in enumerate(messages) if m.get("role") != "system"), len(messages))
    if not n:
        return None, messages
    return "\n\n".join(_text(m.get("content")) for m in messages[:n]), messages[n:]


def _shared(before: list[Json], after: list[Json]) -> int:
    n = 0
    while n < min(len(before), len(after)) and before[n] == after[n]:
        n += 1
    return n


def _blob(blobs: dict[str, Json], mime: str, text: str) -> str:
    data = text.encode(errors="surrogatepass")
    sha256 = hashlib.sha256(data).hexdigest()
    blobs[sha256] = {"sha256": sha256, "mime": mime, "width": None, "height": None, "bytes": data}
    return sha256


def _dump(value: Any) -> str:
    # ASCII: a lone surrogate in a sampled text has no UTF-8, and arrow strings are UTF-8.
    return json.dumps(value, separators=(",", ":"))


# ---- comparing messages by their parsed values -------------------------------------------------
def _hash(message: Json) -> str:
    """Digest of what a message says: harnesses re-serialise arguments, split texts and rename call ids."""
    calls = [t.get("function") or {} for t in message.get("tool_calls") or ()]
    said = [
        message.get("role"),
        _text(message.get("content")).strip(),
        [[f.get("name"), _parsed(f.get("arguments"))] for f in calls],
    ]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(_text(p.get("text", _dump(p)) if isinstance(p, dict) else p) for p in content)
    return "" if content is None else str(content)


def _parsed(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
