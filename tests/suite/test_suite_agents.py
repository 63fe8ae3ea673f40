"""Every task of the suite in real sandboxes: its reference scores 1, doing nothing and cheating score 0."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from suite_rig import FOLDERS, SCORES, play, script, verdict

from openforge.sandboxes import LocalBackend

# One task of each family of easy jobs with files, and of each kind without services: what CI runs on every change.
QUICK = [f for f in FOLDERS if f.name.endswith("-train-1") or f.name in ("sum-invoices-train", "trap-check-train")]


async def scores(backend: LocalBackend, folder: Path) -> dict[str, float]:
    results = await asyncio.gather(*(play(backend, folder, script(folder, a), a) for a in SCORES))
    found = dict(zip(SCORES, map(verdict, results), strict=True))
    assert not found["reference"]["wrong"], (found["reference"], results[0].harness_log.decode())
    return {agent: v["score"] for agent, v in found.items()}


@pytest.mark.parametrize("folder", QUICK, ids=lambda f: f.name)
async def test_the_agents_of_an_easy_task_score_as_they_should(backend: LocalBackend, folder: Path) -> None:
    assert await scores(backend, folder) == SCORES


@pytest.mark.slow
@pytest.mark.parametrize("folder", [f for f in FOLDERS if f not in QUICK], ids=lambda f: f.name)
async def test_the_agents_of_a_task_score_as_they_should(backend: LocalBackend, folder: Path) -> None:
    assert await scores(backend, folder) == SCORES
