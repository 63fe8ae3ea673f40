"""How an episode's calls hang together: which prompt extends which call, by ids and by what the messages say.

Ids are compared as bytes. All sequences (prompt + response) sorted, each stands beside those it has most in common
with, so neighbours are compared and nobody else: n log n comparisons, all exact.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any

from openforge.proxy.calls import Json
from openforge.proxy.deltas import common

QUARANTINE = -1
WIDTH = array("i").itemsize


@dataclass(eq=False, slots=True)
class Call:
    """A call record and what is found out about it.

    Attributes:
        full: prompt and response as id bytes; empty once `relate` is done.
        prompt: bytes of `full` that are the prompt.
        ids: what was sampled.
        parent: index of the call whose prompt and response this prompt exactly extends.
        prefix: the earlier call with the longest common prefix, and its length in ids.
        path: the request's messages as nodes of a tree in which calls that say the same share them.
        has_child, contained: another prompt extends it; or another request echoes it, its ids being others.
        continues: it extends or echoes a call; those that do not begin a thread.
        drafts: all calls with its prompt.
        echo: node of its response where another request says it after its messages.
        bare: neither it nor what it extends, or what goes on from it, has tools.
    """

    index: int
    record: Json
    sent: bool
    full: bytes
    prompt: int
    ids: list[int]
    parent: int | None = None
    prefix: tuple[int | None, int] = (None, 0)
    path: list[int] = field(default_factory=list)
    response: bytes = b""
    echo: int | None = None
    drafts: list[Call] = field(default_factory=list)
    ambiguous: bool = False
    duplicate: bool = False
    has_child: bool = False
    contained: bool = False
    continues: bool = False
    bare: bool = False
    thread: int = QUARANTINE

    @property
    def has_ids(self) -> bool:
        return self.record["prompt_token_ids"] is not None and self.record["response_token_ids"] is not None

    @property
    def said(self) -> tuple[int, bytes]:
        """What was asked and answered, the same for calls that say the same."""
        return self.path[-1] if self.path else 0, self.response

    @property
    def quarantined(self) -> bool:
        return self.ambiguous or self.duplicate


def relate(records: Sequence[Json]) -> list[Call]:
    """The calls of an episode by order of arrival, related; whether they are trained is not decided here."""
    sent = {r["call"] for r in records if r["record"] == "delivery"}
    found = sorted((r for r in records if r["record"] == "call"), key=lambda r: r["call"])
    calls = [_call(i, r, r["call"] in sent) for i, r in enumerate(found)]
    _by_ids(calls)
    _drafts(calls)
    for c in calls:
        c.full = b""
    _by_messages(calls)
    _bare(calls)
    _number(calls)
    return calls


def _call(index: int, r: Json, sent: bool) -> Call:
    prompt = r["prompt_token_ids"]
    given = b"" if prompt is None else (prompt if isinstance(prompt, array) else array("i", prompt)).tobytes()
    ids = r["response_token_ids"] or []
    return Call(index, r, sent, given + array("i", ids).tobytes(), len(given), ids)


# ---- by ids ------------------------------------------------------------------------------------
def _by_ids(calls: list[Call]) -> None:
    order = sorted((c for c in calls if c.prompt or c.has_ids), key=lambda c: c.full)
    alike = [common(a.full, b.full) for a, b in pairwise(order)]
    _parents(order, alike)
    _prefixes(calls, order, alike)


def _parents(order: list[Call], alike: list[int]) -> None:
    """In sorted order the sequences that a sequence begins with are those last seen, longer ones later: a stack."""
    stack: list[tuple[int, list[Call]]] = []
    at = 0
    for full, group in groupby(order, key=lambda c: c.full):
        same = list(group)
        while at and stack and stack[-1][0] > alike[at - 1]:
            stack.pop()
        at += len(same)
        if able := _able(same):
            stack.append((len(full), able))
        for c in same:
            if c.has_ids:
                _set_parent(c, next((s for n, s in reversed(stack) if n <= c.prompt), []))


def _able(same: list[Call]) -> list[Call]:
    """Of calls with one and the same sequence those that a prompt may extend: no empty generation."""
    same = [c for c in same if c.has_ids and c.ids]
    sent = [c for c in same if c.sent]
    if len(same) > 1 and len(sent) == 1:
        return sent  # the harness got one of them only
    for c in same:
        c.duplicate = len(same) > 1
    return same


def _set_parent(c: Call, parents: list[Call]) -> None:
    for parent in parents:
        parent.has_child = True
    if len(parents) == 1:
        c.parent = parents[0].index
    c.ambiguous = len(parents) > 1


def _prefixes(calls: list[Call], order: list[Call], alike: list[int]) -> None:
    """Calls leave the sorted list, the latest first: whoever is beside one that leaves is an earlier call."""
    n = len(order)
    left, right, like = list(range(-1, n - 1)), list(range(1, n + 1)), [*alike, 0]
    for at in sorted(range(n), key=lambda i: order[i].index, reverse=True):
        before, after = left[at], right[at]
        with_before, with_after = like[before] if before >= 0 else 0, like[at] if after < n else 0
        nearest, length = (before, with_before) if with_before >= with_after else (after, with_after)
        c = order[at]
        if length := min(length, c.prompt):
            c.prefix = (order[nearest].index, length // WIDTH)
            if c.parent is not None and c.parent < c.index and len(calls[c.parent].full) == length:
                c.prefix = (c.parent, length // WIDTH)
        if before >= 0:
            right[before], like[before] = after, min(with_before, with_after)
        if after < n:
            left[after] = before


def _drafts(calls: list[Call]) -> None:
    """Find the calls that have one and the same prompt; the order is by prompt wherever the whole is."""
    lengths: dict[int, list[Call]] = {}
    for c in calls:
        if c.has_ids and c.ids:
            lengths.setdefault(c.prompt, []).append(c)
    for length, alike in lengths.items():
        if len(alike) > 1:
            prompts: dict[bytes, list[Call]] = {}
            for c in alike:
                prompts.setdefault(c.full[:length], []).append(c)
            for same in prompts.values():
                for c in same:
                    c.drafts = same


# ---- by messages -------------------------------------------------------------------------------
def _by_messages(calls: list[Call]) -> None:
    """A call is contained where another prompt holds it: by ids or, where those differ, by what the messages say."""
    seen: dict[int, bytes] = {}  # by the identity of a message: calls share theirs
    tree: dict[tuple[int, bytes], int] = {}
    for c in calls:
        node = 0
        for m in c.record["messages"]:
            if (said := seen.get(id(m))) is None:
                said = seen[id(m)] = digest(m)
            node = tree.setdefault((node, said), len(tree) + 1)
            c.path.append(node)
        c.response = digest(c.record["response"])
    for c in calls:
        c.echo = tree.get(c.said)
    answered = {c.echo for c in calls}
    sent = {c.said for c in calls if c.sent}
    for c in calls:
        # Of calls that say the same, the harness got the one that was sent.
        c.contained = c.has_child or (c.echo is not None and (c.sent or c.said not in sent))
        c.continues = c.parent is not None or not answered.isdisjoint(c.path)


def _bare(calls: list[Call]) -> None:
    """Tell which threads have no tools at all."""
    tooled = {node for c in calls if c.record["tools"] for node in c.path}
    carried: set[int] = set()
    for c in calls:
        above = c.parent if c.record["tools"] else None
        while above is not None and above not in carried:
            carried.add(above)
            above = calls[above].parent
    # A parent's prompt is shorter than its child's, so parents come first here.
    for c in sorted(calls, key=lambda c: c.prompt):
        toolless = not c.record["tools"] and c.index not in carried and c.echo not in tooled
        c.bare = toolless and (c.parent is None or calls[c.parent].bare)


def digest(message: Json) -> bytes:
    """Of what a message says: harnesses re-serialise arguments, split texts and rename call ids."""
    calls = [t.get("function") or {} for t in message.get("tool_calls") or ()]
    said = [
        message.get("role"),
        text_of(message.get("content")).strip(),
        [[f.get("name"), _parsed(f.get("arguments"))] for f in calls],
    ]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).digest()


def text_of(content: Any) -> str:
    """A message's content as one text; parts that are no text as JSON."""
    if isinstance(content, list):
        return "".join(text_of(p.get("text", json.dumps(p)) if isinstance(p, dict) else p) for p in content)
    return "" if content is None else str(content)


def _parsed(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


# ---- threads -----------------------------------------------------------------------------------
def _number(calls: list[Call]) -> None:
    """A thread is a chain of calls that extend one another; at a branch the first to arrive carries it on."""
    continued: set[int] = set()
    threads: dict[int, int] = {}
    for c in sorted(calls, key=lambda c: (c.prompt, c.index)):
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
