"""Lineage: stored prompts rebuild exactly, parents match a brute-force oracle, what is uncertain is not trained."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from proxy_rig import SAMPLING

from openforge.proxy.lineage import REASONS, call_rows, prompt_ids
from openforge.samples.merge import merge
from openforge.tables import BLOBS, CALLS

Json = dict[str, Any]


def call(n: int, prompt: list[int] | None, sampled: list[int] | None, **changed: Any) -> Json:
    """A journal record as the proxy writes it; messages are unique unless given."""
    return {
        "record": "call",
        "episode_id": "e1",
        "call": n,
        "dialect": "chat",
        "model": "m",
        "arrived": 1.7e9 + n,
        "latency": 0.1,
        "policy_version": "0@x",
        "sampling": SAMPLING,
        "asked": {"max_tokens": None, "stream": False},
        "retry": 0,
        "body_sha256": str(n),
        "messages": [{"role": "user", "content": f"call {n}"}],
        "tools": None,
        "response": {"role": "assistant", "content": f"answer {n}"},
        "finish_reason": "stop",
        "usage": {"prompt_tokens": len(prompt or ()), "completion_tokens": len(sampled or ())},
        "prompt_token_ids": prompt,
        "response_token_ids": sampled,
        "logprobs": None if sampled is None else [-0.5 - i for i in range(len(sampled))],
    } | changed


def episode(*calls: Json, exited: bool = True, unsent: tuple[int, ...] = ()) -> list[Json]:
    sent = [
        {"record": "delivery", "episode_id": "e1", "call": c["call"], "state": "sent"}
        for c in calls
        if c["call"] not in unsent
    ]
    return [*calls, *sent, {"record": "close", "episode_id": "e1", "harness_exited": exited}]


def rows_of(*calls: Json, **how: Any) -> list[Json]:
    return call_rows(episode(*calls, **how))[0]


def reasons(*calls: Json, **how: Any) -> list[str | None]:
    rows = rows_of(*calls, **how)
    assert all(r["trainable"] == (r["reason"] is None) for r in rows)
    return [r["reason"] for r in rows]


ids = st.lists(st.integers(0, 1), max_size=5)


@st.composite
def rewritten_histories(draw: st.DrawFn) -> list[Json]:
    """Calls whose prompts extend, cut, rewrite or repeat earlier ones, in any arrival order."""
    full: list[list[int]] = [[]]
    made = []
    for _ in range(draw(st.integers(1, 9))):
        base = draw(st.sampled_from(full))
        cut = draw(st.one_of(st.just(len(base)), st.integers(0, len(base))))
        prompt, response = [*base[:cut], *draw(ids)], draw(ids)
        made.append((prompt, response))
        full.append(prompt + response)
    order = draw(st.permutations(made))
    return [call(n, p, r) for n, (p, r) in enumerate(order)]


@given(rewritten_histories(), st.data())
@settings(max_examples=120, deadline=None)
def test_any_history(calls: list[Json], data: st.DataObject) -> None:
    records = data.draw(st.permutations(episode(*calls)))
    rows, blobs = call_rows(records)
    CALLS.arrow(rows), BLOBS.arrow(blobs)
    fulls = [c["prompt_token_ids"] + c["response_token_ids"] for c in calls]
    count = Counter(tuple(f) for f, c in zip(fulls, calls, strict=True) if c["response_token_ids"])
    for c, row in zip(calls, rows, strict=True):
        prompt = c["prompt_token_ids"]
        assert prompt_ids(rows, row["call"]) == prompt
        assert (row["response_token_ids"], row["logprobs"]) == (c["response_token_ids"], c["logprobs"])
        # Storage: the longest common prefix with any earlier call, found one token at a time.
        common = [
            next((i for i, (a, b) in enumerate(zip(prompt, f, strict=False)) if a != b), min(len(prompt), len(f)))
            for f in fulls[: row["call"]]
        ]
        assert row["prefix_len"] == max(common, default=0)
        # Parent: the longest sequence that this prompt starts with, unless several calls are that sequence.
        heads = [f for f in count if prompt[: len(f)] == list(f)]
        best = max(heads, key=len, default=None)
        twin = bool(c["response_token_ids"]) and count[tuple(fulls[row["call"]])] > 1
        ambiguous = best is not None and count[best] > 1
        if best is None or ambiguous:
            assert row["parent"] is None
        else:
            assert fulls[row["parent"]] == list(best) and calls[row["parent"]]["response_token_ids"]
        assert (row["thread"] == -1) == (twin or ambiguous)
        if twin or ambiguous or not c["response_token_ids"]:
            assert not row["trainable"]
    _threads_are_chains(rows)


@given(rewritten_histories())
@settings(max_examples=120, deadline=None)
def test_any_history_merges_without_loss(calls: list[Json]) -> None:
    """Every trainable call's (id, logprob) pairs stand in exactly one row, at their place in its exact history."""
    calls = [{**c, "logprobs": [-(i + 1) / 64 - c["call"] for i in range(len(c["logprobs"]))]} for c in calls]
    rows = rows_of(*calls)
    merged, dropped = merge(rows)
    trained = [c for c, r in zip(calls, rows, strict=True) if r["trainable"]]
    assert sorted(n for m in merged for n in m.calls) == [c["call"] for c in trained]
    assert dropped == Counter(r["reason"] for r in rows if r["reason"])
    for m in merged:
        whole = m.token_ids.tolist()
        spans = []
        for c in (calls[n] for n in m.calls):
            prompt, sampled = c["prompt_token_ids"], c["response_token_ids"]
            assert whole[: len(prompt) + len(sampled)] == prompt + sampled
            at = slice(len(prompt), len(prompt) + len(sampled))
            assert (m.logprobs[at], m.loss_mask[at]) == (c["logprobs"], [1] * len(sampled))
            spans += range(at.start, at.stop)
        assert len(spans) == len(set(spans)) == m.trained_tokens
        assert len(whole) == len(m.loss_mask) == len(m.logprobs)
        assert all(p == 0 for p, x in zip(m.logprobs, m.loss_mask, strict=True) if not x)


