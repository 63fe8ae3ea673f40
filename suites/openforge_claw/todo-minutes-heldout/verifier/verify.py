"""Passes when the two actions that were missing are in the list, and no other."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from checks import Episode, verdict


WANTED = [('rent a truck', 'Ana', '2031-05-20', 'normal'), ('test the press', 'Bo', '2031-05-12', 'high')]


def wrong(e: Episode):
    new = e.new("todo", "items")
    found = sorted((i["title"].strip().lower(), i["owner"], i["due"], i["priority"]) for i in new)
    if found != WANTED or any(i["done"] for i in new):
        yield f"the new items are {found}"
    yield from e.kept("todo", "items")


verdict(wrong)
