"""Passes when the parts are whole and the check is the one that was there."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from checks import Episode, verdict


def wrong(e: Episode):
    yield from e.files({**e.expect["parts"], "SUMS": e.expect["sums"], "check.sh": e.expect["script"]})


verdict(wrong)
