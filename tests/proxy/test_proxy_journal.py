"""The journal: what was appended is there, what was torn is dropped, what was damaged is named."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from openforge.proxy.journal import Journal, JournalError, by_episode, read


def record(n: int, episode: str = "e1") -> dict[str, object]:
    return {"record": "call", "episode_id": episode, "call": n, "text": "grüße \u2028 \n"}


def test_read_returns_what_was_appended_in_order(tmp_path: Path) -> None:
    first = Journal(tmp_path)
    places = [first.append(record(0)), first.append(record(1, "e2"))]
    assert [json.loads(first.line(p)) for p in places] == [record(0), record(1, "e2")]
    # Sessions of two proxies at once would be mixed up, where both have one of the same name.
    with pytest.raises(JournalError, match=f"another proxy records in {tmp_path}; give each a folder of its own"):
        Journal(tmp_path)
    first.close()
    second = Journal(tmp_path)
    second.append(record(2))
    second.close()
    assert read(tmp_path) == [record(0), record(1, "e2"), record(2)]
    assert by_episode(read(tmp_path)) == {"e1": [record(0), record(2)], "e2": [record(1, "e2")]}


@pytest.mark.parametrize("torn", range(1, 40, 7))
def test_a_torn_last_line_is_dropped(tmp_path: Path, torn: int) -> None:
    journal = Journal(tmp_path)
    journal.append(record(0))
    _, length = journal.append(record(1))
    journal.close()
    whole = journal.path.read_bytes()
    journal.path.write_bytes(whole[: len(whole) - length + torn])
    assert read(tmp_path) == [record(0)]


@pytest.mark.parametrize("line", [b"{", b"[1]", b'{"call": 3}', b"\xff", b""])
def test_a_damaged_line_is_an_error_that_names_it(tmp_path: Path, line: bytes) -> None:
    journal = Journal(tmp_path)
    journal.append(record(0))
    journal.close()
    whole = journal.path.read_bytes()
    journal.path.write_bytes(whole + line + b"\n" + whole)
    with pytest.raises(JournalError, match=f"{journal.path.name}, line 2"):
        read(tmp_path)


def test_a_full_disk_is_an_error_and_leaves_no_half_line(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    _, length = journal.append(record(0))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (length + length // 2, limits[1]))
    try:
        for _ in range(2):
            with pytest.raises(JournalError, match="cannot be written"):
                journal.append(record(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    journal.append(record(2))
    journal.sync()
    assert read(tmp_path) == [record(0), record(2)]
    journal.close()
