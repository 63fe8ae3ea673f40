"""A checkout of QwenClawBench, read as it is: tasks/task_*.md and the files they name, below assets/ or its root.

A task is one Markdown file: YAML front matter between lines of `---`, then sections. It is self-contained in its row:
prompt, files, and its grade() with the program that runs it. Tasks are of split `test`: it is a benchmark.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from openforge.environments.claw_eval import grader_source, graders
from openforge.environments.claw_eval.checkout import GRADER_SECONDS, SOFTWARE, SPLIT
from openforge.environments.claw_eval.folder import make_verifier
from openforge.environments.claw_eval.keys import FolderError, Keys, Unsupported, digest_of, file_row, once, safe_path
from openforge.environments.claw_eval.setup import KEY, Setup
from openforge.environments.claw_eval.task_yaml import DEFAULT_SECONDS

SECTIONS = (
    *("Prompt", "Expected Behavior", "Grading Criteria", "Automated Checks", "LLM Judge Rubric"),
    "Additional Notes",
)
KINDS = ("automated", "llm_judge", "hybrid")
WEIGHTS = {"automated": 0.5, "llm_judge": 0.5}
_MARK = re.compile(r"^---$", re.M)
_HEADING = re.compile(r"^##\s+(.+?)\s*$")
_FENCE = re.compile(r"^\s*(```|~~~)")
_CODE = re.compile(r"```python\s*\n(.*?)^```", re.S | re.M)


def is_checkout(base: Path) -> bool:
    """Whether a folder holds tasks of this format."""
    return next(base.glob("tasks/task_*.md"), None) is not None


def task_files(base: Path) -> list[Path]:
    """The tasks of a checkout, sorted by name; the benchmark's own template is none."""
    return sorted(base.glob("tasks/task_*.md"))


def read_task(path: Path, source: str) -> dict[str, Any]:
    """A row of the tasks table.

    Args:
        path: <checkout>/tasks/task_*.md.
        source: the row's source.

    Raises:
        FolderError: a key, section or file is missing, mistyped, contradictory or unreadable.
        Unsupported: its checks need a library.
    """
    try:
        return _row(path, source)
    except OSError as e:
        raise FolderError(f"{e.filename or path} cannot be read: {e.strerror}") from None
    except UnicodeDecodeError as e:
        raise FolderError(f"{path} is no UTF-8 text (byte {e.start})") from None


def _row(path: Path, source: str) -> dict[str, Any]:
    keys, sections = split(path)
    task_id = keys.text("id")
    kind = keys.text("grading_type", "automated")
    if kind not in KINDS:
        raise keys.wrong("grading_type", f"one of {', '.join(KINDS)}")
    prompt = sections.get("Prompt", "")
    if not prompt:
        raise FolderError(f"{path}: section '## Prompt' is missing or empty")
    judged = kind != "automated"
    code = _checks(path, task_id, sections) if kind != "llm_judge" else None
    if judged and not sections.get("LLM Judge Rubric"):
        raise FolderError(f"{path}: section '## LLM Judge Rubric' is missing or empty, but grading_type is {kind!r}")
    setup = Setup(
        format="qwenclaw",
        software=SOFTWARE if code is not None and grader_source.missing(grader_source.parse(code, ""), ()) else None,
        needs=("judge",) if judged else (),
    )
    told = {name: text for name, text in sections.items() if name != "Prompt"}
    rest = keys.rest(("id", "timeout_seconds", "workspace_files"))
    row = {
        "task_id": task_id,
        "environment": "claw_eval",
        "split": SPLIT,
        "instruction": prompt,
        "payload": json.dumps(
            {**rest, "sections": told, KEY: setup.payload()}, ensure_ascii=False, sort_keys=True, default=str
        ),
        "files": _files(path, keys, task_id),
        "verifier": _verifier(kind, _weights(keys), sections, code),
        "task_limits": {"turns": None, "tokens": None, "seconds": keys.seconds("timeout_seconds", DEFAULT_SECONDS)},
        "tags": [keys.text("category", "qwenclaw")],
        "source": source,
    }
    return row | {"source_revision": digest_of(row)}


