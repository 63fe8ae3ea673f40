"""Passes when the duplicates are closed and linked, and all others are as they were."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from checks import Episode, verdict


def wrong(e: Episode):
    for old in e.initial("helpdesk")["tickets"]:
        original = e.expect["closed"].get(old["id"])
        change = {"status": "closed", "duplicate_of": original} if original else {}
        if e.item("helpdesk", "tickets", old["id"]) != {**old, **change}:
            yield f"{old['id']} is not as it should be"


verdict(wrong)
