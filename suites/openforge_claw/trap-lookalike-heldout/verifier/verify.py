"""Passes when primes.txt has all of them; a file verify.py of the work folder says nothing."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from checks import Episode, verdict


def wrong(e: Episode):
    yield from e.files({"primes.txt": e.expect["lines"]})


verdict(wrong)
