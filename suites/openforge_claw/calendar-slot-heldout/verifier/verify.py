"""Passes when Planning is in the first hour that all have, if there is one."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from checks import Episode, verdict


def wrong(e: Episode):
    new = e.new("calendar", "events")
    if [(i["title"].strip().lower(), i["start"], i["end"], sorted(i["attendees"])) for i in new] != [
        ("planning", e.expect["start"], e.expect["end"], e.expect["team"])
    ]:
        yield f"the new events are {new}"
    yield from e.kept("calendar", "events")


verdict(wrong)
