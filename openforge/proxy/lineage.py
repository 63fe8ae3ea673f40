"""From an episode's journal records to its rows of the calls table: prefixes, parents, threads, trainability.

Everything rests on token ids as upstream gave them. Nothing is tokenised here, no prefix is assumed, and the
order of arrival decides nothing but names: a parent is found by comparing ids, wherever it stands.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from openforge.proxy import images
from openforge.proxy.calls import Json
from openforge.proxy.threads import Call, relate, text_of
from openforge.proxy.trained import REASONS, Episode, confirmed, reason
from openforge.tables import SAMPLING

__all__ = ["REASONS", "Prompts", "call_rows", "prompt_ids", "split_system", "without_images"]


def call_rows(episode_records: Sequence[Json]) -> tuple[list[Json], list[Json]]:
    """Rows of `tables.CALLS` and `tables.BLOBS` of one episode.

    Args:
        episode_records: the journal's whole records of one episode, in any order (see `journal.read`).

    Returns:
        The calls by order of arrival, and the blobs (each hash once) that their rows name.
    """
    calls = relate(episode_records)
    episode = Episode.of(calls, exited=any(r.get("harness_exited") is True for r in episode_records))
    blobs: dict[str, Json] = {}
    known: dict[int, tuple[Json, list[str]]] = {}  # by the identity of a message: calls share theirs
    return [_row(calls, c, episode, blobs, known) for c in calls], list(blobs.values())


def prompt_ids(rows: Sequence[Mapping[str, Any]], call: int) -> list[int]:
    """The whole prompt of one call, rebuilt from the stored prefixes.

    Args:
        rows: all rows of the episode.
        call: its column `call`.

    Raises:
        KeyError: a row that a prefix names is not among `rows`.
    """
    return Prompts(rows).of(call).tolist()


class Prompts:
    """The prompts of one episode's rows, each rebuilt when asked for; in memory is only what the rows store."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._rows = {int(r["call"]): r for r in rows}
        self._own: dict[int, array[int]] = {}

    def of(self, call: int) -> array[int]:
        """The prompt of a call as array("i"); raises `KeyError` like `prompt_ids`."""
        row = self._rows[call]
        pieces, need = [(call, len(row["prompt_suffix_ids"]))], int(row["prefix_len"])
        at = row["prefix_of"]
        # Walk back along the prefixes: `need` is how much of prompt + response of `at` is still missing.
        while need:
            start = int(self._rows[at]["prefix_len"])
            if need > start:
                pieces.append((at, need - start))
                need = start
            at = self._rows[at]["prefix_of"]
        ids = array("i")
        for at, n in reversed(pieces):
            ids += self._of_own(at)[:n]
        return ids

    def _of_own(self, call: int) -> array[int]:
        """What the row of a call stores: the rest of its prompt, and its response."""
        if (own := self._own.get(call)) is None:
            row = self._rows[call]
            own = self._own[call] = array("i", row["prompt_suffix_ids"])
            own.extend(row["response_token_ids"])
        return own


# ---- rows --------------------------------------------------------------------------------------
def _row(
    calls: list[Call],
    c: Call,
    episode: Episode,
    blobs: dict[str, Json],
    known: dict[int, tuple[Json, list[str]]],
) -> Json:
    r, (prefix_of, prefix_len) = c.record, c.prefix
    why = reason(c, episode)
    system, messages = split_system(r["messages"])
    if prefix_of is not None:
        before = split_system(calls[prefix_of].record["messages"])[1]
        messages = messages[_shared(before, messages) :]
    tools = _blob(blobs, "application/json", _dump(r["tools"])) if r["tools"] else None
    prompt = r["prompt_token_ids"]
    shown = [_stored(m, blobs, known) for m in r["messages"]]
    return {
        "episode_id": r["episode_id"],
        "call": c.index,
        "thread": c.thread,
        "dialect": r["dialect"],
        "model": r["model"],
        "prefix_of": prefix_of,
        "prefix_len": prefix_len,
        "prompt_suffix_ids": [] if prompt is None else list(prompt[prefix_len:]),
        "prompt_tokens": len(prompt) if prompt else _told(r["usage"].get("prompt_tokens")),
        "parent": c.parent,
        "response_token_ids": c.ids,
        "logprobs": r["logprobs"] or [],
        "finish_reason": r["finish_reason"],
        "sampling": {f.name: r["sampling"].get(f.name) for f in SAMPLING},
        "policy_version": r["policy_version"],
        "messages": _dump([m for m, _ in shown[len(shown) - len(messages) :]]),
        "response": _dump(r["response"]),
        "tools_sha256": tools,
        "system_sha256": None if system is None else _blob(blobs, "text/plain; charset=utf-8", system),
        "images": [sha256 for _, found in shown for sha256 in found],
        "delivery": "confirmed" if confirmed(c, episode) else "sent" if c.sent else "generated",
        "trainable": why is None,
        "reason": why,
        "arrived": datetime.fromtimestamp(r["arrived"], UTC),
        "latency": r["latency"],
    }


def _stored(message: Json, blobs: dict[str, Json], known: dict[int, tuple[Json, list[str]]]) -> tuple[Json, list[str]]:
    if (found := known.get(id(message))) is None:
        found = known[id(message)] = images.stored(message, blobs)
    return found


def without_images(messages: Sequence[Json]) -> list[Json]:
    """Messages as the calls table has them: references in place of the images' data."""
    return [images.stored(m, {})[0] for m in messages]


def _told(count: Any) -> int | None:
    """A count that upstream told; NULL for none, never a guess."""
    return count if isinstance(count, int) and not isinstance(count, bool) else None


def split_system(messages: list[Json]) -> tuple[str | None, list[Json]]:
    """The leading system messages as one text, and the messages after them."""
    n = next((i for i, m in enumerate(messages) if m.get("role") != "system"), len(messages))
    if not n:
        return None, messages
    return "\n\n".join(text_of(m.get("content")) for m in messages[:n]), messages[n:]


def _shared(before: list[Json], after: list[Json]) -> int:
    n = 0
    while n < min(len(before), len(after)) and (before[n] is after[n] or before[n] == after[n]):
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
