"""A software environment's own start-up file."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from openforge import software

pytestmark = pytest.mark.slow


def test_an_environment_starts_with_its_own_file_and_is_old_without_it(tmp_path: Path) -> None:
    pins = tmp_path / "envs"
    pins.mkdir()
    (pins / "x.txt").write_text("# nothing to install\n")
    plain = software.pins_digest("x", tmp_path)
    (pins / "x.site.py").write_text("import sys\nsys.openforge_was_here = 17\n")
    assert software.pins_digest("x", tmp_path) != plain
    software.build("x", tmp_path)
    python = software.python_of("x", tmp_path)
    done = subprocess.run([python, "-c", "import sys; print(sys.openforge_was_here)"], capture_output=True, text=True)
    assert done.stdout == "17\n", done.stderr
