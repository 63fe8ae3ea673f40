"""Passes when each ticket of the topic has the answer once and is pending."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from checks import Episode, verdict


def wrong(e: Episode):
    for old in e.initial("helpdesk")["tickets"]:
        found = e.item("helpdesk", "tickets", old["id"])
        mine = old["id"] in e.expect["ids"]
        if [r["text"].strip() for r in found["replies"]] != [e.expect["said"]] * mine:
            yield f"{old['id']} has {len(found['replies'])} answers"
        if found["status"] != ("pending" if mine else "open"):
            yield f"{old['id']} is {found['status']}"


verdict(wrong)
