"""Passes when the one new event is the one that was asked for."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from checks import Episode, verdict


def wrong(e: Episode):
    new = [{k: v for k, v in i.items() if k != "id"} for i in e.new("calendar", "events")]
    if new != [e.expect["event"]]:
        yield f"the new events are {new}"
    yield from e.kept("calendar", "events")


verdict(wrong)
