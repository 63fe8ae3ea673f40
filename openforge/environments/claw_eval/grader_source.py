"""What the Python source of a published grader says that it needs, read without running it."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from openforge.environments.claw_eval.keys import FolderError

# What the software environment `tasks-claweval` can import beside the standard library (envs/tasks-claweval.txt).
LIBRARIES = frozenset(
    ("pydantic", "pydantic_core", "yaml", "fastapi", "starlette", "uvicorn", "httpx", "openai", "anyio", "dotenv")
)


def parse(source: str, where: str) -> ast.Module:
    """The syntax tree; `FolderError` with the line for what is no Python."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError) as e:
        line = f", line {e.lineno}" if isinstance(e, SyntaxError) and e.lineno else ""
        raise FolderError(f"{where}{line}: this is no Python: {e.args[0]}") from None


def asks_judge(tree: ast.Module) -> bool:
    """Whether a grader does anything with its `judge`, beyond taking it as a parameter."""
    return any(isinstance(n, ast.Name) and n.id == "judge" and isinstance(n.ctx, ast.Load) for n in ast.walk(tree))


def peers(tree: ast.Module) -> list[str]:
    """Tasks whose graders are loaded: `load_peer_grader("T01zh_email_triage")`."""
    return [
        n.args[0].value
        for n in ast.walk(tree)
        if isinstance(n, ast.Call)
        and getattr(n.func, "id", getattr(n.func, "attr", None)) == "load_peer_grader"
        and n.args
        and isinstance(n.args[0], ast.Constant)
        and isinstance(n.args[0].value, str)
    ]


def missing(tree: ast.Module, known: Iterable[str]) -> list[str]:
    """Packages that are imported, sorted, and are neither the standard library's nor among `known`.

    An import whose failure the code expects (in a `try`) is not counted.
    """
    have = {*known, *sys.stdlib_module_names}
    return sorted({name for name in _imports(tree.body) if name not in have})


def beside(folder: Path) -> set[str]:
    """Modules that a program in `folder` imports as its neighbours."""
    return {p.stem for p in folder.glob("*.py")} | {p.parent.name for p in folder.glob("*/__init__.py")}


def _imports(body: Iterable[ast.AST]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.Try):
            # Its handlers are the way without the package.
            yield from _imports([*node.orelse, *node.finalbody])
        elif isinstance(node, ast.Import):
            yield from (a.name.split(".")[0] for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.module and not node.level:
                yield node.module.split(".")[0]
        else:
            yield from _imports(ast.iter_child_nodes(node))
