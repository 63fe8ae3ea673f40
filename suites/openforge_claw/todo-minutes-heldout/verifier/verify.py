"""Passes when the two actions that were missing are in the list, and no other."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from checks import Episode, verdict


def wrong(e: Episode):
    new = e.new("todo", "items")
    found = sorted([i["title"].strip().lower(), i["owner"], i["due"], i["priority"]] for i in new)
    if found != e.expect["wanted"] or any(i["done"] for i in new):
        yield f"the new items are {found}"
    yield from e.kept("todo", "items")


verdict(wrong)
