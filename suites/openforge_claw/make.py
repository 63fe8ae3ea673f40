"""Write the suite's task folders anew from source/:  python3 suites/openforge_claw/make.py

Deterministic: the folders that are committed are what it writes (a test).
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from source import code, data, desk, files, impossible, mail, multi, parts, planner, traps


def tasks() -> list[parts.Task]:
    """All tasks of the suite."""
    modules = (files, data, code, mail, planner, desk, multi, traps, impossible)
    return [task for module in modules for task in module.tasks()]


if __name__ == "__main__":
    parts.write_all(tasks(), parts.SUITE)
