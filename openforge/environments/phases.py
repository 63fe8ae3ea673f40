"""The phases of an episode: how long each may take, and in which sandbox the last one is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from openforge.config_sandbox import image_of
from openforge.harnesses.base import Harness, python_binds
from openforge.sandboxes.archive import pack, unpack
from openforge.sandboxes.join import WORK
from openforge.sandboxes.protocol import Sandbox
from openforge.sandboxes.waiting import when_free


class PhaseTimeout(Exception):
    """A phase took longer than it may; the message says which, how long, and by which key."""

    def __init__(self, phase: str, seconds: float, key: str) -> None:
        super().__init__(f"the {phase} phase did not end within {seconds:g} s ({key})")
        self.phase = phase


@asynccontextmanager
async def within(phase: str, seconds: float | None, key: str) -> AsyncIterator[None]:
    """Cancel the block after `seconds`; None never does.

    Raises:
        PhaseTimeout: it was cancelled.
    """
    timer = asyncio.timeout(seconds)
    try:
        async with timer:
            yield
    except TimeoutError:
        if not timer.expired():
            raise
        assert seconds is not None
        raise PhaseTimeout(phase, seconds, key) from None


async def grading_sandbox(sandbox: Sandbox, task: Mapping[str, Any], harness: Harness) -> Sandbox:
    """Where the verifier of a rollout row runs: the agent's sandbox, or a second one that holds its work folder.

    Call it when nothing runs in the agent's sandbox any more. The second one has no network, goes with the first, and
    holds nothing else of the agent's; links in the work folder may still lead astray.

    Raises:
        SandboxError: the second one cannot be made, or the folder not be copied.
    """
    if task.get("grading") != "second":
        return sandbox
    data = await pack(sandbox, WORK)
    image = image_of(task, harness.root)
    second = await when_free(lambda: sandbox.companion(image=image, binds=python_binds()))
    await unpack(second, data, WORK)
    return second
