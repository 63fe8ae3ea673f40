"""Harnesses: the agents as they ship, one data-like module each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openforge.harnesses import listing
from openforge.harnesses.base import Context, Ended, Harness, HarnessError, Output
from openforge.harnesses.claude_code import ClaudeCode
from openforge.harnesses.codex import Codex
from openforge.harnesses.mini_swe_agent import MiniSweAgent
from openforge.harnesses.openclaw import Openclaw
from openforge.harnesses.opencode import Opencode
from openforge.harnesses.pi import Pi
from openforge.harnesses.qwen_code import QwenCode
from openforge.harnesses.scripted import Scripted
from openforge.harnesses.zeroclaw import Zeroclaw

__all__ = [
    "NAMES",
    "Context",
    "Ended",
    "Harness",
    "HarnessError",
    "Output",
    "get",
    "markdown",
    "software_of",
    "start_tokens",
]

_ALL: tuple[type[Harness], ...] = (
    MiniSweAgent,
    Pi,
    Codex,
    ClaudeCode,
    Openclaw,
    Opencode,
    QwenCode,
    Zeroclaw,
    Scripted,
)
_KINDS: dict[str, type[Harness]] = {kind.name: kind for kind in _ALL}
NAMES = tuple(_KINDS)


def get(name: str) -> Harness:
    """The harness of that name.

    Raises:
        HarnessError: there is none.
    """
    if name not in _KINDS:
        raise HarnessError(f"there is no harness {name!r}; harnesses: {', '.join(NAMES)}")
    return _KINDS[name]()


def software_of(name: str) -> list[str]:
    """The software environments that a harness needs; none where its user brings the program."""
    harness = get(name)
    return [harness.software] if harness.built else []


def start_tokens(name: str, options: Mapping[str, Any]) -> int | None:
    """About how many tokens the first prompt of a harness has; None where nobody can say."""
    measured = get(name).measured
    given = [key for key, value in options.items() if value]
    # A prompt of one's own may be as short as one likes.
    if measured is None or {"config", "tools"} & set(given):
        return None
    return min(
        (measured.prompt_tokens[key] for key in given if key in measured.prompt_tokens),
        default=measured.prompt_tokens[""],
    )


def markdown() -> str:
    """docs/harnesses.md, from the modules."""
    return listing.markdown(_ALL)
