"""Passes when each ticket has the policy's priority and is otherwise as it was."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from checks import Episode, verdict


def wrong(e: Episode):
    for old in e.initial("helpdesk")["tickets"]:
        found = e.item("helpdesk", "tickets", old["id"])
        if found != {**old, "priority": e.expect["wanted"][old["id"]]}:
            yield f"{old['id']} has the priority {found.get('priority')}, or something else was changed"


verdict(wrong)
