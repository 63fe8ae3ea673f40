"""Task folders in ClawEval's format: read one as a row of the tasks table, write a row as one.

    <folder>/task.yaml     the format's own keys, plus `split` and `verifier`
    <folder>/<path>        what `sandbox_files` lists; it stands at /workspace/<path> when the agent starts
    <folder>/verifier/...  what `verifier.files` lists; it enters the sandbox after the agent is dead

`verifier: {command, files, timeout_seconds, name}` is an extra key: a program that prints one JSON line
(`openforge.environments.verdict`). Paths in `services` are relative to the folder and may lead to a neighbour
(`../services/mail/server.py`). Unknown keys at the top are kept in the row's payload and written back.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from openforge.config import ConfigError, read_yaml
from openforge.environments.claw_eval import agents, task_yaml
from openforge.environments.claw_eval.keys import (
    FolderError,
    Keys,
    Unsupported,
    digest_of,
    file_row,
    once,
    safe_path,
    write_file,
)
from openforge.environments.claw_eval.setup import KEY, LATE, LOCAL, Setup
from openforge.tables import write_beside

__all__ = [
    "PLACEHOLDERS",
    "FolderError",
    "Unsupported",
    "check_placeholders",
    "doubled_id",
    "make_verifier",
    "near_misses",
    "once",
    "read_folder",
    "safe_path",
    "task_folders",
    "write_folder",
]

_OWN = ("task_id", "split", "tags", "sandbox_files", "sandbox_grader_files", "verifier")
_RESERVED = ("task.yaml", "grader.py", "verifier", LATE, LOCAL)
_VERIFIER_KEYS = ("name", "command", "files", "timeout_seconds")
# Words of verifier.command that the environment fills in.
PLACEHOLDERS = ("{answer}", "{workspace}", "{evidence}", "{python}")
# Keys that the format documents, by the mapping they stand in. Others occur, so that they are no errors.
_KNOWN = {
    "": (
        *("task_id", "task_name", "version", "category", "difficulty", "tags", "split", "prompt", "environment"),
        *("tools", "tool_endpoints", "services", "user_agent", "scoring_components", "safety_checks", "verifier"),
        *("expected_actions", "judge_rubric", "reference_solution", "primary_dimensions", "sandbox_files"),
        *("sandbox_grader_files", "local_grader_files", "env_snapshot_files", "env_snapshot_commands"),
    ),
    "prompt": ("text", "language", "attachments"),
    "environment": (
        *("timeout_seconds", "max_turns", "max_tokens", "fixtures", "env_snapshot_timeout"),
        *("enable_todo", "enable_compact"),
    ),
}


def task_folders(base: Path) -> tuple[list[Path], list[Path]]:
    """Folders below `base`, sorted: those with a task.yaml, and the others that are not hidden.

    Raises:
        OSError: `base` cannot be listed.
    """
    tasks, others = [], []
    for path in sorted(base.iterdir()):
        try:
            is_task = (path / "task.yaml").exists()
            is_other = path.is_dir() and not path.name.startswith(".")
        except OSError:
            # Reading it says why it cannot be read; nothing is left out in silence.
            is_task, is_other = True, False
        if is_task:
            tasks.append(path)
        elif is_other:
            others.append(path)
    return tasks, others


def doubled_id(ids: Mapping[Any, str], what: str = "folders") -> str | None:
    """The sentence on a task_id that several places (paths, or texts) have; None if all differ."""
    by_id: dict[str, list[str]] = {}
    for place, task_id in ids.items():
        by_id.setdefault(task_id, []).append(place.name if isinstance(place, Path) else str(place))
    for task_id, names in by_id.items():
        if len(names) > 1:
            return f"task_id {task_id!r} stands in several {what} ({', '.join(names)}); ids must differ"
    return None


def near_misses(path: Path) -> list[str]:
    """Unknown keys of a task.yaml that look like a known one's misspelling, a sentence each.

    They are no errors: the format's own tasks have unknown keys. A task.yaml that cannot be read has none.
    """
    try:
        data = read_yaml(path / "task.yaml")
    except ConfigError:
        return []
    found = []
    for where, known in _KNOWN.items():
        keys = data.get(where) if where else data
        for key in keys if isinstance(keys, dict) else ():
            close = [] if key in known else difflib.get_close_matches(str(key), known, n=1, cutoff=0.8)
            prefix = f"{where}." if where else ""
            found += [f"key {prefix + key!r} has no effect here; did you mean {prefix + c!r}?" for c in close]
    return found


def read_folder(path: Path, split: str | None = None, source: str | None = None) -> dict[str, Any]:
    """A row of the tasks table.

    Args:
        path: the task's folder.
        split: split of a task whose task.yaml names none.
        source: the row's source; the name of the folder that holds the task folders without it.

    Raises:
        FolderError: a file or key is missing, mistyped or unreadable.
        Unsupported: the task has ClawEval's own grader and no checkout around it.
    """
    try:
        return _row(path, split, source)
    except OSError as e:
        raise FolderError(f"{e.filename or path} cannot be read: {e.strerror}") from None


def _row(path: Path, split: str | None, source: str | None) -> dict[str, Any]:
    keys = Keys.of(path / "task.yaml")
    task_id = keys.text("task_id")
    if "verifier" not in keys and ((path / "grader.py").exists() or "scoring_components" in keys):
        raise Unsupported(task_id, "the ClawEval checkout around its grader.py")
    keys.mapping("environment", {})
    prompt = keys.mapping("prompt")
    setup, data = _setup(path, keys)
    row = {
        "task_id": task_id,
        "environment": "claw_eval",
        "split": keys.text("split", split),
        "instruction": Keys(keys.file, prompt, "prompt.").text("text"),
        "payload": agents.with_agents(payload(keys, setup, _OWN), path),
        "files": _agent_files(path, keys, data),
        "verifier": _read_verifier(path, keys, setup),
        "task_limits": task_yaml.task_limits(keys.inside("environment")),
        "tags": keys.strings("tags", []),
        "source": source or path.resolve().parent.name,
    }
    return row | {"source_revision": digest_of(row)}


def _setup(path: Path, keys: Keys) -> tuple[Setup, list[Path]]:
    """The set-up of a folder, and the services' own data in it."""
    services = task_yaml.services(keys, strict=True)
    named = task_yaml.service_paths(services, keys, path)
    root, shown, data = path.resolve().parent, [], []
    for found in named.values():
        for where, place in found:
            if not place.exists():
                raise FolderError(f"{where}: {place} does not exist")
            if where.endswith(".command"):
                shown.append(task_yaml.program_folder(place, path if _in(place, path) else root))
            else:
                shown.append(place)
                data.append(place)
    if services:
        shown.append(path / "task.yaml")  # so that the folder exists where services start in it
    snapshot = task_yaml.snapshot(keys, keys.inside("environment"))
    user = task_yaml.user(keys, strict=True)
    late = keys.strings("sandbox_grader_files", []) if snapshot is not None and snapshot.commands else []
    setup = Setup(
        services=services,
        tools=task_yaml.tools(keys, [s.port for s in services], strict=True),
        tree=task_yaml.tree(root, shown),
        cwd=task_yaml.tree_cwd(root, path) if services else Setup.cwd,
        user=user,
        attachments=tuple(keys.inside("prompt").strings("attachments", [])),
        snapshot=snapshot,
        late=tuple(late),
        local=tuple(keys.strings("local_grader_files", [])),
        needs=("user",) if user is not None else (),
    )
    return setup, data


