"""Passes when the result is the expected table and the data are as they were."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from checks import Episode, verdict


def rows(text):
    return [",".join(cell.strip() for cell in line.split(",")) for line in text.strip().splitlines()]


def wrong(e: Episode):
    found = e.text(e.expect["result"])
    if found is None:
        yield f"{e.expect['result']} is missing"
    elif rows(found) != e.expect["rows"]:
        yield f"{e.expect['result']} is wrong: {found[:300]!r}"
    yield from e.files(e.expect["data"])


verdict(wrong)
