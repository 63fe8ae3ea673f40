"""Passes when stats.py does what it says, asked about cases drawn anew."""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from checks import Episode, seal, verdict


def middle(values):
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def wrong(e: Episode):
    seal()
    lists = [[random.randint(-99, 99) for _ in range(size)] for size in (1, 2, 3, 4, 7, 8, 12, 13)]
    expected = [[middle(v)] for v in lists] + [["error", "ValueError"]]
    if e.ask("stats", "median", [[v] for v in [*lists, []]]) != expected:
        yield "median gives wrong values"
    values = [9, 1, 5, random.randint(0, 99)]
    kept = "import json, sys; from stats import median; v = json.load(sys.stdin); median(v); print(v)"
    kept = f"import sys; sys.path.insert(0, {str(e.work)!r}); {kept}"
    if e.run(["python3", "-I", "-c", kept], str(values)) != f"{values}\n":
        yield "median changes its list"


verdict(wrong)
