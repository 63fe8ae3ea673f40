"""Faults 18 and 19 in every dialect: a hang-up is no turn, its resend one call, and what is late is refused."""

from __future__ import annotations

import asyncio
import json

import pytest
from proxy_rig import Rig
from test_proxy_paths import PATHS, RESENT, body, error, text

EVERY = pytest.mark.parametrize("path", PATHS)
BOTH = pytest.mark.parametrize("streamed", [False, True])


@EVERY
@BOTH
async def test_hanging_up_is_no_turn_and_its_resend_one_call(rig: Rig, path: str, streamed: bool) -> None:
    rig.stub.hold = asyncio.Event()
    session = rig.session(turns=1)
    asked = body(path, stream=streamed)
    task = asyncio.create_task(rig.ask(asked, path=path))
    await rig.stub.arrived.get()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await rig.stub.aborted.get()
    assert (session.state()["turns"], rig.records("call")) == (0, [])
    rig.stub.hold.set()
    status, raw = await rig.ask(asked, RESENT, path=path)
    assert (status, text(path, raw, streamed)) == (200, "ok 2")
    assert (len(rig.records("call")), len(rig.records("failure")), session.state()["turns"]) == (1, 1, 1)
    await session.close(harness_exited=True)
    assert [(r["delivery"], r["trainable"]) for r in rig.rows()] == [("confirmed", True)]


@EVERY
@BOTH
async def test_an_answer_after_the_end_is_refused_and_not_recorded(rig: Rig, path: str, streamed: bool) -> None:
    rig.stub.hold = asyncio.Event()
    session = rig.session()
    task = asyncio.create_task(rig.ask(body(path, stream=streamed), path=path))
    await rig.stub.arrived.get()
    await session.close(harness_exited=False)
    rig.stub.hold.set()
    for status, raw in (await task, await rig.ask(body(path, stream=streamed), RESENT, path=path)):
        assert status == 409 and "is closed" in error(path, raw)[1]
    assert (rig.records("call"), rig.records("delivery")) == ([], [])
    assert [r["record"] for r in json.loads(session.summary())["records"]] == ["open", "close"]


@EVERY
async def test_500_then_200_is_one_call(rig: Rig, path: str) -> None:
    rig.stub.answers(500, {"error": {"message": "boom"}})
    rig.stub.says("well")
    session = rig.session()
    status, raw = await rig.ask(body(path), path=path)
    assert (status, text(path, raw, False), len(rig.stub.bodies)) == (200, "well", 2)
    assert len(rig.records("call")) == session.state()["turns"] == 1
