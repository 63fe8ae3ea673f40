"""Passes when one note has all items and the merged ones are gone."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from checks import Episode, verdict


def wrong(e: Episode):
    new = e.new("notes", "notes")
    lines = [n["body"].strip().splitlines() for n in new]
    if [n["title"] for n in new] != ["Supplies"] or lines != [e.expect["lines"]]:
        yield f"the new notes are {new}"
    elif new[0]["tags"] != ["supplies"]:
        yield "the new note has not the tag supplies"
    left = [n["id"] for n in e.state("notes")["notes"] if n["id"] in ("n-1", "n-3", "n-4")]
    if left:
        yield f"{left} were not deleted"
    yield from e.kept("notes", "notes", but=["n-1", "n-3", "n-4"])


verdict(wrong)
