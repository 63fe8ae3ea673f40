"""Passes when one answer went to the customer, with the right day and no other."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from checks import Episode, verdict


def wrong(e: Episode):
    sent = e.new("mail", "messages")
    if len(sent) != 1:
        yield f"{len(sent)} messages were sent, not 1"
    for m in sent:
        if (m["to"], m["in_reply_to"]) != ([e.expect["who"]], "m-2"):
            yield f"the message to {m['to']} is no answer to the customer"
        said = [d for d in e.expect["days"] if d in m["body"]]
        if e.expect["order"] not in m["body"] or said != [e.expect["day"]]:
            yield "the text does not say the order and its day"
    yield from e.kept("mail", "messages")


verdict(wrong)
