"""JSON by orjson, and by the standard library where orjson refuses: lone surrogates, numbers of more than 64 bits.

A number that is none (NaN) is read, and written as null: no JSON knows it. A whole number of more than 64 bits that is
read becomes a float, as in every client that reads JSON by doubles.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import orjson

# An escaped one, one in what passes for UTF-8 (as Korean text does too), and any in UTF-16.
_MAY_BE_SURROGATES = (b"\\ud", b"\\uD", b"\xed", b"\x00")
_SURROGATE = re.compile("[\ud800-\udfff]")


def loads(raw: bytes | str) -> Any:
    """Raises `ValueError` for what is no JSON."""
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        return json.loads(raw)


def dumps(value: Any) -> bytes:
    """Compact JSON: UTF-8, or ASCII where a text has no UTF-8."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()


def dumps_each(values: Sequence[Any]) -> list[bytes]:
    """`dumps` of each."""
    try:
        return list(map(orjson.dumps, values))
    except orjson.JSONEncodeError:
        return list(map(dumps, values))


def well_formed(value: Any, raw: bytes) -> Any:
    """A JSON value, which `raw` held, with U+FFFD for every lone surrogate, as JavaScript's own repair has it.

    Harnesses in JavaScript cut a command's output by UTF-16 units, and what is cut in the middle of a character stays
    in their history. vLLM refuses such a text, and answers 500 to such a stop string, which would be retried for ever.
    In an answer it would make the calls table's JSON unreadable for DuckDB.
    """
    if not any(mark in raw for mark in _MAY_BE_SURROGATES):
        return value
    told = json.dumps(value, ensure_ascii=False)
    return json.loads(_SURROGATE.sub("\ufffd", told)) if _SURROGATE.search(told) else value
