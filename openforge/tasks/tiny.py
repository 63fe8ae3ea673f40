"""The tests' own task kind, whose reward a random model varies on.

The tiny random model prints random bytes, so no task about files can be solved by it. The verifier looks at the
agent's last message instead (its answer, handed over by the environment), which differs between samples. It serves
plumbing tests only and says nothing about agents.
"""

from __future__ import annotations

import json
from typing import Any

VERIFIER = '''\
"""Passes when the answer's bytes add up to an odd number."""
import json, pathlib, sys
answer = pathlib.Path(sys.argv[1]).read_bytes()
odd = sum(answer) % 2 == 1
print(json.dumps({"score": float(odd), "passed": odd, "bytes": len(answer)}))
'''


def make(index: int, split: str) -> dict[str, Any]:
    """A task as plain data: what openforge.tasks turns into a row."""
    return {
        "task_id": f"tiny-{split}-{index:04d}",
        "kind": "odd",
        "split": split,
        "instruction": f"Say something, number {index}.",
        "files": {"note.txt": f"number {index}\n"},
        "verifier": {"verify.py": VERIFIER},
        "arguments": ["{answer}"],
        "turns": 2,
        "payload": json.dumps({"index": index}),
    }


def generate(train: int, heldout: int, unseen: int, seed: int) -> list[dict[str, Any]]:
    """So many tasks of each split; the seed shifts their numbers."""
    counts = (("train", train), ("heldout", heldout), ("unseen", unseen))
    return [make(seed * 10_000 + i, split) for split, n in counts for i in range(n)]
