"""Calls stored as what they add: read back they are what was said, and an episode takes what its calls add."""

from __future__ import annotations

import json
import math
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from proxy_rig import SAMPLING, SECRET, Rig, chat
from proxy_stub import template

from openforge.proxy.deltas import LONG, TIPS, Deltas, Whole, common
from openforge.proxy.journal import Journal, JournalError, read, stored, whole

Json = dict[str, Any]
OPEN = {"record": "open", "episode_id": "e", "policy_version": "0@x", "sampling": SAMPLING}


def stored_call(deltas: Deltas, n: int, messages: list[Json], tools: Any, ids: Any, sampled: Any, probs: Any) -> Json:
    fields = deltas.fields(
        n,
        messages,
        tools,
        None if ids is None else array("i", ids),
        None if sampled is None else array("i", sampled),
        probs,
    )
    head = {"record": "call", "episode_id": "e", "call": n, "max_tokens": 5}
    return head | {k: json.loads(v) for k, v in fields.items()}


words = st.text(max_size=6)
ids = st.lists(st.integers(0, 2**31 - 1), max_size=4)
CONTENT = st.one_of(
    words, st.just("\ud800"), st.just("x" * (LONG + 1)), st.lists(st.builds(lambda t: {"text": t}, words))
)
TOOLS = st.sampled_from([None, [], [{"name": "a"}], [{"name": "b", "n": 1}], [{"name": "b", "n": True}]])


@st.composite
def conversations(draw: st.DrawFn) -> list[tuple[list[Json], Any, Any, Any, Any]]:
    """Requests that extend, cut or rewrite earlier ones, in messages and in ids each in its own way."""
    made: list[tuple[list[Json], Any, Any, Any, Any]] = [([], None, [], [], [])]
    for _ in range(draw(st.integers(1, 2 * TIPS))):
        before = draw(st.sampled_from(made))
        kept = draw(st.integers(0, len(before[0])))
        more = draw(st.lists(st.builds(lambda c: {"role": "user", "content": c}, CONTENT), min_size=1, max_size=3))
        full = [*(before[2] or ()), *(before[3] or ())]
        rewritten = [*full[: draw(st.integers(0, 9))], *draw(ids)]
        prompt = draw(st.sampled_from([None, full, rewritten]))
        sampled = draw(st.one_of(st.none(), ids))
        probs = draw(st.one_of(st.none(), st.lists(st.floats(), max_size=3)))
        made.append(([*before[0][:kept], *more], draw(TOOLS), prompt, sampled, probs))
    return made[1:]


@given(conversations())
@settings(max_examples=150, deadline=None)
def test_calls_read_back_are_the_calls(calls: list[tuple[list[Json], Any, Any, Any, Any]]) -> None:
    deltas, made = Deltas(), Whole()
    made.add(OPEN)
    for n, (messages, tools, prompt, sampled, probs) in enumerate(calls):
        got = made.add(stored_call(deltas, n, messages, tools, prompt, sampled, probs))
        assert (got["policy_version"], got["sampling"]) == ("0@x", SAMPLING | {"max_tokens": 5})
        # As JSON: 1 and True are equal in Python.
        assert json.dumps([got["messages"], got["tools"]]) == json.dumps([messages, tools])
        assert (None if got["prompt_token_ids"] is None else list(got["prompt_token_ids"])) == prompt
        assert got["response_token_ids"] == sampled
        # Bit for bit, NaN and infinities too.
        assert repr(got["logprobs"]) == repr(probs)
        assert not {"prompt", "response_ids", "max_tokens"} & got.keys()


@given(st.lists(st.integers(0, 1), max_size=300), st.lists(st.integers(0, 1), max_size=9), st.integers(0, 300))
def test_the_common_prefix_is_what_one_id_at_a_time_finds(a: list[int], tail: list[int], cut: int) -> None:
    b = [*a[:cut], *tail]
    n = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common(array("i", a).tobytes(), array("i", b).tobytes()) == 4 * n


def test_an_episode_takes_what_its_calls_add(tmp_path: Path) -> None:
    """40 turns whose prompts grow to 4,000 tokens and 16 KB: whole they would be some 800 KB of ids and texts."""
    journal, deltas = Journal(tmp_path), Deltas()
    journal.append(OPEN)
    messages, prompt = [{"role": "system", "content": "s" * 400}], list(range(100))
    whole_bytes = 0
    for n in range(40):
        messages.append({"role": "user", "content": "u" * 400})
        fields = deltas.fields(
            n, messages, [{"name": "t" * 500}], array("i", prompt), array("i", [7] * 50), [-0.5] * 50
        )
        journal.append({"record": "call", "episode_id": "e", "call": n, "max_tokens": 5}, fields)
        whole_bytes += len(json.dumps(messages)) + 4 * len(prompt)
        prompt += [7] * 50 + [9] * 50
    size = journal.path.stat().st_size
    # A call: 400 bytes of text, 50 new prompt ids and 50 sampled ones of 4 bytes, 50 floats of 4, as base64, and keys.
    assert size < 40 * (400 + 3 * 200 * 4 / 3 + 400) + 1500 < whole_bytes / 8
    last = read(tmp_path)[-1]
    assert (list(last["prompt_token_ids"]), last["messages"]) == (prompt[:-100], messages)
    journal.close()


