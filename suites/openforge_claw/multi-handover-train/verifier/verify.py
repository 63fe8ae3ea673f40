"""Passes when the open tasks have their new owners, and each was told of theirs only."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from checks import Episode, verdict


OWNERS, TOLD = {'t-1': 'Cy', 't-2': 'Bo', 't-5': 'Cy'}, {'bo@orchard.example': ['order jars'], 'cy.rae@orchard.example': ['paint the gate', 'fix the scale']}
TITLES = ["paint the gate", "order jars", "sell the cart", "fix the scale"]


def wrong(e: Episode):
    for old in e.initial("todo")["items"]:
        found = e.item("todo", "items", old["id"])
        if found != {**old, "owner": OWNERS.get(old["id"], old["owner"])}:
            yield f"{old['id']} is not as it should be"
    if e.new("todo", "items"):
        yield "there is a new task"
    sent = e.new("mail", "messages")
    if sorted(m["to"] for m in sent) != sorted([a] for a in TOLD):
        yield f"mail went to {[m['to'] for m in sent]}"
    for m in sent:
        named = [t for t in TITLES if t in m["body"].lower()]
        if sorted(named) != sorted(TOLD.get(m["to"][0], [])):
            yield f"{m['to']} was told of {named}"


verdict(wrong)
