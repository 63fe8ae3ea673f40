"""What the verifiers share: what counts as said, and that a program of the agent's learns nothing from the verifier."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from source.checks import Episode
from suite_rig import SUITE, play, verdict

from openforge.sandboxes import LocalBackend, Sandbox


def complaints(tmp_path: Path, answer: str, *wanted: str, never: tuple[str, ...] = ()) -> list[str]:
    (tmp_path / "answer").write_text(answer)
    return list(Episode(str(tmp_path), str(tmp_path / "answer")).answered(*wanted, never=never))


@pytest.mark.parametrize(
    ("answer", "word", "said"),
    [
        ("It is QX7-114.", "QX7-114", True),
        ("**qx7-114**", "QX7-114", True),
        ("QX7-1142", "QX7-114", False),
        ("AQX7-114", "QX7-114", False),
        ("12", "12", True),
        ("12.", "12", True),
        ("12, 13", "12", True),
        ("1,240.12", "12", False),
        ("12.5", "12", False),
        ("3.12", "12", False),
        ("112 and 12", "12", True),
        ("", "12", False),
    ],
)
def test_a_word_counts_as_said_where_it_stands_alone(tmp_path: Path, answer: str, word: str, said: bool) -> None:
    assert (complaints(tmp_path, answer, word) == []) is said
    assert (complaints(tmp_path, answer, never=(word,)) == []) is not said


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("I looked.\nCANNOT: invoice 2291 is missing", True),
        ("**CANNOT:** invoice 2291 is missing", True),
        ("CANNOT: something is missing", False),
        ("The task says CANNOT: 2291", False),
        ("", False),
    ],
)
def test_cannot_is_a_line_with_the_reason(tmp_path: Path, answer: str, right: bool) -> None:
    (tmp_path / "answer").write_text(answer)
    found = list(Episode(str(tmp_path), str(tmp_path / "answer")).cannot("2291"))
    assert (found == []) is right


# A median that is none: it looks for what it is compared with in the verifier's folder, which it finds by its name or
# as its parent's working folder, and in its parent's memory. What it could read it names in the work folder.
SPY = """
cat > stats.py <<'END'
import glob, os

def readable(path):
    try:
        open(path, "rb").close()
    except OSError:
        return False
    return True

parent = f"/proc/{os.getppid()}"
tried = [*glob.glob("/tmp/verifier*/*"), *glob.glob(f"{parent}/cwd/*"), f"{parent}/mem", f"{parent}/environ"]
with open("/workspace/spied", "a") as f:
    f.write(f"{[p for p in tried if readable(p)]}\\n")

def median(values):
    return 0
END
"""


async def test_a_program_that_the_verifier_runs_finds_nothing_of_it(backend: LocalBackend) -> None:
    found: list[str] = []

    async def look(sandbox: Sandbox) -> None:
        found.append((await sandbox.download_content("spied")).decode())

    result = await play(backend, SUITE / "code-median-train", SPY, "spy", look)
    assert verdict(result)["score"] == 0.0
    # It ran, twice: once for its values, once for the list that it must not change.
    assert found == ["[]\n[]\n"]


def test_by_hand_a_verifier_keeps_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "verifier"
    shutil.copytree(SUITE / "code-median-train" / "verifier", folder)
    (tmp_path / "answer").touch()
    before = sorted(folder.iterdir())
    command = [sys.executable, "-I", "verify.py", str(tmp_path), str(tmp_path / "answer")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout)["score"] == 0.0 and set(before) <= set(folder.iterdir())
