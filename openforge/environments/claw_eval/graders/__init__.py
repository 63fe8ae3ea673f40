"""Programs that run published graders and print our one JSON line.

They run in the grader's own software environment, in a sandbox, and not in this process: they use the standard library
and what that environment brings, and import nothing of this package. Importers copy them into a task's verifier.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent


def program(name: str) -> dict[str, Any]:
    """A program of this folder as a FILE of the tables."""
    return {"path": name, "content": (FOLDER / name).read_bytes(), "mode": 0o644}
