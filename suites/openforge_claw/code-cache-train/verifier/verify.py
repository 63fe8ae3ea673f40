"""Passes when cache.py does what it says, asked about cases drawn anew."""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from checks import Episode, seal, verdict


def play(size, steps):
    held, out = [], []
    for step in steps:
        old = next((v for k, v in held if k == step[1]), None)
        value = step[2] if step[0] == "put" else old
        if step[0] == "get":
            out.append(old)
        if step[0] == "put" or old is not None:
            held = [kv for kv in held if kv[0] != step[1]][-(size - 1) :] if step[0] == "put" else [
                kv for kv in held if kv[0] != step[1]
            ]
            held.append((step[1], value))
    return out


def wrong(e: Episode):
    seal()
    cases = []
    for _ in range(30):
        keys = "abcde"[: random.randint(2, 5)]
        steps = []
        for number in range(60):
            put = random.random() < 0.5
            steps.append(["put", random.choice(keys), number] if put else ["get", random.choice(keys)])
        cases.append([random.randint(2, 4), steps])
    if e.ask("cache", "play", cases) != [[play(*c)] for c in cases]:
        yield "the cache forgets the wrong values"


verdict(wrong)
