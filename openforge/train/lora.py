"""LoRA (arXiv 2106.09685): the adapter is the state's, a checkpoint holds the weights with it merged in.

An adapter is trained on checkpoint 0, whose weights stay as they are; W' = W + alpha / rank B A.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openforge.train.job import TrainError

# Below the state's folder, in PEFT's format.
ADAPTER = "adapter"
_PREFIX = "base_model.model."
_PART = re.compile(r"(.+)\.lora_([AB])\.default\.weight")


def parts(full: Mapping[str, Any]) -> dict[str, Any]:
    """The adapter's tensors among a PEFT model's, by the names that PEFT gives them in a file."""
    return {name.replace(".default.", "."): t for name, t in full.items() if ".lora_" in name}


def merged(full: Mapping[str, Any], scale: float) -> dict[str, Any]:
    """Weights by the base model's names, the adapter merged in; `scale` is alpha / rank.

    Raises:
        TrainError: adapters on something else than the matrix of a linear layer.
    """
    found: dict[str, dict[str, Any]] = {}
    out: dict[str, Any] = {}
    for name, tensor in full.items():
        match = _PART.fullmatch(name)
        if match:
            found.setdefault(match[1], {})[match[2]] = tensor
        elif ".lora_" in name:
            raise TrainError(f"actor.model.target_modules takes in {name}, which is no linear layer; leave it out")
        else:
            out[name] = tensor
    for layer, pair in found.items():
        base = f"{layer}.base_layer.weight"
        out[base] = out[base] + scale * (pair["B"] @ pair["A"])
    return {name.removeprefix(_PREFIX).replace(".base_layer.", "."): t for name, t in out.items()}


def save(module: Any, full: Mapping[str, Any], folder: Path) -> None:
    """Write the adapter of a PEFT model whose whole tensors are `full`."""
    from safetensors.torch import save_file

    folder.mkdir()
    module.peft_config["default"].save_pretrained(str(folder))
    save_file(parts(full), folder / "adapter_model.safetensors", metadata={"format": "pt"})
