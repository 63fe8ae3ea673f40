import shutil
from pathlib import Path

import made_run
import pytest
from hypothesis import settings

# A change that has nothing to do with it must not fail by a new draw; `--hypothesis-profile=default` draws anew.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def _made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_run.make(tmp_path_factory.mktemp("made"))


@pytest.fixture
def run_dir(_made: Path, tmp_path: Path) -> Path:
    """A run made by hand, below tmp_path/results."""
    return Path(shutil.copytree(_made, tmp_path / "results" / made_run.RUN))
