"""A checkout of ClawEval, read in place and as it is: tasks/<ID>, mock_services/ and src/claw_eval at its root.

A task's own files are copied into its row; what its services and grader run from is named there, with a digest
(`setup.Tree`): mock_services/, the claw_eval package, the task's folder and the graders of its peers, which English
variants inherit from. Tasks are of split `test`: it is a benchmark, and `train` would be trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openforge.environments.claw_eval import grader_source, graders, task_yaml
from openforge.environments.claw_eval.evidence import TREE
from openforge.environments.claw_eval.folder import below, make_verifier, payload
from openforge.environments.claw_eval.keys import FolderError, Keys, Unsupported, digest_of, file_row
from openforge.environments.claw_eval.setup import LATE, LOCAL, Service, Setup

SPLIT = "test"
SOFTWARE = "tasks-claweval"
# A grader may ask a judge a few times, in the stage score; without one it is done in a second.
GRADER_SECONDS, JUDGED_SECONDS = 120.0, 900.0
_OWN = ("task_id", "split", "tags", "sandbox_files", "sandbox_grader_files")
# Services that only the live web can answer for.
_LIVE = "web_real"


def is_checkout(base: Path) -> bool:
    """Whether a folder is a checkout: task folders below tasks/, and the package or services beside it."""
    tree = (base / "src" / "claw_eval").is_dir() or (base / "mock_services").is_dir()
    return tree and next(base.glob("tasks/*/task.yaml"), None) is not None


def task_folders(base: Path) -> list[Path]:
    """The tasks of a checkout, sorted by name."""
    return sorted(p.parent for p in base.glob("tasks/*/task.yaml"))


def read_task(path: Path, source: str) -> dict[str, Any]:
    """A row of the tasks table.

    Args:
        path: <checkout>/tasks/<ID>.
        source: the row's source.

    Raises:
        FolderError: a file or key is missing, mistyped, contradictory or unreadable.
        Unsupported: it needs the live web, a library, or a file that is not in the checkout.
    """
    try:
        return _row(path, path.resolve().parents[1], source)
    except OSError as e:
        raise FolderError(f"{e.filename or path} cannot be read: {e.strerror}") from None


def _row(path: Path, root: Path, source: str) -> dict[str, Any]:
    keys = Keys.of(path / "task.yaml")
    task_id = keys.text("task_id")
    keys.mapping("environment", {})
    prompt = Keys(keys.file, keys.mapping("prompt"), "prompt.")
    services = task_yaml.services(keys, strict=False)
    if any(_LIVE in s.command or s.name.startswith(_LIVE) for s in services):
        raise Unsupported(task_id, "the live web")
    _there(task_id, path, keys)
    shown, data = _service_tree(task_id, root, services, keys)
    graders_of, judged = _graders(task_id, path, root)
    user = task_yaml.user(keys, strict=False)
    late, local = keys.strings("sandbox_grader_files", []), keys.strings("local_grader_files", [])
    _runs_inside(task_id, path, late)
    setup = Setup(
        format="claweval",
        services=services,
        tools=task_yaml.tools(keys, [s.port for s in services], strict=False),
        tree=task_yaml.tree(root, [*shown, *graders_of, root / "src" / "claw_eval", path]),
        cwd=TREE,
        software=SOFTWARE,
        user=user,
        attachments=tuple(prompt.strings("attachments", [])),
        snapshot=task_yaml.snapshot(keys, keys.inside("environment")),
        late=tuple(late),
        local=tuple(local),
        grading="companion",
        needs=(*(["judge"] if judged else []), *(["user"] if user is not None else [])),
    )
    row = {
        "task_id": task_id,
        "environment": "claw_eval",
        "split": SPLIT,
        "instruction": prompt.text("text"),
        "payload": payload(keys, setup, _OWN),
        "files": task_yaml.agent_files(path, keys, data),
        "verifier": _verifier(path, keys, setup),
        "task_limits": task_yaml.task_limits(keys.inside("environment")),
        "tags": [keys.text("category", "claweval"), *keys.strings("tags", [])],
        "source": source,
    }
    return row | {"source_revision": digest_of(row)}


def _there(task_id: str, path: Path, keys: Keys) -> None:
    """Large fixtures are not in the repository; without them the task is not the published one."""
    prompt, environment = keys.inside("prompt"), keys.inside("environment")
    names = [
        *keys.strings("sandbox_files", []),
        *environment.strings("fixtures", []),
        *prompt.strings("attachments", []),
        *keys.strings("sandbox_grader_files", []),
        *keys.strings("local_grader_files", []),
    ]
    for name in names:
        if not (path / name).exists():
            raise Unsupported(task_id, f"files that are not in the checkout ({path.name}/{name})")


def _service_tree(task_id: str, root: Path, services: Sequence[Service], keys: Keys) -> tuple[list[Path], list[Path]]:
    """Folders that the services run from, and their own data."""
    shown, data = [], []
    for paths in task_yaml.service_paths(services, keys, root).values():
        for where, place in paths:
            if not place.exists():
                raise Unsupported(task_id, f"files that are not in the checkout ({place.relative_to(root)})")
            if where.endswith(".command"):
                shown.append(task_yaml.program_folder(place, root))
            else:
                shown.append(place)
                data.append(place)
    return shown, data


def _graders(task_id: str, path: Path, root: Path) -> tuple[list[Path], bool]:
    """The grader and its peers', and whether one of them asks a judge."""
    if not (root / "src" / "claw_eval").is_dir():
        raise Unsupported(task_id, "src/claw_eval, which is not in the checkout")
    found: list[Path] = []
    todo, judged = [path / "grader.py"], False
    while todo:
        file = todo.pop()
        if file in found:
            continue
        if not file.is_file():
            if file.parent == path:
                raise FolderError(f"{file} does not exist; every task has a grader")
            raise Unsupported(task_id, f"the grader of {file.parent.name}, which is not in the checkout")
        found.append(file)
        tree = grader_source.parse(file.read_text(encoding="utf-8"), str(file))
        own = {"claw_eval", "mock_services", *grader_source.beside(file.parent)}
        lacking = grader_source.missing(tree, own | grader_source.LIBRARIES)
        if lacking:
            raise Unsupported(task_id, f"a library of its grader ({', '.join(lacking)})")
        judged = judged or grader_source.asks_judge(tree)
        todo += [root / "tasks" / peer / "grader.py" for peer in grader_source.peers(tree)]
    return found, judged