def test_four_agents_taking_turns_are_each_stored_once() -> None:
    deltas, sizes = Deltas(), []
    for turn in range(6):
        for agent in range(4):
            said = [{"role": "user", "content": f"{agent} {t} " + "x" * 200} for t in range(turn + 1)]
            fields = deltas.fields(4 * turn + agent, said, None, array("i", [agent] * 50 * (turn + 1)), array("i"), [])
            sizes.append(len(fields["messages"]) + len(fields["prompt"]))
    assert max(sizes) < 600


def test_a_session_keeps_no_screenshot_in_memory() -> None:
    deltas = Deltas()
    shot = {"role": "user", "content": "data:image/png;base64," + "A" * 10**6}
    first = deltas.fields(0, [shot], None, None, None, None)
    again = deltas.fields(1, [shot, {"role": "user", "content": "x"}], None, None, None, None)
    assert len(first["messages"]) > 10**6 > 200 > len(again["messages"])
    assert sum(len(m) for tip in deltas._tips for m in tip.messages) < 200


@pytest.mark.parametrize(("value", "code"), [(-0.5, "f"), (-0.10000000149011612, "f"), (-0.1, "d"), (math.nan, "d")])
def test_logprobs_take_four_bytes_where_none_is_lost(value: float, code: str) -> None:
    """0.10000000149011612 is the float32 nearest to 0.1."""
    assert list(json.loads(Deltas().fields(0, [], None, None, None, [value])["logprobs"])) == [code]


# ---- damage ------------------------------------------------------------------------------------
def altered(folder: Path, was: bytes, now: bytes) -> None:
    (file,) = folder.glob("*.jsonl")
    text = file.read_bytes()
    assert text.count(was) == 1, text
    file.write_bytes(text.replace(was, now))


@pytest.mark.parametrize(
    ("was", "now"),
    [
        (b'"prompt":{"of":0,"n":2', b'"prompt":{"of":5,"n":2'),
        (b'"prompt":{"of":0,"n":2', b'"prompt":{"of":0,"n":9'),
        (b'"messages":{"of":0,', b'"messages":{"of":7,'),
        (b'"n":2,"ids":""', b'"n":2,"ids":"A"'),
        (b'"tools":{"of":0}', b'"tools":{"of":3}'),
        (b'"record":"open"', b'"record":"gone"'),
    ],
)
def test_a_call_that_stands_on_nothing_is_one_sentence(tmp_path: Path, was: bytes, now: bytes) -> None:
    journal, deltas = Journal(tmp_path), Deltas()
    journal.append(OPEN)
    said = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    for n in range(2):
        fields = deltas.fields(n, said[: n + 1], [{}], array("i", [1, 2, 3][: n + 1]), array("i", [2]), [-1.0])
        journal.append({"record": "call", "episode_id": "e", "call": n, "max_tokens": 5}, fields)
    journal.close()
    assert [r["record"] for r in read(tmp_path)] == ["open", "call", "call"]
    altered(tmp_path, was, now)
    with pytest.raises(JournalError, match=r"jsonl, record \d \(call \d of episode e\) cannot be made whole"):
        read(tmp_path)
    with pytest.raises(JournalError, match=r"the journal, record \d \(call \d of episode e\) cannot be made whole"):
        whole(stored(tmp_path)["e"])


# ---- through the proxy -------------------------------------------------------------------------
async def test_turns_through_the_proxy_are_stored_as_what_they_add(rig: Rig) -> None:
    rig.stub.says("ls", "done")
    rig.session()
    tools = [{"type": "function", "function": {"name": "bash", "parameters": {}}}]
    await rig.ask(chat("task", tools=tools))
    await rig.ask(chat("task", "ls", "a.txt", tools=tools))
    lines = [json.loads(line) for line in rig.journal.path.read_text().splitlines()]
    first, second = (r for r in lines if r["record"] == "call")
    opening = template([{"role": "user", "content": "task"}])
    assert (first["messages"]["of"], first["prompt"]["n"], second["tools"]) == (None, 0, {"of": 0})
    assert (second["messages"]["of"], second["messages"]["n"], len(second["messages"]["more"])) == (0, 1, 2)
    assert (second["prompt"]["of"], second["prompt"]["n"]) == (0, len(opening) + 3)
    one, two = rig.records("call")
    assert two["prompt_token_ids"].tolist() == template(two["messages"])
    assert two["messages"][0] is one["messages"][0], "what calls share is in memory once"


async def test_a_session_keeps_few_answers_for_resends(rig: Rig) -> None:
    session = rig.session()
    for n in range(40):
        assert (await rig.ask(chat(str(n))))[0] == 200
    assert len(session._latest) == 32
    again = {"x-stainless-retry-count": "1"}
    # The latest is found again; one that nobody can still be waiting for is a call anew.
    await rig.ask(chat("39"), again)
    assert len(rig.stub.bodies) == 40
    await rig.ask(chat("0"), again)
    assert len(rig.stub.bodies) == 41
    assert SECRET not in repr(session.config)
