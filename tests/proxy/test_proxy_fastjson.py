"""JSON as the standard library reads it, also where orjson refuses."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openforge.proxy.fastjson import dumps, dumps_each, loads

VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
    max_leaves=8,
)


@given(VALUES)
def test_what_is_written_is_what_the_standard_library_reads(value: Any) -> None:
    assert json.dumps(json.loads(dumps(value))) == json.dumps(value)
    assert b"\n" not in dumps(value), "a record is one line"


@pytest.mark.parametrize("value", ["\ud800", 2**64, -(2**63) - 1, {"a": "\udfff"}])
def test_what_orjson_refuses_is_written_all_the_same(value: Any) -> None:
    assert json.loads(dumps(value)) == value
    assert [json.loads(d) for d in dumps_each([1, value])] == [1, value]


def test_numbers_that_are_none() -> None:
    assert math.isnan(loads(b"NaN")) and loads(b'{"a": -Infinity}') == {"a": -math.inf}
    assert dumps({"a": math.nan}) == b'{"a":null}'


@pytest.mark.parametrize("raw", [b"", b"{", b"{'a': 1}", b'"\xff"', b"[1,]"])
def test_what_is_no_json_is_a_value_error(raw: bytes) -> None:
    with pytest.raises(ValueError):
        loads(raw)
