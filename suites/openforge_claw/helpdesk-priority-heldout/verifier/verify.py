"""Passes when each ticket has the policy's priority and is otherwise as it was."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from checks import Episode, verdict


WANTED = {'h-1': 'high', 'h-2': 'urgent', 'h-3': 'normal', 'h-4': 'high', 'h-5': 'low', 'h-6': 'urgent'}


def wrong(e: Episode):
    for old in e.initial("helpdesk")["tickets"]:
        found = e.item("helpdesk", "tickets", old["id"])
        if found != {**old, "priority": WANTED[old["id"]]}:
            yield f"{old['id']} has the priority {found.get('priority')}, or something else was changed"


verdict(wrong)
