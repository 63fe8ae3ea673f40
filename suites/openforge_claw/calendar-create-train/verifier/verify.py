"""Passes when the one new event is the one that was asked for."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from checks import Episode, verdict


EVENT = {'title': 'Dentist', 'start': '2031-05-09T14:30', 'end': '2031-05-09T15:15', 'place': 'Hill Street 4', 'attendees': []}


def wrong(e: Episode):
    new = [{k: v for k, v in i.items() if k != "id"} for i in e.new("calendar", "events")]
    if new != [EVENT]:
        yield f"the new events are {new}"
    yield from e.kept("calendar", "events")


verdict(wrong)
