"""Passes when report.txt has the sums of May."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from checks import Episode, verdict


def wrong(e: Episode):
    yield from e.files({"report.txt": 'apple 121\nfig 242\npear 172\nplum 90\nall 625\n', "sales.txt": 'apple 2\nfig 6\nplum 5\npear 9\npear 33\npear 1\npear 22\npear 14\nplum 20\napple 22\nfig 15\napple 13\napple 30\nfig 22\napple 11\nfig 12\npear 25\npear 39\npear 6\nfig 32\nplum 28\nplum 37\napple 23\napple 20\npear 23\nfig 19\nfig 28\nfig 32\nfig 36\nfig 40\n'})


verdict(wrong)
