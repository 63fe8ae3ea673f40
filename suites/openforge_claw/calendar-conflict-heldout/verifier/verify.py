"""Passes when the movable event is at the first time that fits, and all else is as it was."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from checks import Episode, verdict


def wrong(e: Episode):
    item, old = e.item("calendar", "events", "e-2"), e.initial("calendar")["events"][1]
    if item != {**old, **e.expect["moved"]}:
        yield f"the event is now {item}"
    yield from e.kept("calendar", "events", but=["e-2"])
    if e.new("calendar", "events"):
        yield "there is a new event"


verdict(wrong)
