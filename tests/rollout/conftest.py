from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from proxy_stub import StubUpstream
from shard_rig import Agent, Make

from openforge.policy.lease import Endpoint
from openforge.proxy.client import KeptProxy, start_proxy
from openforge.rollout import engine
from openforge.rollout.gate import Gate
from openforge.rollout.machine import Machine
from openforge.rollout.partial import Partial
from openforge.rollout.progress import Progress
from openforge.rollout.rows import Book
from openforge.sandboxes import LocalBackend, Owner


@pytest.fixture
async def upstream() -> AsyncIterator[StubUpstream]:
    stub = StubUpstream()
    await stub.start()
    yield stub
    await stub.stop()


@pytest.fixture
async def make(tmp_path: Path, upstream: StubUpstream) -> AsyncIterator[Make]:
    """A shard of some rows, as rollout.shard puts it together; called again it is the rerun of a dead one."""
    partial = tmp_path / "partial"
    proxy = KeptProxy(
        lambda: start_proxy(upstream.url, partial / "d" / "journal", patience_seconds=0.5, probe_seconds=0.5)
    )
    async with LocalBackend(tmp_path / "sandboxes", "r", Owner.current()) as backend:

        def shard(*rows: dict[str, Any], **over: Any) -> engine.Shard:
            endpoint = Endpoint(f"{upstream.url}/v1", "", "policy", 4096, "0@abc")
            progress = Progress(len(rows), lambda line: None)
            given: dict[str, Any] = {
                "book": Book(rows, "1", "0@abc", 0, "artifacts/shard=0001.zip"),
                "partial": Partial(partial, "d"),
                "proxy": proxy,
                "endpoint": endpoint,
                "gate": Gate(endpoint, 30.0, progress),
                "machine": Machine([tmp_path], reserve=1 << 20),
                "backend": backend,
                "harness": Agent(),
                "concurrency": 4,
                "attempts": 2,
                "keep_artifacts": 0,
                "progress": progress,
            }
            return engine.Shard(**(given | over))

        yield shard
    await proxy.stop()