@given(rewritten_histories(), st.randoms())
@settings(max_examples=60, deadline=None)
def test_the_order_of_arrival_decides_nothing_but_names(calls: list[Json], random: Any) -> None:
    """Who extends whom, and why a call is not trained, is the same in any order."""
    order = list(range(len(calls)))
    random.shuffle(order)
    again = rows_of(*[{**calls[was], "call": now} for now, was in enumerate(order)])
    rows = rows_of(*calls)
    for now, was in enumerate(order):
        parent = again[now]["parent"]
        assert again[now]["reason"] == rows[was]["reason"]
        assert (None if parent is None else order[parent]) == rows[was]["parent"]


def test_thousands_of_calls_that_share_a_long_prefix_are_related() -> None:
    """All pairs compared would be 2 million comparisons of 4,000 ids."""
    shared = list(range(4000))
    rows = rows_of(*[call(n, [*shared, n], [5]) for n in range(2000)])
    assert {r["prefix_len"] for r in rows[1:]} == {4000} and rows[0]["prefix_len"] == 0
    assert all(r["parent"] is None and r["trainable"] for r in rows)


def _threads_are_chains(rows: list[Json]) -> None:
    """Within a thread every call but one extends another call of it, and none is extended twice."""
    threads = {r["thread"] for r in rows} - {-1}
    assert threads == set(range(len(threads)))
    for t in threads:
        members = {r["call"]: r["parent"] for r in rows if r["thread"] == t}
        inner = [p for p in members.values() if p in members]
        assert len(inner) == len(members) - 1 == len(set(inner))


@given(st.permutations([(agent, turn) for agent in range(4) for turn in range(5)]))
@settings(max_examples=30, deadline=None)
def test_four_interleaved_agents_are_four_threads(order: list[tuple[int, int]]) -> None:
    def prompt(agent: int, turn: int) -> list[int]:
        return [1, 2, 3, 10 + agent] + [t for k in range(turn) for t in (20 + agent, 30 + k)]

    rows = rows_of(*[call(n, prompt(a, t), [20 + a]) for n, (a, t) in enumerate(order)])
    thread = {at: row["thread"] for at, row in zip(order, rows, strict=True)}
    assert len({*thread.values()}) == 4
    assert all(thread[a, t] == thread[a, 0] for a, t in order)
    for at, row in zip(order, rows, strict=True):
        assert row["parent"] == (order.index((at[0], at[1] - 1)) if at[1] else None)
    assert all(r["trainable"] for r in rows)


def test_storage_of_an_append_only_episode_is_linear() -> None:
    calls, prompt = [], list(range(100))
    for n in range(50):
        calls.append(call(n, prompt, [n, n]))
        prompt = [*prompt, n, n, 7, 8, 9]
    rows = rows_of(*calls)
    assert sum(len(r["prompt_suffix_ids"]) for r in rows) == 100 + 49 * 3
    assert {r["thread"] for r in rows} == {0}


