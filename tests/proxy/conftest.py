from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import aiohttp
import pytest
import uvloop
from proxy_rig import Rig


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    """The proxy in this process, on a free port, before a stub policy server."""
    async with aiohttp.ClientSession() as harness, aiohttp.ClientSession() as upstream:
        made = Rig(tmp_path / "journal", harness, upstream)
        await made.start()
        try:
            yield made
        finally:
            await made.stop()


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], AbstractEventLoop]]:
    """The proxy's own loop: what counts as written differs between loops."""
    return {"uvloop": uvloop.new_event_loop}
