from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from proxy_stub import StubUpstream
from shard_rig import PARTIAL, Make, make_proxy, make_shard

from openforge.rollout import engine
from openforge.sandboxes import LocalBackend, Owner


@pytest.fixture
async def upstream() -> AsyncIterator[StubUpstream]:
    stub = StubUpstream()
    await stub.start()
    yield stub
    await stub.stop()


@pytest.fixture
async def make(tmp_path: Path, upstream: StubUpstream) -> AsyncIterator[Make]:
    """Shards over one stub policy server; one made again is the rerun of a dead one."""
    proxy = make_proxy(tmp_path / PARTIAL, upstream.url)
    async with LocalBackend(tmp_path / "sandboxes", "r", Owner.current()) as backend:

        def shard(*rows: dict[str, Any], **over: Any) -> engine.Shard:
            return make_shard(tmp_path / PARTIAL, upstream.url, proxy, over.pop("backend", backend), rows, **over)

        yield shard
    await proxy.stop()
