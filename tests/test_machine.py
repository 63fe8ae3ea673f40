"""What a machine lacks is one sentence, before anything is downloaded."""

from __future__ import annotations

import ast
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from openforge import machine

ROOT = Path(__file__).resolve().parents[1]


def test_this_machine_will_do() -> None:
    done = subprocess.run([sys.executable, "openforge/machine.py"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("module", "name", "value", "words"),
    [
        (sys, "version_info", (3, 12, 1), "Python 3.11 .* this is Python 3.12"),
        (platform, "machine", lambda: "aarch64", "x86_64, this is Linux on aarch64"),
        (os, "sysconf", lambda name: 1024, "12 GB of memory"),
        (shutil, "which", lambda name: None, "apt-get install bubblewrap"),
    ],
)
def test_each_lack_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, module: object, name: str, value: object, words: str
) -> None:
    monkeypatch.setattr(module, name, value)
    sentence = machine.lacks()
    monkeypatch.undo()
    assert re.search(words, sentence), sentence


def test_make_stops_before_it_downloads(tmp_path: Path) -> None:
    """`make demo` with a Python that is refused: no .venv is begun."""
    for f in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / f, tmp_path / f)
    (tmp_path / "envs").mkdir()
    shutil.copy(ROOT / "envs" / "core.txt", tmp_path / "envs" / "core.txt")
    (tmp_path / "openforge").mkdir()
    text = (ROOT / "openforge" / "machine.py").read_text().replace("(3, 11)", "(3, 99)")
    (tmp_path / "openforge" / "machine.py").write_text(text)
    done = subprocess.run(["make", f"PYTHON={sys.executable}", "demo"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0 and "OpenForge needs Python" in done.stderr and not (tmp_path / ".venv").exists()


def test_the_check_parses_on_an_old_python() -> None:
    ast.parse((ROOT / "openforge" / "machine.py").read_text(), feature_version=(3, 6))
