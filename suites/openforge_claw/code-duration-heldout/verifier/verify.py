"""Passes when duration.py does what it says, asked about cases drawn anew."""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from checks import Episode, seal, verdict


def wrong(e: Episode):
    seal()
    cases, expected = [], []
    for _ in range(40):
        numbers = [random.choice([None, random.randint(0, 200)]) for _ in range(4)]
        if any(n is not None for n in numbers):
            space = random.choice(["", " "])
            said = space.join(f"{n}{u}" for n, u in zip(numbers, "dhms") if n is not None)
            cases.append([random.choice([said, said.upper()])])
            expected.append([sum((n or 0) * s for n, s in zip(numbers, (86400, 3600, 60, 1)))])
    for bad in ("", "  ", "5", "m5", "3m2h", "1h1h", "4x", "1h 5", "-3m", "1.5h", "2h and 3m"):
        cases.append([bad])
        expected.append(["error", "ValueError"])
    found = e.ask("duration", "seconds", cases)
    if found is None:
        yield "duration.seconds cannot be asked"
    else:
        yield from (f"seconds({c[0]!r}) gives {f}" for c, f, x in zip(cases, found, expected) if f != x)


verdict(wrong)
