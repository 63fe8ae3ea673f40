"""Passes when each message is in its folder and nothing was sent."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from checks import Episode, verdict


def wrong(e: Episode):
    found = {m["id"]: m["folder"] for m in e.state("mail")["messages"]}
    wanted = e.expect["folders"].items()
    yield from (f"{k} is in {found.get(k)}" for k, folder in wanted if found.get(k) != folder)
    if e.new("mail", "messages"):
        yield "a message was sent"


verdict(wrong)
