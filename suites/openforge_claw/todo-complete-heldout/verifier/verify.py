"""Passes when the named items are done and all others are as they were."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from checks import Episode, verdict


def wrong(e: Episode):
    for key in e.expect["ids"]:
        if e.item("todo", "items", key).get("done") is not True:
            yield f"{key} is not done"
    yield from e.kept("todo", "items", but=e.expect["ids"])
    if e.new("todo", "items"):
        yield "there is a new item"


verdict(wrong)
