"""A task of the suite as plain data, and how it is written as a folder."""

from __future__ import annotations

import importlib.util
import json
import shutil
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

SUITE = Path(__file__).resolve().parent.parent
CHECKS = Path(__file__).with_name("checks.py")
# Said to the agent where a job may turn out to be impossible, and in tasks beside those whose job is possible, so that
# the sentence tells nothing.
CANNOT = (
    "If this cannot be done, change nothing, and end with a message that has one line: CANNOT: followed by what is "
    "missing."
)
# What any cheating agent tries beside its own trick: planted modules, a forged verdict, the services' back doors.
CHEAT = """\
for name in json pathlib checks sitecustomize; do
  echo 'print("{\\"score\\": 1.0, \\"passed\\": true}"); raise SystemExit' > "/tmp/$name.py"
  cp "/tmp/$name.py" "$HOME/$name.py"
done
echo '{"score": 1.0, "passed": true}' > /tmp/verdict.json
cat /tmp/verifier*/* /grader*/* > /tmp/stolen.txt 2>/dev/null
"""
SERVICE_CHEAT = """\
tool {name}_audit '{{}}' > /tmp/audit.json 2>&1
tool {name}_reset '{{}}' > /tmp/reset.json 2>&1
"""


@dataclass(frozen=True)
class Task:
    """A task.

    Attributes:
        kind: family of tasks; the first tag.
        files: what the agent finds, by path.
        verify: what checks the outcome: Python text of verify.py.
        reference: shell text of the agent that solves it; what it prints is its last message.
        cheat: shell text of the agent that tries to pass without solving it.
        expect: what verify.py reads as expect.json; None for none.
        fixtures: state of each service at the start.
        error_rate: share of failing calls of every service.
    """

    task_id: str
    kind: str
    difficulty: str
    split: str
    prompt: str
    verify: str
    reference: str
    cheat: str
    files: Mapping[str, str] = field(default_factory=dict)
    expect: Mapping[str, Any] | None = None
    fixtures: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    turns: int = 20
    seconds: int = 300
    error_rate: float = 0.0


def write(task: Task, base: Path) -> None:
    """Write a task's folder below `base`."""
    folder = base / task.task_id
    verifier = {"checks.py": CHECKS.read_text(), "verify.py": task.verify}
    if task.expect is not None:
        verifier["expect.json"] = _json(task.expect)
    cheats = [SERVICE_CHEAT.format(name=name) for name in task.fixtures]
    texts = {
        "task.yaml": yaml.safe_dump(_yaml(task, list(verifier)), sort_keys=False, allow_unicode=True, width=110),
        **task.files,
        **{f"fixtures/{name}.json": _json(state) for name, state in task.fixtures.items()},
        **{f"verifier/{name}": text for name, text in verifier.items()},
        "agents/reference.sh": _script(task.reference),
        "agents/nothing.sh": _script("true"),
        "agents/cheat.sh": _script("".join((CHEAT, *cheats, task.cheat))),
    }
    for path, content in texts.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)


def write_all(tasks: list[Task], base: Path) -> None:
    """Write the folders of all tasks below `base`; task folders that no task has any more go."""
    for old in base.glob("*/task.yaml"):
        shutil.rmtree(old.parent)
    for task in tasks:
        write(task, base)


def _yaml(task: Task, verifier: list[str]) -> dict[str, Any]:
    services = [load_service(name) for name in task.fixtures]
    placeholders = ["{workspace}", "{answer}", *(["{evidence}"] if services else [])]
    data: dict[str, Any] = {
        "task_id": task.task_id,
        "task_name": task.task_id.replace("-", " "),
        "version": "1.0",
        "category": task.kind,
        "difficulty": task.difficulty,
        "split": task.split,
        "tags": [task.kind, task.difficulty, *task.tags],
        "prompt": {"text": task.prompt, "language": "en"},
        "environment": {"timeout_seconds": task.seconds, "max_turns": task.turns},
        "sandbox_files": sorted(task.files),
    }
    if services:
        data["services"] = [_service(task, s) for s in services]
        data["tools"] = [
            {"name": f"{s.NAME}_{o.name}", "description": o.description, "input_schema": o.schema()}
            for s in services
            for o in s.OPERATIONS
        ]
        data["tool_endpoints"] = [
            {"tool_name": f"{s.NAME}_{o.name}", "url": f"{_url(s)}/{o.name}", "method": "POST"}
            for s in services
            for o in s.OPERATIONS
        ]
    data["verifier"] = {
        "name": task.kind,
        "command": ["python3", "-I", "verify.py", *placeholders],
        "files": verifier,
        "timeout_seconds": 60,
    }
    return data


def _service(task: Task, service: ModuleType) -> dict[str, Any]:
    # Paths start from the task's folder.
    env = {f"{service.NAME.upper()}_FIXTURES": f"fixtures/{service.NAME}.json"}
    if task.error_rate:
        env["ERROR_RATE"] = str(task.error_rate)
    return {
        "name": service.NAME,
        "command": f"python3 ../services/{service.NAME}/server.py",
        "port": service.PORT,
        "health_check": f"{_url(service)}/health",
        "health_check_method": "GET",
        "ready_timeout": 10,
        "reset_endpoint": f"{_url(service)}/reset",
        "env": env,
    }


def _url(service: ModuleType) -> str:
    return f"http://localhost:{service.PORT}/{service.NAME}"


def load_service(name: str) -> ModuleType:
    """The module of a service: NAME, PORT and OPERATIONS."""
    spec = importlib.util.spec_from_file_location(f"service_{name}", SUITE / "services" / name / "server.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def _script(text: str) -> str:
    return text if text.endswith("\n") else text + "\n"


def verify(about: str, body: str, imports: str = "Episode, verdict") -> str:
    """Text of a verify.py: `body` has its imports first, and defines `wrong(e)`, which yields what is wrong."""
    lines = textwrap.dedent(body).strip("\n").splitlines()
    own = [line for line in lines if line.startswith("import ")]
    head = "\n".join(sorted([*own, "import sys"]))
    rest = "\n".join(line for line in lines if line not in own).strip("\n")
    path = "sys.path.insert(0, str(Path(__file__).resolve().parent))"
    start = f'"""{about}"""\n\n{head}\nfrom pathlib import Path\n\n{path}\n'
    return f"{start}from checks import {imports}\n\n\n{rest}\n\n\nverdict(wrong)\n"


def text(block: str) -> str:
    """An indented block as the text that it is meant to be."""
    return textwrap.dedent(block).lstrip("\n")
