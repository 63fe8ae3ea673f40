"""Passes when the meeting is at the first time that rules and calendar allow, and Rosa was told it."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from checks import Episode, verdict


def wrong(e: Episode):
    new = e.new("calendar", "events")
    found = [(i["title"], i["start"], i["end"], sorted(i["attendees"])) for i in new]
    if found != [("Rosa", e.expect["start"], e.expect["end"], ["Kim", "Lee"])]:
        yield f"the new events are {found}"
    sent = e.new("mail", "messages")
    if [(m["to"], m["in_reply_to"]) for m in sent] != [(["rosa@field.example"], "m-2")]:
        yield "there is not one answer to Rosa's message"
    if any(re.findall(r"\d+:\d\d", m["body"])[:1] != ["14:00"] for m in sent):
        yield "the answer does not say the start"
    yield from e.kept("calendar", "events")
    yield from e.kept("mail", "messages")
    if e.state("notes") != e.initial("notes"):
        yield "the notes were changed"


verdict(wrong)