def test_template_that_drops_thoughts_breaks_the_chain_and_alters_nothing() -> None:
    """Faults 1: a template drops <think> (90, 91) of all but the last turn."""
    calls = [call(0, [1], [90, 91, 2]), call(1, [1, 2, 3], [90, 91, 4]), call(2, [1, 2, 3, 4, 5], [90, 91, 6])]
    rows = rows_of(*calls)
    assert [(r["parent"], r["thread"]) for r in rows] == [(None, 0), (None, 1), (None, 2)]
    assert [prompt_ids(rows, n) for n in range(3)] == [c["prompt_token_ids"] for c in calls]
    assert all(r["trainable"] and r["logprobs"] == [-0.5, -1.5, -2.5] for r in rows)


def test_branch_goes_on_in_the_first_to_arrive() -> None:
    rows = rows_of(call(0, [1], [2]), call(1, [1, 2, 3], [4]), call(2, [1, 2, 5], [6]), call(3, [1, 2, 3, 4], [7]))
    assert [(r["parent"], r["thread"]) for r in rows] == [(None, 0), (0, 0), (0, 1), (1, 0)]


def test_failed_calls_leave_no_gap_in_the_numbers() -> None:
    failed = {"record": "failure", "episode_id": "e1", "call": 1, "reason": "boom"}
    rows = call_rows([*episode(call(0, [1], [2]), call(2, [1, 2, 3], [4])), failed])[0]
    assert [(r["call"], r["parent"]) for r in rows] == [(0, None), (1, 0)]


# ---- what is trained ---------------------------------------------------------------------------
TOOL = [{"type": "function", "function": {"name": "bash", "parameters": {}}}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"finish_reason": "length"}, None),
        ({"asked": {"tool_choice": "auto", "response_format": {"type": "text"}}}, None),
        ({"prompt_token_ids": None}, "no_token_ids"),
        ({"prompt_token_ids": [], "usage": {"prompt_tokens": 0, "completion_tokens": 2}}, "no_token_ids"),
        ({"response_token_ids": None}, "no_token_ids"),
        ({"policy_version": "none@http://h/v1"}, "foreign_policy"),
        ({"response_token_ids": [], "logprobs": []}, "empty"),
        ({"response_token_ids": [5]}, "count_mismatch"),
        ({"prompt_token_ids": [1]}, "count_mismatch"),
        ({"usage": {}}, "count_mismatch"),
        ({"logprobs": None}, "count_mismatch"),
        ({"logprobs": [-1.0]}, "count_mismatch"),
        ({"logprobs": [-1.0, -9999.0]}, "no_logprob"),
        ({"logprobs": [-1.0, float("nan")]}, "no_logprob"),
        ({"finish_reason": "abort"}, "aborted"),
        ({"finish_reason": "error"}, "unknown_finish"),
        ({"finish_reason": None}, "unknown_finish"),
        ({"asked": {"tool_choice": "required"}}, "forced_tool"),
        ({"asked": {"tool_choice": {"type": "function"}}}, "forced_tool"),
        ({"asked": {"response_format": {"type": "json_object"}}}, "forced_format"),
        ({"messages": IMAGE}, "images"),
    ],
)
def test_reason_of_one_call(changed: Json, reason: str | None) -> None:
    assert reasons(call(0, [1, 2], [5, 6], **changed)) == [reason]


def test_every_reason_is_tested_here() -> None:
    tested = {m.args[1][i][1] for m in test_reason_of_one_call.pytestmark for i in range(len(m.args[1]))}
    several = {"duplicate", "ambiguous_parent", "rejected_draft", "side_call", "unconfirmed"}
    assert (tested | several) - {None} == set(REASONS)


def test_identical_calls_and_what_extends_them_are_quarantined() -> None:
    rows = rows_of(call(0, [1], [2]), call(1, [1], [2]), call(2, [1, 2, 3], [4]), call(3, [1, 2, 3, 4, 5], [6]))
    assert [r["reason"] for r in rows] == ["duplicate", "duplicate", "ambiguous_parent", None]
    assert [r["thread"] for r in rows] == [-1, -1, -1, 0]
    assert [r["parent"] for r in rows] == [None, None, None, 2]


def test_of_two_identical_calls_the_one_sent_counts() -> None:
    rows = rows_of(call(0, [1], [2]), call(1, [1], [2]), call(2, [1, 2, 3], [4]), unsent=(0,))
    assert [r["reason"] for r in rows] == ["unconfirmed", None, None]
    assert [r["parent"] for r in rows] == [None, None, 1]


