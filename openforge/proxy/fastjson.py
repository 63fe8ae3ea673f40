"""JSON by orjson, and by the standard library where orjson refuses: lone surrogates, numbers of more than 64 bits.

A number that is none (NaN) is read, and written as null: no JSON knows it. A whole number of more than 64 bits that is
read becomes a float, as in every client that reads JSON by doubles.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import orjson


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
