"""A mock of Orchard whose pods are real local sandboxes, and the backend that talks to it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import mock_orchard
import pytest
from mock_orchard import MockOrchard

from openforge.sandboxes import LocalBackend, Owner
from openforge.sandboxes.orchard import Options, OrchardBackend, OrchardSandbox

OPTIONS = Options(image="debian:12", patience=3, create_seconds=20, full_seconds=3)


@pytest.fixture
async def mock(tmp_path: Path) -> AsyncIterator[MockOrchard]:
    async with LocalBackend(tmp_path / "pods", "pods", Owner.current()) as pods, mock_orchard.serving(pods) as mock:
        yield mock


@pytest.fixture
async def backend(tmp_path: Path, mock: MockOrchard) -> AsyncIterator[OrchardBackend]:
    made = OrchardBackend(
        tmp_path / "ids", "run_a", Owner.current(), url=mock.url, key=mock_orchard.KEY, options=OPTIONS
    )
    async with made as backend:
        yield backend


@pytest.fixture
async def sandbox(backend: OrchardBackend) -> OrchardSandbox:
    return await backend.create("episode", network="none")
