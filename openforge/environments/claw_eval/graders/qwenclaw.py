"""Runs the automated checks of a QwenClawBench task, as published, on a work folder; prints one JSON line.

    qwenclaw.py EVIDENCE WORKSPACE TYPE AUTOMATED LLM_JUDGE

checks.py beside it holds the task's grade(transcript, workspace_path), task.json its texts; TYPE is automated,
llm_judge or hybrid, the numbers are the weights of the two parts. Exit codes as claweval.py's.

score = mean of the checks (automated), the judge's (llm_judge), or their weighted mean (hybrid), where the judge's part
counts 0 if the checks' is below 0.75; passed from 0.75 on.
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

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import judge as judges  # type: ignore[import-not-found]

JUDGE_FAILED = 75
PASS = 0.75
RESULT_CHARS = 2000  # of a tool's result that the judge is shown


class GraderError(Exception):
    """Checks that give no score; the message says why."""


def main(argv: list[str]) -> int:
    sys.dont_write_bytecode = True  # a checkout is read in place
    evidence, workspace, kind = Path(argv[0]), argv[1], argv[2]
    weights = {"automated": float(argv[3]), "llm_judge": float(argv[4])}
    judge = judges.of_environment()
    if judge is None and kind != "automated":
        print("the task's rubric asks a judge, and none is configured", file=sys.stderr)
        return JUDGE_FAILED
    try:
        with contextlib.redirect_stdout(sys.stderr):
            line = grade(evidence, workspace, kind, weights, judge)
    except judges.JudgeFailed as e:
        print(e, file=sys.stderr)
        return JUDGE_FAILED
    except GraderError as e:
        print(e, file=sys.stderr)
        return 1
    except Exception as e:
        traceback.print_exc()
        print(f"grade() raised {type(e).__name__}: {e}", file=sys.stderr)
        return 1
    print(json.dumps(line))
    return 0


def grade(evidence: Path, workspace: str, kind: str, weights: dict[str, float], judge: Any) -> dict[str, Any]:
    """The verdict."""
    messages = json.loads((evidence / "messages.json").read_text(encoding="utf-8"))
    parts: dict[str, float] = {}
    told: dict[str, Any] = {}
    if kind != "llm_judge":
        checks = run_checks(transcript(messages), workspace)
        told["checks"] = checks
        parts["automated"] = sum(checks.values()) / len(checks)
    if kind != "automated":
        if parts.get("automated", 1.0) < PASS:
            parts["llm_judge"] = 0.0  # the judge is not asked: its answer counts nothing
        else:
            parts["llm_judge"] = ask(judge, messages)
    mean = sum(weights[k] * v for k, v in parts.items()) / sum(weights.values())
    score = round(mean if kind == "hybrid" else parts[kind], 6)
    calls = judge.get_call_log() if judge is not None else []
    return {"score": score, "passed": score >= PASS, **parts, **told, "judge_calls": calls}


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


def ask(judge: Any, messages: list[dict[str, Any]]) -> float:
    """The judge's score of the conversation by the task's rubric."""
    task = json.loads(Path(os.path.abspath(__file__)).with_name("task.json").read_text(encoding="utf-8"))
    lines = []
    for event in transcript(messages):
        message = event["message"]
        for item in message["content"]:
            if item["type"] == "toolCall":
                lines.append(f"[call] {item['name']} {json.dumps(item['arguments'], ensure_ascii=False)}")
            else:
                lines.append(f"[{message['role']}] {item['text'][:RESULT_CHARS]}")
    expected = f"Expected behavior:\n{task['expected']}"
    found = judge.evaluate(f"{task['prompt']}\n\n{expected}", "\n".join(lines), "", task["rubric"])
    return float(found.score)


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
