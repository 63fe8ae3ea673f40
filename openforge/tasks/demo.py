"""The demo's tasks: small shell jobs that a 135M-parameter policy can begin with and learn.

A one-call kind is an instruction that one command carries out. In a two-call kind (`note_*`) the instruction names only
a note, which holds the job in plain English: the first command has to show the note and the second to do what was read.
No one-liner can, since a note is no shell code. docs/demo-tasks.md has the base rates, and the kinds that were tried
and left out.

Every name is a word that SmolLM2 writes as one token after a space; the splits share no word, and none stands in the
few-shot prompt of config/harness/demo.yaml. The kinds of the split `unseen` are never trained on.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

WORDS = {
    "train": "apple river stone cloud green tiger maple silver candle window garden rocket button yellow planet coffee "
    "basket mirror pencil winter bread circle desert engine feather guitar hammer island jacket kitten ladder meadow "
    "needle orange parrot rabbit spider ticket valley wagon",
    "heldout": "anchor cactus dolphin falcon ginger hazel jungle kettle lemon marble nectar pepper quartz saddle honey "
    "castle violin eagle pearl copper torch bridge",
}
WORDS["unseen"] = WORDS["heldout"]
EXTENSIONS = ("txt", "md")

VERIFIER = '''\
"""Passes when the work folder holds exactly the expected folders and texts (white space at a text's end aside)."""
import json, os, sys

def state(folder):
    found = {}
    for base, folders, files in os.walk(folder):
        for name in folders + files:
            path = os.path.join(base, name)
            key = os.path.relpath(path, folder)
            if os.path.islink(path) or not (os.path.isdir(path) or os.path.isfile(path)):
                return {"not a plain file": key}
            if os.path.isdir(path):
                found[key] = None
            else:
                with open(path, errors="replace") as f:
                    found[key] = f.read(100000).rstrip()
    return found

with open("expect.json") as f:
    expect = {k: v if v is None else v.rstrip() for k, v in json.load(f).items()}
found = state(sys.argv[1])
wrong = sorted(k for k in expect.keys() | found.keys() if (k in expect, expect.get(k)) != (k in found, found.get(k)))
print(json.dumps({"score": float(not wrong), "passed": not wrong, "wrong": wrong[:5]}))
'''


class Job(NamedTuple):
    """A shell job: its instruction, a command that does it, and the work folder before and after (None: a folder)."""

    instruction: str
    gold: str
    before: dict[str, str]
    after: dict[str, str | None]


class Source:
    """Seeded names and texts; all names of one task are different words."""

    def __init__(self, kind: str, seed: int, split: str) -> None:
        # `unseen` draws from its own stream, so that a note of an unseen kind is no held-out task in disguise.
        self.random = random.Random(f"{split}/{kind}/{seed}")
        self._words = WORDS[split].split()
        self.random.shuffle(self._words)
        self._taken = 0

    def word(self) -> str:
        self._taken += 1
        return self._words[self._taken - 1]

    def name(self) -> str:
        return f"{self.word()}.{self.random.choice(EXTENSIONS)}"

    def lines(self, low: int, high: int) -> list[str]:
        r = self.random
        return [" ".join(r.choice(self._words) for _ in range(r.randint(2, 4))) for _ in range(r.randint(low, high))]

    def text(self) -> str:
        return "\n".join(self.lines(2, 4)) + "\n"


def _delete(s: Source) -> Job:
    a, b, kept = s.name(), s.name(), s.text()
    return Job(f"Delete the file {a}", f"rm {a}", {a: "x\n", b: kept}, {b: kept})


def _rename(s: Source) -> Job:
    a, b, text = s.name(), s.name(), s.text()
    return Job(f"Rename the file {a} to {b}", f"mv {a} {b}", {a: text}, {b: text})


def _copy(s: Source) -> Job:
    a, b, text = s.name(), s.name(), s.text()
    return Job(f"Copy the file {a} to {b}", f"cp {a} {b}", {a: text}, {a: text, b: text})


def _mkdir(s: Source) -> Job:
    a = s.word()
    return Job(f"Create a folder named {a}", f"mkdir {a}", {}, {a: None})


def _lines(s: Source) -> Job:
    a, lines = s.name(), s.lines(3, 12)
    text = "\n".join(lines) + "\n"
    return Job(
        f"Count the lines of {a} and write the number to answer.txt",
        f"wc -l < {a} > answer.txt",
        {a: text},
        {a: text, "answer.txt": str(len(lines))},
    )


def _words(s: Source) -> Job:
    a, text = s.name(), s.text()
    return Job(
        f"Count the words of {a} and write the number to answer.txt",
        f"wc -w < {a} > answer.txt",
        {a: text},
        {a: text, "answer.txt": str(len(text.split()))},
    )


def _sort(s: Source) -> Job:
    a, words = s.name(), [s.word() for _ in range(5)]
    while words == sorted(words):
        s.random.shuffle(words)
    text = "\n".join(words) + "\n"
    return Job(
        f"Sort the lines of {a} and write the result to answer.txt",
        f"sort {a} > answer.txt",
        {a: text},
        {a: text, "answer.txt": "\n".join(sorted(words))},
    )


ONE_CALL: dict[str, Callable[[Source], Job]] = {
    "delete": _delete,
    "rename": _rename,
    "copy": _copy,
    "mkdir": _mkdir,
    "lines": _lines,
    "words": _words,
    "sort": _sort,
}
TRAINED = (*ONE_CALL, "note_delete", "note_rename", "note_mkdir", "note_lines", "note_sort")
UNSEEN = ("note_copy", "note_words")


def make(kind: str, seed: int, split: str) -> dict[str, Any]:
    """One task as plain data; `gold` is a sequence of commands that solves it."""
    source = Source(kind, seed, split)
    note = source.name() if kind.startswith("note_") else None
    job = ONE_CALL[kind.removeprefix("note_")](source)
    gold, before, after, instruction = [job.gold], job.before, job.after, job.instruction
    if note is not None:
        gold = [f"cat {note}", job.gold]
        before = {note: job.instruction + "\n", **before}
        after = {note: job.instruction, **after}
        instruction = f"Show {note} and do what it says"
    return {
        "task_id": f"{split}-{kind}-{seed:03d}",
        "kind": kind,
        "split": split,
        "instruction": instruction,
        "files": before,
        "verifier": {"verify.py": VERIFIER, "expect.json": json.dumps(after, sort_keys=True)},
        "arguments": ["{workspace}"],
        # The turn limit is the number of commands that are needed: the policy has no way to say that it is done.
        "turns": len(gold),
        "payload": json.dumps({"gold": gold}),
    }


def generate(train: int, heldout: int, unseen: int, seed: int) -> list[dict[str, Any]]:
    """So many tasks of each split, its kinds in turn."""
    out = []
    for split, count, kinds in (("train", train, TRAINED), ("heldout", heldout, TRAINED), ("unseen", unseen, UNSEEN)):
        for i in range(count):
            out.append(make(kinds[i % len(kinds)], seed * 1000 + i // len(kinds), split))
    return out
