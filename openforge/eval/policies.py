"""What `policy=` of an evaluation names: the config's model, a folder, a hub id, a URL, or RUN@k."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from openforge.config import Cell, ConfigError, EvalConfig, RunConfig, Server
from openforge.proxy import wire


@dataclass(frozen=True)
class Reference:
    """A policy to evaluate.

    Attributes:
        kind: model (to be prepared), checkpoint (RUN@k, used where it stands) or url (an endpoint).
        value: the words of the configuration.
        model: the model asked for at an endpoint, where the configuration names one.
        slug: its name in paths; `base` for the config's own model.
        k: the iteration's path part: 0000 for the base, the checkpoint's number for RUN@k, else none.
    """

    kind: Literal["model", "checkpoint", "url"]
    value: str
    slug: str
    k: str
    run: str = ""
    iteration: int = -1
    model: str | None = None

    @property
    def label(self) -> str:
        """The policy column of its rollouts: two models of one endpoint are two policies."""
        return self.value if self.model is None else f"{self.value}#{self.model}"


def _slug(value: str) -> str:
    words = re.sub(r"[^a-z0-9]+", "_", value.lower()).strip("_")[-24:].strip("_")
    return f"{words}_{hashlib.sha256(value.encode()).hexdigest()[:6]}"


def reference(config: EvalConfig) -> Reference:
    """Read the policy of an evaluation.

    Raises:
        ConfigError: RUN@k with a k that is no number.
    """
    value = config.policy or config.server.url
    if value is None:
        return Reference("model", config.model, "base", "0000")
    if value.startswith(("http://", "https://")):
        endpoint = Reference("url", value, "", "none", model=config.server.model)
        return replace(endpoint, slug=_slug(endpoint.label))
    run, at, k = value.partition("@")
    if at and re.fullmatch(r"[a-z0-9_]+", run):
        if not re.fullmatch(r"[0-9]+", k):
            raise ConfigError(f"policy {value!r}: RUN@k needs a checkpoint's number, e.g. {run}@3")
        return Reference("checkpoint", value, _slug(value), f"{int(k):04d}", run, int(k))
    return Reference("model", value, _slug(value), "none")


def checkpoint_file(ref: Reference, root: Path) -> Path:
    """The marker of RUN@k."""
    return root / "results" / ref.run / "checkpoints" / f"{ref.iteration:04d}" / "checkpoint.json"


def check(config: EvalConfig, root: Path) -> None:
    """Refuse a policy that cannot be read, before any job.

    Raises:
        ConfigError: RUN@k that is malformed or was never trained; sampling that an endpoint cannot take.
    """
    ref = reference(config)
    if ref.kind == "checkpoint" and not checkpoint_file(ref, root).exists():
        raise ConfigError(
            f"policy {ref.value}: results/{ref.run}/checkpoints/{ref.iteration:04d} does not exist; "
            f"train it first: snakemake train_{ref.run}"
        )
    if ref.kind == "url" and config.server.api == "openai":
        for cell in config.cells:
            problem = wire.not_taken(cell.sampling.model_dump())
            if problem is not None:
                raise ConfigError(f"cell {cell.name}: {problem}")


def evaluated(cell: Cell, last: int) -> list[int]:
    """The checkpoints of a training run that a cell is run on; `last` is the run's last one."""
    return {"first_and_last": sorted({0, last}), "last": [last], "every": list(range(last + 1))}[cell.at]


def name(run: str, config: RunConfig | EvalConfig, iteration: int | None) -> str:
    """The policy column of an evaluation's rollouts: RUN@k, or the words of the configuration."""
    if isinstance(config, EvalConfig):
        return reference(config).label
    return f"{run}@{iteration}"


def server(config: RunConfig | EvalConfig, cell: Cell | None) -> Server:
    """The policy server of a cell (None: of training): its own or the run's, attached where the policy is a URL."""
    own = (cell.server if cell is not None else None) or config.server
    if isinstance(config, EvalConfig):
        ref = reference(config)
        if ref.kind == "url":
            same = {k: getattr(config.server, k) for k in ("replicas", "api", "model", "api_key_env")}
            return own.model_copy(update={"url": ref.value, **same})
    return own
