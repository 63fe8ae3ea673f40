"""Passes when intervals.py does what it says, asked about cases drawn anew."""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from checks import Episode, seal, verdict


def merged(intervals):
    # By the half points that are covered: [1, 2] and [3, 4] leave 2.5 out, [1, 2] and [2, 5] nothing.
    covered = {p for start, end in intervals for p in range(2 * start, 2 * end + 1)}
    starts = sorted(p for p in covered if p - 1 not in covered)
    ends = sorted(p for p in covered if p + 1 not in covered)
    return [[s // 2, e // 2] for s, e in zip(starts, ends)]


def wrong(e: Episode):
    seal()
    cases = []
    for _ in range(40):
        starts = [random.randint(-30, 60) for _ in range(random.randint(0, 9))]
        cases.append([[[s, s + random.randint(0, 12)] for s in starts]])
    expected = [[merged(c[0])] for c in cases] + [["error", "ValueError"]]
    if e.ask("intervals", "merge", [*cases, [[[1, 2], [9, 4]]]]) != expected:
        yield "merge gives wrong intervals"


verdict(wrong)
