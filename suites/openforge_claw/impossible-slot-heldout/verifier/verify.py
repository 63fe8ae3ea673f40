"""Passes when Planning is in the first hour that all have, if there is one."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from checks import Episode, verdict


def wrong(e: Episode):
    yield from e.cannot("free", "slot", "hour", "time", "busy")
    if e.state("calendar") != e.initial("calendar"):
        yield "the calendar was changed"


verdict(wrong)