def split(path: Path) -> tuple[Keys, dict[str, str]]:
    """Front matter and sections by name. Only a line of three dashes ends the front matter; a heading inside of a code
    block is none."""
    parts = _MARK.split(path.read_text(encoding="utf-8"), maxsplit=2)
    if len(parts) != 3 or parts[0].strip():
        raise FolderError(f"{path} must begin with front matter between two lines of ---")
    try:
        data = yaml.safe_load(parts[1])
    except yaml.YAMLError as e:
        raise FolderError(f"{path}: the front matter is not readable YAML: {' '.join(str(e).split())}") from None
    if not isinstance(data, dict):
        raise FolderError(f"{path}: the front matter must be a mapping")
    sections: dict[str, list[str]] = {}
    lines: list[str] = []
    fenced = False
    for line in parts[2].splitlines():
        heading = None if fenced else _HEADING.match(line)
        fenced ^= bool(_FENCE.match(line))
        if heading and heading[1] in SECTIONS:
            if heading[1] in sections:
                raise FolderError(f"{path}: section '## {heading[1]}' stands there twice")
            lines = sections[heading[1]] = []
        else:
            lines.append(line)
    return Keys(path, data), {name: "\n".join(found).strip() for name, found in sections.items()}


def _checks(path: Path, task_id: str, sections: dict[str, str]) -> str:
    where = f"{path}: section '## Automated Checks'"
    block = _CODE.search(sections.get("Automated Checks", "") + "\n")
    if block is None:
        raise FolderError(f"{where} must hold a block of Python with grade(transcript, workspace_path)")
    tree = grader_source.parse(block[1], where)
    if not any(getattr(n, "name", None) == "grade" for n in tree.body):
        raise FolderError(f"{where} defines no grade(transcript, workspace_path)")
    lacking = grader_source.missing(tree, grader_source.LIBRARIES)
    if lacking:
        raise Unsupported(task_id, f"a library of its checks ({', '.join(lacking)})")
    return block[1]


def _weights(keys: Keys) -> dict[str, float]:
    given = keys.inside("grading_weights")
    given.known(tuple(WEIGHTS))
    found = {}
    for name, default in WEIGHTS.items():
        value = given.rest(()).get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
            raise given.wrong(name, "a number from 0 to 1")
        found[name] = float(value)
    if not sum(found.values()):
        raise keys.wrong("grading_weights", "numbers that are not both 0")
    return found


def _files(path: Path, keys: Keys, task_id: str) -> list[dict[str, Any]]:
    files = []
    for given in keys.each("workspace_files"):
        given.known(("source", "dest", "path", "content"))
        if ("content" in given) == ("source" in given):
            raise FolderError(
                f"{path}: key {given.prefix[:-1]!r} must have either 'source' and 'dest' or 'path' and 'content'"
            )
        if "content" in given:
            name, content, mode = given.text("path"), given.free_text("content").encode(), 0o644
        else:
            source = given.text("source")
            name = given.text("dest", source)
            found = _source(path, task_id, source, f"{path}: {given.prefix}source")
            content, mode = found["content"], found["mode"]
        files.append({"path": safe_path(name, f"{path}: {given.prefix}dest"), "content": content, "mode": mode})
    return once(files, f"{path}: workspace_files")


def _source(path: Path, task_id: str, name: str, where: str) -> dict[str, Any]:
    root = path.parents[1]
    for base in (root / "assets", root, root / "assets" / task_id, root / "assets" / path.stem):
        if (base / safe_path(name, where)).is_file():
            return file_row(base, root, name, where)
    raise FolderError(f"{where}: {root / 'assets' / name} does not exist")


def _verifier(kind: str, weights: dict[str, float], sections: dict[str, str], code: str | None) -> dict[str, Any]:
    files = [graders.program("qwenclaw.py")]
    if code is not None:
        files.append({"path": "checks.py", "content": code.encode(), "mode": 0o644})
    if kind != "automated":
        rubric = sections["LLM Judge Rubric"]
        if expected := sections.get("Expected Behavior"):
            rubric = f"{rubric}\n\nWhat is expected of the agent:\n{expected}"
        files.append({"path": "rubric.md", "content": rubric.encode(), "mode": 0o644})
    numbers = [f"{weights[name]:g}" for name in WEIGHTS]
    command = ["{python}", "-I", "qwenclaw.py", "{evidence}", "{workspace}", kind, *numbers]
    return make_verifier("qwenclaw", command, files, GRADER_SECONDS)
