from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from suite_rig import SUITE

from openforge.sandboxes import LocalBackend, Owner

sys.path[:0] = [str(SUITE), str(SUITE / "services")]


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[LocalBackend]:
    async with LocalBackend(tmp_path / "sandboxes", "test", Owner.current()) as one:
        yield one
