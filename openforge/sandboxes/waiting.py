"""Waiting for room where a backend has none: no failure of anybody's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from openforge.sandboxes.protocol import SandboxFull

T = TypeVar("T")


async def _sleep(full: SandboxFull) -> None:
    await asyncio.sleep(full.retry_after)


async def when_free(create: Callable[[], Awaitable[T]], wait: Callable[[SandboxFull], Awaitable[None]] = _sleep) -> T:
    """What `create` makes, tried again as long as it raises `SandboxFull`.

    Args:
        wait: returns when it is to be tried again; without it that is when the backend says.
    """
    while True:
        try:
            return await create()
        except SandboxFull as e:
            await wait(e)
