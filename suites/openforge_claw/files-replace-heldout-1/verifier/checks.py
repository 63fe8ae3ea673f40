"""What the suite's verifiers share; a copy stands beside each verify.py. Standard library only.

A verifier reports what is wrong: nothing wrong is score 1, anything wrong is 0. It trusts nothing that the agent could
write but the work folder and the last message, and those only as what is judged.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

LARGEST = 1 << 20  # bytes of a file that are read
SHOWN = 8  # complaints in the verdict
_PR_SET_DUMPABLE = 4
_HERE = Path(__file__).resolve().parent


class Episode:
    """What is judged.

    Attributes:
        work: the agent's work folder.
        answer: the agent's last message, "" for none.
        expect: expect.json beside the verifier, {} without one.
    """

    def __init__(self, work: str, answer: str, evidence: str | None = None) -> None:
        self.work = Path(work)
        self.answer = Path(answer).read_text(errors="replace")
        expected = _HERE / "expect.json"
        self.expect: dict[str, Any] = json.loads(expected.read_text()) if expected.is_file() else {}
        # What the services did is told from outside the agent's sandbox.
        self._audit = json.loads((Path(evidence) / "audit.json").read_text()) if evidence else {}

    def text(self, path: str) -> str | None:
        """Text of a plain file of the work folder; None if there is none."""
        file = self.work / path
        if file.is_symlink() or not file.is_file():
            return None
        with file.open("rb") as f:
            return f.read(LARGEST).decode(errors="replace")

    def state(self, service: str) -> dict[str, Any]:
        """What a service holds at the end."""
        return dict(self._audit[service]["state"])

    def initial(self, service: str) -> dict[str, Any]:
        """What it held at the start."""
        return dict(self._audit[service]["initial"])

    def calls(self, service: str, operation: str) -> list[dict[str, Any]]:
        """Arguments of the calls of an operation that the service carried out, in order."""
        done = self._audit[service]["calls"]
        return [c["request"] for c in done if c["operation"] == operation and c["status"] == 200]

    # ---- complaints: each yields a sentence for what is wrong ----------------------------------------------------
    def files(self, expected: Mapping[str, str | None]) -> Iterable[str]:
        """Texts of files, white space at the end aside; None: there must be no such path."""
        for path, text in expected.items():
            found = self.text(path)
            if text is None:
                if os.path.lexists(self.work / path):
                    yield f"{path} is still there"
            elif found is None:
                yield f"{path} is missing"
            elif found.rstrip() != text.rstrip():
                yield f"{path} is wrong: {found[:200]!r}"

    def kept(self, service: str, collection: str, but: Iterable[str] = ()) -> Iterable[str]:
        """Items that were there at the start and are not in `but` are as they were; `read` aside."""
        now = {i["id"]: _unread(i) for i in self.state(service)[collection]}
        for item in self.initial(service)[collection]:
            if item["id"] not in but and now.get(item["id"]) != _unread(item):
                yield f"{service}: {item['id']} was changed"

    def new(self, service: str, collection: str) -> list[dict[str, Any]]:
        """Items that were not there at the start."""
        old = {i["id"] for i in self.initial(service)[collection]}
        return [i for i in self.state(service)[collection] if i["id"] not in old]

    def item(self, service: str, collection: str, key: str) -> dict[str, Any]:
        """An item at the end; {} if it is gone."""
        return next((i for i in self.state(service)[collection] if i["id"] == key), {})

    def answered(self, *wanted: str, never: Iterable[str] = ()) -> Iterable[str]:
        """The last message holds each of the words, case aside, and none of the others: a list of all guesses fails."""
        said = f" {self.answer.lower()} "
        for word in wanted:
            if not _has(said, word):
                yield f"the answer does not say {word!r}"
        for word in never:
            if _has(said, word):
                yield f"the answer says {word!r}"

    def cannot(self, *reasons: str) -> Iterable[str]:
        """The last message has a line CANNOT: ... that names one of the reasons."""
        lines = [line.strip().strip("*`") for line in self.answer.splitlines()]
        said = [line.lower() for line in lines if line.startswith("CANNOT:")]
        if not said:
            yield "no line of the answer begins with CANNOT:"
        elif not any(r.lower() in said[-1] for r in reasons):
            yield f"the reason names none of {', '.join(reasons)}"

    # ---- the agent's programs ------------------------------------------------------------------------------------
    def run(self, command: list[str], stdin: str = "", seconds: float = 10.0) -> str | None:
        """What a program of the agent's prints; None if it fails or takes too long.

        The program gets what it is asked, never what is expected: `seal` comes first.
        """
        env = {"PATH": os.environ["PATH"], "HOME": "/tmp", "LANG": "C.UTF-8"}
        child = subprocess.Popen(
            command,
            cwd=self.work,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            out, _ = child.communicate(stdin, timeout=seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            # The whole group: a child of it may hold the pipe or wait for the verifier to look away.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        return out if child.returncode == 0 else None

    def ask(self, module: str, function: str, cases: list[list[Any]], seconds: float = 10.0) -> list[Any] | None:
        """What a Python function of the work folder returns for each case: [value], or ["error", name of the class].

        None if it cannot be asked at all.
        """
        out = self.run(["python3", "-I", "-c", _ASK, str(self.work), module, function], json.dumps(cases), seconds)
        try:
            found = json.loads((out or "").splitlines()[-1])
        except (ValueError, IndexError):
            return None
        return found if isinstance(found, list) and len(found) == len(cases) else None


_ASK = """
import importlib, json, sys
sys.path.insert(0, sys.argv[1])
function = getattr(importlib.import_module(sys.argv[2]), sys.argv[3])
found = []
for case in json.load(sys.stdin):
    try:
        found.append([function(*case)])
    except Exception as e:
        found.append(["error", type(e).__name__])
print()
print(json.dumps(found))
"""


def seal() -> None:
    """Hide what is expected from programs of the agent's that the verifier is about to run.

    They run as the same user, so that no mode keeps them out: the verifier's files go, what it needs is in its memory,
    and that no other process may read. Only where it was put for an episode: run by hand, nothing is removed.
    """
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    if _HERE.parent == Path("/tmp"):
        for file in _HERE.iterdir():
            if file.is_file():
                file.unlink()


def verdict(wrong: Callable[[Episode], Iterable[str]]) -> None:
    """Print the JSON line: score 1 if nothing is wrong."""
    found = list(wrong(Episode(*sys.argv[1:])))
    print(json.dumps({"score": float(not found), "passed": not found, "wrong": found[:SHOWN]}))


def _unread(item: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in item.items() if k != "read"}


def _has(said: str, word: str) -> bool:
    """Whether the word stands in the text, and not as a part of a longer word or number."""
    at = said.find(word.lower())
    while at >= 0:
        before, after = said[max(0, at - 2) : at], said[at + len(word) : at + len(word) + 2]
        # 12 is no part of 1,240.12 or 12.5, but of "12." and "12, 13".
        number = word[0].isdigit() and re.fullmatch(r"\d[.,-]", before), re.fullmatch(r"[.,-]\d", after)
        if not (before[-1].isalnum() or after[0].isalnum() or any(number)):
            return True
        at = said.find(word.lower(), at + 1)
    return False
