from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from openforge.harnesses import Context
from openforge.sandboxes import LocalBackend, Owner

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[LocalBackend]:
    async with LocalBackend(tmp_path / "sandboxes", "test", Owner.current()) as one:
        yield one


@pytest.fixture
def context(tmp_path: Path) -> Any:
    """Makes a Context; keywords replace its members."""

    def make(**over: Any) -> Context:
        given: dict[str, Any] = {
            "instruction": "Create the file a.txt.",
            "base_url": "http://127.0.0.1:8080/s/e1",
            "api_key": "secret-key",
            "model": "policy",
            "context_window": 4096,
            "max_tokens": 256,
            "turns": 3,
            "seconds": 120.0,
            "options": {},
            "home": "/home/agent",
            "cwd": "/workspace",
            "root": tmp_path,
        }
        return Context(**{**given, **over})

    return make
