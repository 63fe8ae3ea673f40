"""Every task of the suite in real sandboxes: its reference scores 1, doing nothing and cheating score 0."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from pathlib import Path

import pytest
from suite_rig import FOLDERS, row, script, verdict

from openforge.environments.claw_eval.scripted import play
from openforge.sandboxes import LocalBackend

# One task of each family of easy jobs with files, and easy ones of other kinds: what CI runs on every change.
OTHERS = ("sum-invoices-train", "code-median-train", "trap-lookalike-heldout", "mail-find-train", "todo-complete-train")
QUICK = [f for f in FOLDERS if f.name.endswith("-train-1") or f.name in OTHERS]
SCORES = {"reference": 1.0, "nothing": 0.0, "cheat": 0.0}


# Two episodes a core: one waits for its sandbox or service while another computes.
AT_ONCE = 2 * (os.cpu_count() or 1)


async def scores(backend: LocalBackend, folders: Iterable[Path]) -> dict[str, dict[str, float]]:
    """What the agents of each task scored; a reference that was judged wrong is told with what it printed."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(folder: Path, agent: str) -> tuple[str, str, float]:
        async with gate:
            result = await play(backend, row(folder), script(folder, agent), f"{folder.name}-{agent}")
        found = verdict(result)
        if agent == "reference":
            assert not found["wrong"], (folder.name, found, result.harness_log.decode())
        return folder.name, agent, found["score"]

    scored: dict[str, dict[str, float]] = {}
    for name, agent, score in await asyncio.gather(*(one(f, a) for f in folders for a in SCORES)):
        scored.setdefault(name, {})[agent] = score
    return scored


async def test_the_agents_of_easy_tasks_score_as_they_should(backend: LocalBackend) -> None:
    assert await scores(backend, QUICK) == {f.name: SCORES for f in QUICK}


# One backend a kind: starting one costs more than an episode does.
@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted({f.name.split("-")[0] for f in FOLDERS}))
async def test_the_agents_of_all_other_tasks_score_as_they_should(backend: LocalBackend, kind: str) -> None:
    folders = [f for f in FOLDERS if f not in QUICK and f.name.split("-")[0] == kind]
    assert await scores(backend, folders) == {f.name: SCORES for f in folders}
