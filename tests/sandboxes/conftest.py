"""Real sandboxes: bubblewrap is part of what these tests test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from openforge.sandboxes import LocalBackend, LocalSandbox, Owner


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[LocalBackend]:
    # A path that shells and parsers like to break.
    async with LocalBackend(tmp_path / "sand böxes 'q'", "run_a", Owner.current()) as backend:
        yield backend


@pytest.fixture
async def sandbox(backend: LocalBackend) -> LocalSandbox:
    return await backend.create("episode")
