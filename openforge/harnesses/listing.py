"""The page that lists the harnesses, rendered from their modules."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable

from openforge.harnesses.base import Harness

_HEAD = """# Harnesses

Rendered by `openforge docs` from openforge/harnesses/. `harness.name` of a configuration is one of these; its options
are keys beside it ([config](config.md)). `snakemake software_harness_NAME` builds one's software, if a run has not.

Prompt tokens are those of an episode's first call with all tools, in SmolLM2's tokenizer; CPU seconds and memory (of
the largest process) are of one episode of two turns; disk is of its software environment, with the node that it runs
on or was installed by.

| harness | version | dialect | prompt tokens | CPU s | memory, MB | disk, MB |
| --- | --- | --- | --- | --- | --- | --- |
"""


def markdown(kinds: Iterable[type[Harness]]) -> str:
    """One table, then a section a harness: what it is, its options, what it cannot do."""
    kinds = list(kinds)
    return _HEAD + "".join(map(_line, kinds)) + "".join(map(_section, kinds))


def _line(kind: type[Harness]) -> str:
    m = kind.measured
    if m is None:
        cells = ["not run", "", "", ""]
    else:
        tokens = [f"{n:,} with {option}" if option else f"{n:,}" for option, n in m.prompt_tokens.items()]
        cells = ["; ".join(tokens), f"{m.cpu_seconds:g}", f"{m.rss_mb:,}", f"{m.disk_mb}"]
    return f"| {' | '.join([kind.name, kind.version, kind.dialect, *cells])} |\n"


def _section(kind: type[Harness]) -> str:
    what = inspect.getdoc(sys.modules[kind.__module__]) or ""
    cannot = "\n".join(f"- {c}" for c in kind.cannot)
    return "\n\n".join([f"\n## {kind.name}", what, inspect.getdoc(kind) or "", _tools(kind), cannot]) + "\n"


def _tools(kind: type[Harness]) -> str:
    way = "an MCP server" if kind.tools == "mcp" else "the command `tool` in its shell"
    again = "goes on with its own session" if kind.resumes else "is started anew and told the conversation"
    return f"A task's tools come to it as {way}; when a simulated user answers, it {again}."
