"""A call as what it adds to an earlier call of its session: the form in which the journal holds it.

An agent sends its whole history with every call. Written whole, an episode of n calls takes n^2 / 2 turns on disk; as
what each call adds, n. In a call's stored record

- `messages` is {"of": call, "n": how many of its messages come first, "more": the rest},
- `tools` is {"of": call that has the same} or {"is": tools},
- `prompt` is {"of": call, "n": how many ids of its prompt and response come first, "ids": the rest}, or null,
- `response_ids` are ids, or null; `logprobs` is {"f": float32} or {"d": float64}, or null,
- what the session was opened with (policy version, sampling) is left out.

Ids and floats are base64 of the machine's int32, float32 (where no bit is lost) or float64.
"""

from __future__ import annotations

import hashlib
from array import array
from binascii import a2b_base64, b2a_base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openforge.proxy.calls import Json
from openforge.proxy.fastjson import dumps, dumps_each

# Calls that a session remembers: one for each agent that takes part, and some for those beside.
TIPS = 8
TOOLS = 16
# Longer ones, which hold images, are remembered by their hash: a session must not keep screenshots in memory.
LONG = 1 << 16
_WIDTH = array("i").itemsize


# ---- writing -----------------------------------------------------------------------------------
@dataclass(slots=True)
class _Tip:
    """A call that a later one may extend: its messages as JSON or hash, its prompt and response as id bytes."""

    call: int
    messages: list[bytes]
    full: bytes


