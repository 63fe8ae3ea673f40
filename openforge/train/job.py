"""What the training job is told: one JSON file, written by the core side and read inside the train
environment."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from openforge.config import RunConfig
from openforge.tables import write_beside

# How the job's lines begin that are for us: progress, and the sentence of a TrainError.
PROGRESS = "train: "
REFUSED = "openforge: "


class TrainError(RuntimeError):
    """Training that cannot start or go on; one sentence, with the job's last lines where it ran."""


@dataclass(frozen=True)
class Job:
    """One iteration of training.

    Attributes:
        run: name of the run.
        iteration: k, from 1.
        checkpoint_in: folder of checkpoint k-1 (Hugging Face format).
        state_in: folder of the optimizer's state k-1; None at k = 1.
        samples: the iteration's samples.parquet.
        checkpoint_out: folder of checkpoint k, made by the job.
        state_out: folder of state k, made by the job.
        metrics_out: metrics.parquet of the iteration.
        config: the run's configuration, as `RunConfig.model_dump(mode="json")`.
        config_digest: digest of the configuration, kept in checkpoint.json.
        base: folder of checkpoint 0, where `needs_base` says that training reads it.
        report: the samples' report.json, whose counts go into the metrics; None leaves them out.
        blobs: files of the iteration's blobs, which hold the samples' images.
    """

    run: str
    iteration: int
    checkpoint_in: str
    state_in: str | None
    samples: str
    checkpoint_out: str
    state_out: str
    metrics_out: str
    config: dict[str, Any]
    config_digest: str
    base: str | None = None
    report: str | None = None
    blobs: list[str] = field(default_factory=list)

    @property
    def typed(self) -> RunConfig:
        """The configuration, validated again."""
        return RunConfig.model_validate_json(json.dumps(self.config))

    def counted(self) -> dict[str, float]:
        """What became of the iteration's episodes, calls and groups, by metric: total, and dropped by reason."""
        if self.report is None:
            return {}
        report = json.loads(Path(self.report).read_text())
        counts: dict[str, float] = {}
        for what in ("episodes", "calls", "groups"):
            counts[f"samples/{what}"] = report[what]["total"]
            dropped = {f"samples/dropped/{what}/{reason}": n for reason, n in report[what]["dropped"].items()}
            counts |= dropped
        return counts

    def write(self, path: Path) -> None:
        write_beside(path, json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def read(path: Path) -> Job:
        return Job(**json.loads(path.read_text()))


def needs_base(config: RunConfig) -> bool:
    """Whether training reads checkpoint 0 beside k-1: as the reference of a KL term, or as what adapters are on."""
    return config.actor.use_kl_loss or config.actor.model.lora_rank > 0


def layout_of(config: RunConfig) -> dict[str, Any] | None:
    """How a state's shards are cut, beside the number of processes; None where every process has one of FSDP2's."""
    actor = config.actor
    if actor.strategy == "megatron":
        sizes = {k: v for k, v in actor.megatron.model_dump().items() if k.endswith("_size")}
        return {"strategy": "megatron", **sizes, "use_distributed_optimizer": actor.megatron.use_distributed_optimizer}
    return (
        None if actor.fsdp_config.fsdp_size is None else {"strategy": "fsdp2", "fsdp_size": actor.fsdp_config.fsdp_size}
    )


def lora_of(config: RunConfig) -> dict[str, Any] | None:
    """What makes an adapter that can be trained on: rank, alpha and target modules; None without LoRA."""
    model = config.actor.model.model_dump(mode="json", include={"lora_rank", "lora_alpha", "target_modules"})
    return dict(model) if model["lora_rank"] else None
