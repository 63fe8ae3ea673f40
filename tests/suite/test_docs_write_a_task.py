"""The example of docs/write-a-task.md, as it stands there, is a task that `openforge tasks check` passes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from openforge.cli import main

DOC = (Path(__file__).resolve().parents[2] / "docs" / "write-a-task.md").read_text()


def test_the_example_is_a_right_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "receipts-01"
    written = []
    # The first line of the paragraph before a code block names the files that the block is.
    pieces = re.split(r"^```\w*\n", DOC, flags=re.M)
    for before, block in zip(pieces[0::2], pieces[1::2], strict=False):
        line = before.strip().split("\n\n")[-1].partition("\n")[0]
        for name in re.findall(r"`([\w/-]+\.\w+)`", line):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(block)
            written.append(name)
    assert sorted(written) == [
        "agents/cheat.sh",
        "agents/reference.sh",
        "receipts/101.txt",
        "receipts/102-copy.txt",
        "receipts/102.txt",
        "task.yaml",
        "verifier/verify.py",
    ]
    assert main(["tasks", "check", str(tmp_path)]) == 0
    told = capsys.readouterr().out.replace(str(tmp_path), "my_tasks").splitlines()
    assert [f"    {line}" for line in told] == re.findall(r"^    my_tasks/receipts-01: .*", DOC, re.M)