class Deltas:
    """What a session keeps in memory of its calls, to tell what the next one adds: the tips of its threads."""

    def __init__(self) -> None:
        self._tips: list[_Tip] = []
        self._tools: dict[bytes, int] = {}

    def fields(
        self,
        call: int,
        messages: Sequence[Json],
        tools: Sequence[Json] | None,
        prompt: array[int] | None,
        response: array[int] | None,
        logprobs: list[float] | None,
    ) -> dict[str, bytes]:
        """The stored fields of a call, each as JSON."""
        texts = dumps_each(messages)
        keys = [t if len(t) < LONG else hashlib.sha256(t).digest() for t in texts]
        ids = b"" if prompt is None else prompt.tobytes()
        sampled = b"" if response is None else response.tobytes()
        tip, n = self._nearest(keys)
        length = 0
        if tip is not None:
            # The memory of the part that both have is shared.
            keys[:n] = tip.messages[:n]
            length = common(ids, tip.full)
            if n == len(tip.messages):
                self._tips.remove(tip)
        self._tips.append(_Tip(call, keys, b"" if prompt is None else ids + sampled))
        del self._tips[:-TIPS]
        of = None if tip is None else tip.call
        told = {"of": of if length else None, "n": length // _WIDTH, "ids": _packed(ids[length:])}
        return {
            "messages": b'{"of":%b,"n":%d,"more":[%b]}' % (dumps(of), n, b",".join(texts[n:])),
            "tools": self._same_tools(call, tools),
            "prompt": b"null" if prompt is None else dumps(told),
            "response_ids": b"null" if response is None else dumps(_packed(sampled)),
            "logprobs": b"null" if logprobs is None else dumps(_floats(logprobs)),
        }

    def _nearest(self, keys: list[bytes]) -> tuple[_Tip | None, int]:
        """The tip that has most messages in common with these, the latest of several, and how many."""
        best, most = None, 0
        for tip in reversed(self._tips):
            if most < len(tip.messages) and tip.messages[: most + 1] == keys[: most + 1]:
                best, most = tip, _shared(tip.messages, keys)
        return best, most

    def _same_tools(self, call: int, tools: Sequence[Json] | None) -> bytes:
        if tools is None:
            return b"null"
        text = dumps(tools)
        if (first := self._tools.get(text)) is not None:
            return b'{"of":%d}' % first
        if len(self._tools) < TOOLS:
            self._tools[text] = call
        return b'{"is":%b}' % text


def common(a: bytes, b: bytes) -> int:
    """Length in bytes of the longest common prefix of two strings of ids, a multiple of the width of an id."""
    most = min(len(a), len(b))
    if a[:most] == b[:most]:
        return most
    # Steps that double until one differs, then halve: no more is copied than a few times the answer.
    low, step = 0, 64 * _WIDTH
    while a[low : low + step] == b[low : low + step]:
        low += step
        step *= 2
    while step > _WIDTH:
        step //= 2
        if a[low : low + step] == b[low : low + step]:
            low += step
    return low


def _shared(a: list[bytes], b: list[bytes]) -> int:
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


def _packed(data: bytes) -> str:
    return b2a_base64(data, newline=False).decode()


def _floats(values: list[float]) -> dict[str, str]:
    try:
        short = array("f", values)
        if short.tolist() == values:
            return {"f": _packed(short.tobytes())}
    except OverflowError:
        pass
    return {"d": _packed(array("d", values).tobytes())}


# ---- reading -----------------------------------------------------------------------------------
class Whole:
    """Whole records from stored ones, in the order in which they were written.

    Messages that calls have in common are the same objects, so an episode's records take the memory of what each adds
    and of its prompt ids.
    """

    def __init__(self) -> None:
        self._opened: dict[str, Json] = {}
        self._calls: dict[tuple[str, int], Json] = {}

    def add(self, record: Json) -> Json:
        """The whole form of the next record: a call's prompt_token_ids as array("i"), the rest as `Session` has it.

        Raises:
            ValueError, KeyError, TypeError: it stands on a record that was not added, or its fields are damaged.
        """
        if record["record"] == "open":
            self._opened[record["episode_id"]] = record
        if record["record"] != "call" or "prompt" not in record:
            return record
        self._calls[record["episode_id"], record["call"]] = made = self._whole(record)
        return made

    def _whole(self, r: Json) -> Json:
        opened = self._opened[r["episode_id"]]
        kept = {k: v for k, v in r.items() if k not in ("prompt", "response_ids", "max_tokens")}
        return kept | {
            "policy_version": opened["policy_version"],
            "sampling": {**opened["sampling"], "max_tokens": r["max_tokens"]},
            "messages": self._messages(r),
            "tools": self._tools(r),
            "prompt_token_ids": self._prompt(r),
            "response_token_ids": None if r["response_ids"] is None else _unpacked("i", r["response_ids"]).tolist(),
            "logprobs": None if r["logprobs"] is None else _logprobs(r["logprobs"]),
        }

    def _of(self, r: Json, part: Mapping[str, Any]) -> Json:
        return self._calls[r["episode_id"], part["of"]]

    def _messages(self, r: Json) -> list[Json]:
        part = r["messages"]
        if part["of"] is None:
            return list(part["more"])
        return [*self._of(r, part)["messages"][: part["n"]], *part["more"]]

    def _tools(self, r: Json) -> Any:
        part = r["tools"]
        if part is None or "is" in part:
            return part and part["is"]
        return self._of(r, part)["tools"]

    def _prompt(self, r: Json) -> array[int] | None:
        part = r["prompt"]
        if part is None:
            return None
        own = _unpacked("i", part["ids"])
        if part["of"] is None:
            return own
        before = self._of(r, part)
        ids: array[int] = before["prompt_token_ids"][: part["n"]]
        ids.extend((before["response_token_ids"] or [])[: part["n"] - len(ids)])
        if len(ids) != part["n"]:
            raise ValueError(f"call {part['of']} has fewer than {part['n']} ids")
        return ids + own


def _unpacked(code: str, text: str) -> array[Any]:
    values: array[Any] = array(code)
    values.frombytes(a2b_base64(text, strict_mode=True))
    return values


def _logprobs(given: Mapping[str, str]) -> list[float]:
    ((code, text),) = given.items()
    return list(_unpacked(code, text))
