"""Passes when the open tasks have their new owners, and each was told of theirs only."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from checks import Episode, verdict


TITLES = ["paint the gate", "order jars", "sell the cart", "fix the scale"]


def wrong(e: Episode):
    for old in e.initial("todo")["items"]:
        found = e.item("todo", "items", old["id"])
        if found != {**old, "owner": e.expect["owners"].get(old["id"], old["owner"])}:
            yield f"{old['id']} is not as it should be"
    if e.new("todo", "items"):
        yield "there is a new task"
    sent = e.new("mail", "messages")
    if sorted(m["to"] for m in sent) != sorted([a] for a in e.expect["told"]):
        yield f"mail went to {[m['to'] for m in sent]}"
    for m in sent:
        named = [t for t in TITLES if t in m["body"].lower()]
        if sorted(named) != sorted(e.expect["told"].get(m["to"][0], [])):
            yield f"{m['to']} was told of {named}"


verdict(wrong)
