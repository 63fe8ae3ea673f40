"""Passes when the files named in expect.json are as they should be; null: gone."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from checks import Episode, verdict


def wrong(e: Episode):
    yield from e.files(e.expect["files"])


verdict(wrong)
