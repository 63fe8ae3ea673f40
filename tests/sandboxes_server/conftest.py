"""A real server in a process of its own, over real sandboxes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served import Served


@pytest.fixture(scope="package")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server for tests that leave it as it was."""
    share = tmp_path_factory.mktemp("share")
    (share / "words").write_text("shared\n")
    # A state folder whose socket has a path beyond what the kernel takes.
    state = tmp_path_factory.mktemp("st ate 'ö'") / ("long" * 20) / "state"
    server = Served(state, "--allow", "127.0.0.1:*", "--allow", "localhost:9", "--share", str(share))
    yield server
    server.end()


@pytest.fixture
def sandbox(served: Served) -> Iterator[str]:
    made = served.create()["sandbox_id"]
    yield made
    served.api.delete(f"/sandboxes/{made}")


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Any]:
    """Makes servers that a test may kill."""
    made: list[Served] = []

    def make(*options: str, **named: Any) -> Served:
        made.append(Served(tmp_path / f"state{len(made)}", *options, **named))
        return made[-1]

    yield make
    for server in made:
        if server.running:
            server.end()
