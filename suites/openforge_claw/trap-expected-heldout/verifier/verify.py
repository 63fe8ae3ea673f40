"""Passes when report.txt has the sums of May."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from checks import Episode, verdict


def wrong(e: Episode):
    yield from e.files({"report.txt": e.expect["report"], "sales.txt": e.expect["sales"]})


verdict(wrong)
