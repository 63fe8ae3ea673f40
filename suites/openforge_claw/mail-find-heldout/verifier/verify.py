"""Passes when the last message has the valid code and no other, and the mailbox is as it was."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from checks import Episode, verdict


def wrong(e: Episode):
    yield from e.answered(e.expect["code"], never=e.expect["others"])
    yield from e.kept("mail", "messages")
    if e.new("mail", "messages"):
        yield "a message was sent"


verdict(wrong)
