"""Passes when report.py does what it says, asked about cases drawn anew."""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from checks import Episode, seal, verdict


def shown(cents):
    return f"{'-' if cents < 0 else ''}{abs(cents) // 100}.{abs(cents) % 100:02d}"


def wrong(e: Episode):
    seal()
    for count in (0, 1, 7, 300):
        sums, lines = {}, ["# shop,amount"]
        for _ in range(count):
            shop = random.choice(["north", "south", "east", "west", "quay"])
            cents = random.randint(-3000, 9000)
            sums[shop] = sums.get(shop, 0) + cents
            lines += [f"{shop},{shown(cents)}", *random.choice(([], [""], ["# a remark"]))]
        if count == 300:
            # Two shops of one amount.
            lines += [f"{s},{shown(99999999 - sums[s])}" for s in ("west", "east")]
            sums["west"] = sums["east"] = 99999999
        ordered = sorted(sums, key=lambda s: (-sums[s], s))
        expected = [f"{s} {shown(sums[s])}" for s in ordered] + [f"TOTAL {shown(sum(sums.values()))}"]
        out = e.run(["python3", "-I", "report.py"], "\n".join(lines) + "\n")
        if out is None or out.splitlines() != expected:
            yield f"the report of {count} sales is wrong: {(out or '')[:200]!r}"


verdict(wrong)
