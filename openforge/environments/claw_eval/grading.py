"""Runs a task's verifier on evidence that stands, outside of an episode: to grade once more, with a judge or without.

An episode's own verdict is made in a sandbox (env.py). Here it is a process of this host that sees copies in a scratch
folder; what it runs is the checkout's own grader, what it reads are texts. Do not grade so what runs an agent's files.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openforge.environments.claw_eval import setup as setups
from openforge.environments.claw_eval.evidence import JUDGE_FAILED, JUDGE_KEY, JUDGE_MODEL, JUDGE_URL, TREE, Evidence
from openforge.environments.claw_eval.keys import write_file
from openforge.environments.verdict import VerdictError, parse

MESSAGE = 300


@dataclass(frozen=True)
class Endpoint:
    """A judge: an OpenAI-compatible endpoint; `url` is with its /v1."""

    url: str
    model: str
    key: str = field(default="", repr=False)

    def env(self) -> dict[str, str]:
        return {JUDGE_URL: self.url, JUDGE_MODEL: self.model, JUDGE_KEY: self.key}


@dataclass(frozen=True)
class Graded:
    """What came of it.

    Attributes:
        status: scored, verifier_failed, verifier_timeout or judge_failed.
        output: the verifier's JSON line where it is scored.
        message: one sentence where it is not.
    """

    status: str
    output: str | None = None
    message: str | None = None


def grade(
    task: Mapping[str, Any],
    evidence: Evidence,
    python: Path,
    *,
    workspace: Path | None = None,
    judge: Endpoint | None = None,
) -> Graded:
    """Run the verifier of a row of the tasks table.

    Args:
        python: Python of the task's software (`setup.Setup.software`).
        workspace: the work folder that the agent left; an empty one without.
    """
    verifier, setup = task["verifier"], setups.of(task)
    for tree in setup.tree:
        if (changed := tree.changed()) is not None:
            return Graded("verifier_failed", message=changed)
    with tempfile.TemporaryDirectory(prefix="openforge-grading-") as scratch:
        base = Path(scratch)
        folder, shown, empty = base / "verifier", base / "tree", base / "work"
        for made in (folder, shown, empty, base / "home"):
            made.mkdir()
        for file in verifier["files"]:
            write_file(folder, file)
        for name, content in evidence.files().items():
            write_file(folder, {"path": f"evidence/{name}", "content": content, "mode": 0o600})
        for tree in setup.tree:
            place = shown / tree.path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(tree.host)
        places = {
            "{answer}": str(folder / "evidence" / "answer"),
            "{workspace}": str(workspace or empty),
            "{evidence}": str(folder / "evidence"),
            "{python}": str(python),
            TREE: str(shown),
        }
        env = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(base / "home"),
            "LANG": "C.UTF-8",
            **(judge.env() if judge is not None else {}),
        }
        return _run([places.get(w, w) for w in verifier["command"]], folder, env, verifier["seconds"])


def _run(command: list[str], cwd: Path, env: dict[str, str], seconds: float) -> Graded:
    # A session of its own: what it started is killed with it.
    with subprocess.Popen(
        command,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return Graded("verifier_timeout", message=f"the verifier was killed after {seconds:g} s")
    told = err.decode(errors="replace").strip()[-MESSAGE:] or "it printed no error"
    if process.returncode == JUDGE_FAILED:
        return Graded("judge_failed", message=told.splitlines()[-1])
    if process.returncode != 0:
        return Graded("verifier_failed", message=f"the verifier exited with code {process.returncode}: {told}")
    lines = out.decode(errors="replace").strip().splitlines()
    try:
        parse(lines[-1] if lines else "")
    except VerdictError as e:
        return Graded("verifier_failed", message=str(e))
    return Graded("scored", output=lines[-1])