def test_empty_generation_is_not_the_parent_of_its_retry() -> None:
    rows = rows_of(call(0, [1, 2], []), call(1, [1, 2], [3]), call(2, [1, 2, 3, 4], [5]))
    assert [(r["parent"], r["reason"]) for r in rows] == [(None, "empty"), (None, None), (1, None)]


def test_rejected_draft() -> None:
    rows = rows_of(call(0, [1, 2], [3]), call(1, [1, 2], [4]), call(2, [1, 2, 4, 5], [6]))
    assert [r["reason"] for r in rows] == ["rejected_draft", None, None]


def test_side_call_is_kept_and_not_trained() -> None:
    title = call(1, [9, 9], [8])
    rows = rows_of(call(0, [1], [2], tools=TOOL), title, call(2, [1, 2, 3], [4], tools=TOOL))
    assert [r["reason"] for r in rows] == [None, "side_call", None]
    assert prompt_ids(rows, 1) == [9, 9]


def test_without_tools_anywhere_no_call_is_a_side_call() -> None:
    assert reasons(call(0, [1], [2]), call(1, [9], [8])) == [None, None]


def test_delivery_by_the_rule() -> None:
    turns = call(0, [1], [2]), call(1, [1, 2, 3], [4])
    assert [r["delivery"] for r in rows_of(*turns, exited=True)] == ["confirmed", "confirmed"]
    assert [r["delivery"] for r in rows_of(*turns, exited=False)] == ["confirmed", "sent"]
    assert [r["delivery"] for r in rows_of(*turns, exited=True, unsent=(1,))] == ["confirmed", "generated"]
    # An answer that a later prompt holds has arrived, whatever the proxy saw of its connection.
    assert [r["delivery"] for r in rows_of(*turns, exited=False, unsent=(0, 1))] == ["confirmed", "generated"]
    killed = [r for r in episode(*turns) if r["record"] != "close"]
    assert [r["reason"] for r in call_rows(killed)[0]] == [None, "unconfirmed"]


def test_echo_that_was_tokenised_anew_confirms_by_its_parsed_values() -> None:
    """Ids differ, and the harness re-serialised the arguments, split the text and renamed the call."""
    user = {"role": "user", "content": "go"}
    function = {"name": "bash", "arguments": '{"command":"ls","n":1}'}
    said = {
        "role": "assistant",
        "content": "I look",
        "tool_calls": [{"id": "a", "type": "function", "function": function}],
    }
    respelled = {"name": "bash", "arguments": '{"n": 1, "command": "ls"}'}
    echo = {
        "role": "assistant",
        "content": [{"type": "text", "text": "I look"}],
        "tool_calls": [{"id": "b", "type": "function", "function": respelled}],
    }
    first = call(0, [1], [2, 3], messages=[user], response=said)
    tool = {"role": "tool", "content": "x", "tool_call_id": "b"}
    later = call(1, [1, 7, 8], [4], messages=[user, echo, tool])
    assert [r["delivery"] for r in rows_of(first, later, exited=False)] == ["confirmed", "sent"]
    respelled["arguments"] = '{"n": 2, "command": "ls"}'
    assert [r["delivery"] for r in rows_of(first, later, exited=False)] == ["sent", "sent"]


def test_messages_tools_and_system_are_stored_once() -> None:
    system = {"role": "system", "content": "You are an agent."}
    first = [system, {"role": "user", "content": "go"}]
    second = [*first, {"role": "assistant", "content": "ls"}, {"role": "user", "content": "x"}]
    rows, blobs = call_rows(
        episode(call(0, [1], [2], messages=first, tools=TOOL), call(1, [1, 2, 3], [4], messages=second, tools=TOOL))
    )
    assert [json.loads(r["messages"]) for r in rows] == [first[1:], second[2:]]
    content = {b["sha256"]: b["bytes"] for b in blobs}
    assert len(blobs) == 2
    assert [content[r["system_sha256"]] for r in rows] == [b"You are an agent."] * 2
    assert json.loads(content[rows[1]["tools_sha256"]]) == TOOL


def test_a_lone_surrogate_survives() -> None:
    message = [{"role": "user", "content": "\ud800"}]
    rows, blobs = call_rows(episode(call(0, [1], [2], messages=[{"role": "system", "content": "\ud800"}, *message])))
    CALLS.arrow(rows), BLOBS.arrow(blobs)
    assert json.loads(rows[0]["messages"]) == message
