"""Harnesses: the agents as they ship, one data-like module each."""

from __future__ import annotations

from openforge.harnesses.base import Context, Ended, Harness, HarnessError, Output
from openforge.harnesses.mini_swe_agent import MiniSweAgent
from openforge.harnesses.pi import Pi

__all__ = ["NAMES", "Context", "Ended", "Harness", "HarnessError", "Output", "get"]

_KINDS: dict[str, type[Harness]] = {kind.name: kind for kind in (MiniSweAgent, Pi)}
NAMES = tuple(_KINDS)


def get(name: str) -> Harness:
    """The harness of that name.

    Raises:
        HarnessError: there is none.
    """
    if name not in _KINDS:
        raise HarnessError(f"there is no harness {name!r}; harnesses: {', '.join(NAMES)}")
    return _KINDS[name]()