def _in(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())


def payload(keys: Keys, setup: Setup, own: Sequence[str]) -> str:
    """The column payload: what no column holds, and the set-up where there is one."""
    rest = keys.rest((*own, "prompt", "environment"))
    prompt = keys.inside("prompt").rest(("text",))
    environment = keys.inside("environment").rest(("timeout_seconds", "max_turns", "max_tokens"))
    rest |= ({"prompt": prompt} if prompt else {}) | ({"environment": environment} if environment else {})
    if setup != Setup():
        rest[KEY] = setup.payload()
    return json.dumps(rest, ensure_ascii=False, sort_keys=True, default=str)


def write_folder(path: Path, row: Mapping[str, Any]) -> None:
    """Write a row of the tasks table as a folder; `read_folder` gives the same row back.

    Raises:
        FolderError: a file of the row cannot stand in a task folder.
    """
    limits, verifier = row["task_limits"], row["verifier"]
    rest = json.loads(row["payload"])
    if not isinstance(rest, dict):
        raise FolderError(f"task {row['task_id']!r}: the payload must be a JSON object to be written as task.yaml")
    scripts = rest.pop(agents.KEY, {})
    if rest.pop(KEY, {}).get("tree"):
        raise FolderError(
            f"task {row['task_id']!r}: it has services, whose programs stand in its source and not in the row"
        )
    environment: dict[str, Any] = {
        **rest.pop("environment", {}),
        "timeout_seconds": limits["seconds"],
        "max_turns": limits["turns"],
    }
    if limits["tokens"] is not None:
        environment["max_tokens"] = limits["tokens"]
    data = {
        "task_id": row["task_id"],
        "split": row["split"],
        "tags": list(row["tags"]),
        "prompt": {"text": row["instruction"], **rest.pop("prompt", {})},
        "environment": environment,
        "sandbox_files": [f["path"] for f in row["files"]],
        "verifier": {
            "name": verifier["name"],
            "command": list(verifier["command"]),
            "files": [f["path"] for f in verifier["files"]],
            "timeout_seconds": verifier["seconds"],
        },
        **rest,
    }
    for f in row["files"]:
        if PurePosixPath(f["path"]).parts[0] in _RESERVED:
            raise FolderError(f"task {row['task_id']!r}: a task's file cannot be named {f['path']!r} in a task folder")
        write_file(path, f)
    for f in verifier["files"]:
        write_file(path / "verifier", f)
    for name, script in scripts.items():
        write_beside(path / "agents" / f"{name}.sh", script)
    write_beside(path / "task.yaml", yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=100))


