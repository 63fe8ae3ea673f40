"""Runs the automated checks of a QwenClawBench task, as published, on a work folder; prints one JSON line.

    qwenclaw.py EVIDENCE WORKSPACE TYPE AUTOMATED LLM_JUDGE

checks.py beside it holds the task's grade(transcript, workspace_path), rubric.md its rubric; TYPE is automated,
llm_judge or hybrid, the numbers are the weights of the two parts. Exit codes: 0 with a verdict; 1 for checks that raise
or give a score outside of 0..1, with the reason on standard error.

score = mean of the checks. Where the rubric has a part, the line leaves it to the stage score: all of it (llm_judge),
or its weight (hybrid), where it counts 0 if the checks' mean is below 0.75. Passed from 0.75 on.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import traceback
from pathlib import Path
from typing import Any

PASS = 0.75


class GraderError(Exception):
    """Checks that give no score; the message says why."""


def main(argv: list[str]) -> int:
    sys.dont_write_bytecode = True
    evidence, workspace, kind = Path(argv[0]), argv[1], argv[2]
    weights = {"automated": float(argv[3]), "llm_judge": float(argv[4])}
    try:
        # Checks may print: their words must not be taken for the verdict.
        with contextlib.redirect_stdout(sys.stderr):
            line = grade(evidence, workspace, kind, weights)
    except GraderError as e:
        print(e, file=sys.stderr)
        return 1
    except Exception as e:
        traceback.print_exc()
        print(f"grade() raised {type(e).__name__}: {e}", file=sys.stderr)
        return 1
    print(json.dumps(line))
    return 0


def grade(evidence: Path, workspace: str, kind: str, weights: dict[str, float]) -> dict[str, Any]:
    """The verdict."""
    line: dict[str, Any] = {"score": 0.0, "passed": False}
    if kind != "llm_judge":
        messages = json.loads((evidence / "messages.json").read_text(encoding="utf-8"))
        checks = run_checks(transcript(messages), workspace)
        score = round(sum(checks.values()) / len(checks), 6)
        line |= {"score": score, "passed": score >= PASS, "checks": checks}
    if kind != "automated":
        share = 1.0 if kind == "llm_judge" else weights["llm_judge"] / sum(weights.values())
        rubric = Path(os.path.abspath(__file__)).with_name("rubric.md").read_text(encoding="utf-8")
        gate = 0.0 if kind == "llm_judge" else PASS
        line["judge"] = {"rubric": rubric, "weight": share, "gate": gate, "threshold": PASS}
    return line


def run_checks(events: list[dict[str, Any]], workspace: str) -> dict[str, float]:
    """What grade() says, by check."""
    source = Path(os.path.abspath(__file__)).with_name("checks.py")
    space: dict[str, Any] = {"__name__": "checks"}
    exec(compile(source.read_text(encoding="utf-8"), "checks.py", "exec"), space)
    found = space["grade"](events, workspace)
    if not isinstance(found, dict) or not found:
        raise GraderError(f"grade() gave {found!r}; it must be a mapping from checks to scores")
    out: dict[str, float] = {}
    for name, value in found.items():
        number = isinstance(value, (int, float))  # True and False are scores here
        if not number or not math.isfinite(value) or not 0 <= value <= 1:
            raise GraderError(f"grade() gave {name!r} {value!r}; it must be a number from 0 to 1")
        out[str(name)] = float(value)
    return out


def transcript(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation as events of an OpenClaw session, which is what grade() is written for."""
    names: dict[str, str] = {}
    out: list[dict[str, Any]] = []
    for message in messages:
        content: list[dict[str, Any]] = []
        for block in message["content"]:
            if block["type"] == "text":
                content.append({"type": "text", "text": block["text"]})
            elif block["type"] == "tool_use":
                names[block["id"]] = block["name"]
                call = {"type": "toolCall", "id": block["id"], "name": block["name"], "arguments": block["input"]}
                content.append(call)
            else:
                result = {
                    "role": "toolResult",
                    "toolCallId": block["tool_use_id"],
                    "toolName": names.get(block["tool_use_id"], ""),
                    "content": block["content"],
                    "isError": block["is_error"],
                }
                out.append({"type": "message", "message": result})
        if content:
            out.append({"type": "message", "message": {"role": message["role"], "content": content}})
    return out


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
