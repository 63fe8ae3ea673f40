"""Fault 24: a configuration key that does nothing. Every key of the models is read by some code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from openforge import config as c
from openforge import config_training as t
from openforge.config_reading import section
from openforge.config_sandbox import Artifacts, SandboxLimits
from openforge.config_tasks import Columns

ROOT = Path(__file__).resolve().parents[1]
DECLARING = (
    "config.py",
    "config_checks.py",
    "config_docs.py",
    "config_reading.py",
    "config_training.py",
    "config_judge.py",
    "config_sandbox.py",
    "config_tasks.py",
)
SOURCE = "\n".join(
    p.read_text()
    for top, pattern in (("openforge", "**/*.py"), ("rules", "*.smk"), ("scripts", "*.py"))
    for p in sorted((ROOT / top).glob(pattern))
    if p.name not in DECLARING
)
# Names that a section goes by in the code, beside its own key.
NAMES: dict[type[BaseModel], tuple[str, ...]] = {
    c.RunConfig: ("config", "c", "train_config", "typed"),
    c.EvalConfig: ("config", "c"),
    c.Tasks: ("tasks", "config"),
    c.Rollout: ("rollout", "config"),
    c.Sandbox: ("sandbox", "terms"),
    SandboxLimits: ("given",),
    Artifacts: ("terms", "_terms"),
    c.Server: ("server", "cfg", "s", "own"),
    c.Cell: ("cell", "c"),
    t.FilterGroups: ("groups",),
    t.FSDP: ("fsdp",),
    c.KeepCheckpoints: ("keep",),
    t.OverlongBuffer: ("buffer",),
    t.RewardKwargs: ("kwargs",),
    c.Judge: ("judge", "config", "c"),
    c.MixedHarness: ("harness", "h"),
}
# Sections that go into a row as a whole (plan) and are read from there as text, by these words before the key.
IN_ROWS = {
    Columns: r"cell\(",
    c.Harness: r"(?:options\[|options\.get\()",
    c.MixedHarness: r"(?:options\[|options\.get\()",
    c.Limits: r'limits"?\]?\[',
    c.Sampling: r"^ {4}",
}


def keys(model: type[BaseModel], where: str = "") -> Iterator[tuple[type[BaseModel], str, str]]:
    """(section, key, its parent's key) of every leaf."""
    for key, field in model.model_fields.items():
        sub = section(field.annotation)
        if sub is None:
            yield model, key, where
        else:
            yield from keys(sub, key)


def is_read(model: type[BaseModel], key: str, parent: str) -> bool:
    names = "|".join({*NAMES.get(model, ()), parent} - {""})
    if re.search(rf"\b(?:{names})\.{key}\b", SOURCE):
        return True
    before = IN_ROWS.get(model)
    return before is not None and bool(re.search(rf'{before}"{key}"', SOURCE, re.M))


@pytest.mark.parametrize("model", [c.RunConfig, c.EvalConfig])
def test_every_key_is_read_somewhere(model: type[BaseModel]) -> None:
    assert [f"{parent}.{key}" for m, key, parent in keys(model) if not is_read(m, key, parent)] == []


def test_a_key_that_nothing_reads_would_be_found() -> None:
    for model, parent in ((c.Rollout, "rollout"), (c.Harness, "harness"), (c.Sampling, "sampling"), (c.RunConfig, "")):
        assert not is_read(model, "surprise", parent)