def _runs_inside(task_id: str, path: Path, late: Sequence[str]) -> None:
    """Programs that look at the work folder run on the sandbox's own Python, which brings its standard library."""
    own = {Path(n).stem for n in late}
    for name in late:
        if name.endswith(".py"):
            tree = grader_source.parse((path / name).read_text(encoding="utf-8"), str(path / name))
            lacking = grader_source.missing(tree, own)
            if lacking:
                raise Unsupported(task_id, f"a library in the sandbox ({', '.join(lacking)})")


def _verifier(path: Path, keys: Keys, setup: Setup) -> dict[str, Any]:
    files = [graders.program("claweval.py"), graders.program("judge.py")]
    for folder, key, names in (
        (LATE, "sandbox_grader_files", setup.late),
        (LOCAL, "local_grader_files", setup.local),
    ):
        files += [below(folder, file_row(path, path, n, f"{keys.file}: {key}")) for n in names]
    command = ["{python}", "-I", "claweval.py", "{evidence}", TREE, f"tasks/{path.name}"]
    if "judge" in setup.needs:
        command.append("--judged")
    seconds = JUDGED_SECONDS if "judge" in setup.needs else GRADER_SECONDS
    made = make_verifier("claweval", command, files, seconds)
    # What it runs from is a part of what it is.
    return made | {"version": digest_of([made["version"], *(t.digest for t in setup.tree)])}