def make_verifier(
    name: str, command: Sequence[str], files: Sequence[Mapping[str, Any]], seconds: float
) -> dict[str, Any]:
    """The `verifier` column; its version is the digest of what it runs."""
    body = {"command": list(command), "files": [dict(f) for f in files]}
    return {"name": name, "version": digest_of(body), **body, "seconds": float(seconds)}


def check_placeholders(command: Sequence[str], where: str) -> None:
    """Raises `FolderError` for a word in braces that the environment does not fill in."""
    for word in command:
        if re.fullmatch(r"\{\w+\}", word) and word not in PLACEHOLDERS:
            raise FolderError(f"{where}: unknown placeholder {word}; known: {', '.join(PLACEHOLDERS)}")


def _agent_files(path: Path, keys: Keys, data: Sequence[Path]) -> list[dict[str, Any]]:
    """What the agent finds in its work folder."""
    files = task_yaml.agent_files(path, keys, data)
    for f in files:
        if _in(path / f["path"], path / "verifier"):
            key = "sandbox_files" if keys.rest(()).get("sandbox_files") else "environment.fixtures"
            raise FolderError(
                f"{keys.file}: {key}: {f['path']!r} lies in verifier/; the agent would see what judges it"
            )
    return files


def _read_verifier(path: Path, keys: Keys, setup: Setup) -> dict[str, Any]:
    given = Keys(keys.file, keys.mapping("verifier"), "verifier.")
    given.known(_VERIFIER_KEYS)
    where = f"{keys.file}: verifier.files"
    files = [file_row(path / "verifier", path, f, where) for f in given.strings("files", [])]
    # The format's own grader-only files come in with the verifier's, at the same time and place.
    grader = keys.strings("sandbox_grader_files", [])
    files += [file_row(path, path, f, f"{keys.file}: sandbox_grader_files") for f in grader]
    once(files, f"{where} and sandbox_grader_files" if grader else where)
    files += [below(LATE, file_row(path, path, f, f"{keys.file}: sandbox_grader_files")) for f in setup.late]
    files += [below(LOCAL, file_row(path, path, f, f"{keys.file}: local_grader_files")) for f in setup.local]
    command = given.strings("command")
    if not command:
        raise FolderError(f"{keys.file}: key 'verifier.command' must not be empty")
    check_placeholders(command, f"{keys.file}: verifier.command")
    seconds = given.seconds("timeout_seconds", None)
    if seconds is None:
        raise FolderError(f"{keys.file}: key 'verifier.timeout_seconds' is required (seconds the verifier may run)")
    return make_verifier(given.text("name", "verifier"), command, files, seconds)


def below(folder: str, file: Mapping[str, Any]) -> dict[str, Any]:
    """A FILE moved into a folder of the verifier's."""
    return {**file, "path": f"{folder}/{file['path']}"}
