"""Passes when each message is in its folder and nothing was sent."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from checks import Episode, verdict


FOLDERS = {'m-1': 'invoices', 'm-2': 'newsletters', 'm-3': 'inbox', 'm-4': 'newsletters', 'm-5': 'invoices', 'm-6': 'inbox', 'm-7': 'inbox', 'm-8': 'inbox'}


def wrong(e: Episode):
    found = {m["id"]: m["folder"] for m in e.state("mail")["messages"]}
    yield from (f"{k} is in {found.get(k)}" for k in FOLDERS if found.get(k) != FOLDERS[k])
    if e.new("mail", "messages"):
        yield "a message was sent"


verdict(wrong)
