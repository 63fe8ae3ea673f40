"""Who may import whom (docs/design.md, section 2), read from the source. `make lint` and test_lint.py run it.

A stage imports no later stage, a library no stage, a meeting place neither, and none of them the command line; the
proxy nothing of environments, environments of the proxy only `llm_args`, and training nothing of either.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "openforge"
STAGES = ("tasks", "plan", "rollout", "score", "samples", "train", "eval", "report")
LIBRARIES = ("policy", "proxy", "judge", "sandboxes", "harnesses", "environments")
# The command line stands above all: it imports anything, and nothing below imports it.
COMMANDS = ("cli", "verbs")
# The tables of statuses and of estimators are meeting places that stand with the stage that uses them.
MEETING_PLACES = (
    "tables",
    "store",
    "config",
    "config_reading",
    "config_sandbox",
    "config_tasks",
    "config_training",
    "config_judge",
    "config_docs",
    "config_checks",
    "software",
    "rollout.status",
    "samples.credit",
)
# (importer, imported): imports that no order forbids, and the modules below `imported` that are free.
FORBIDDEN = {
    ("proxy", "environments"): (),
    ("environments", "proxy"): ("proxy.llm_args",),
    ("train", "proxy"): (),
    ("train", "environments"): (),
}


def imports(path: Path, module: str, root: Path) -> Iterator[tuple[int, str]]:
    """(line, module below the package) of every import in a file, relative and `import_module` ones too."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        found: list[str] = []
        if isinstance(node, ast.Import):
            found = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join([*parts[: len(parts) - node.level + 1], *([base] if base else [])])
            # `from openforge import x` names a module, `from openforge.plan import f` may or may not.
            found = [name if is_module(root, name := f"{base}.{a.name}") else base for a in node.names]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
            "import_module",
            "__import__",
        ):
            found = [a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        for name in found:
            if name.startswith(f"{PACKAGE}."):
                yield node.lineno, name.removeprefix(f"{PACKAGE}.")


def is_module(root: Path, name: str) -> bool:
    path = root.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def within(name: str, places: tuple[str, ...]) -> bool:
    return any(name == p or name.startswith(f"{p}.") for p in places)


def reason(importer: str, imported: str) -> str | None:
    """Why `importer` may not import `imported` (both below the package); None if it may."""
    top, target = importer.split(".")[0], imported.split(".")[0]
    if within(imported, MEETING_PLACES):
        return None
    for (a, b), free in FORBIDDEN.items():
        if (top, target) == (a, b) and not within(imported, free):
            return f"{a} knows nothing of {b}" + (f" but {', '.join(free)}" if free else "")
    if target in COMMANDS and top not in (*COMMANDS, "__main__"):
        return "only the command line imports its verbs"
    if within(importer, MEETING_PLACES) and target in (*STAGES, *LIBRARIES):
        return "a meeting place imports no stage and no library"
    if top in LIBRARIES and target in STAGES:
        return "a library imports no stage"
    if top in STAGES and target in STAGES and STAGES.index(target) > STAGES.index(top):
        return f"stage {target} comes after {top}"
    return None


def violations(root: Path) -> list[str]:
    """Sentences, one a forbidden import, over the package below `root`."""
    out = []
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if module == PACKAGE:
            continue
        for line, imported in imports(path, module, root):
            why = reason(module.removeprefix(f"{PACKAGE}."), imported)
            if why:
                out.append(f"{path.relative_to(root)}:{line}: must not import {PACKAGE}.{imported}: {why}")
    return out


if __name__ == "__main__":
    found = violations(Path(__file__).resolve().parent.parent)
    print("\n".join(found), file=sys.stderr) if found else None
    sys.exit(1 if found else 0)
