"""Rows packed as one token trie: a prefix that several rows share is one path of nodes.

A causal model's state at a token depends on nothing but the tokens before it, so two rows with a common
prefix have equal states there and one computation serves both. Attention by ancestor relation and positions
by depth make a forward over the trie equal to one over each row by itself, up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class Trie(NamedTuple):
    """N nodes in depth-first order, for rows of any lengths.

    Attributes:
        token: token id of each node, int64 (N).
        depth: position of each node in its rows, int64 (N).
        end: one past the last node of each node's subtree, int64 (N).
        paths: for each row, in the order given, the node of each of its tokens, int64 (L).
    """

    token: Any
    depth: Any
    end: Any
    paths: list[Any]


def pack(rows: Sequence[Any]) -> Trie:
    """The trie of `rows`, int64 arrays of token ids (L), L >= 1 each.

    Rows are inserted in lexicographic order, which makes insertion order depth-first order: each row shares a
    prefix with the row before it and with no earlier one a longer prefix. Python loops over rows, never over
    tokens.
    """
    order = sorted(range(len(rows)), key=lambda i: rows[i].tolist())
    paths: list[Any] = [None] * len(rows)
    tokens: list[Any] = []
    depths: list[Any] = []
    ends: Any = np.zeros(sum(len(r) for r in rows), np.int64)
    row: Any = np.empty(0, np.int64)
    path: Any = row
    count = 0
    for i in order:
        shared = _common(row, rows[i])
        ends[path[shared:]] = count
        fresh = len(rows[i]) - shared
        row, path = rows[i], np.concatenate([path[:shared], np.arange(count, count + fresh)])
        tokens.append(row[shared:])
        depths.append(np.arange(shared, len(row)))
        paths[i], count = path, count + fresh
    ends[path] = count
    return Trie(np.concatenate(tokens), np.concatenate(depths), ends[:count], paths)


def _common(a: Any, b: Any) -> int:
    """Length of the longest common prefix of two arrays."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n
