"""Checkpoint 0: prepare a model folder, hub id@revision or bundled model for serving and training."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Literal

from openforge import software
from openforge.policy.prepare import ModelError

__all__ = ["ModelError", "prepare"]


def prepare(
    model: str,
    out: Path,
    device: Literal["cpu", "gpu"] = "cpu",
    dtype: Literal["float32", "bfloat16"] = "float32",
    root: Path | None = None,
    template: bool = False,
) -> None:
    """Write checkpoint 0 of `model` into the folder `out`, in the serve environment of `device`.

    See `openforge.policy.prepare.prepare` for what is written.

    Raises:
        ModelError: one sentence on what is wrong with the model.
        SoftwareMissing: the environment is not built.
    """
    python = software.python_of(f"serve-{device}", root)
    package_root = Path(__file__).resolve().parents[2]
    env = {**os.environ, "PYTHONPATH": str(package_root), "TOKENIZERS_PARALLELISM": "false"}
    argv = [
        str(python),
        "-m",
        "openforge.policy.prepare",
        model,
        str(out),
        "--device",
        device,
        "--dtype",
        dtype,
        *(["--template"] if template else []),
    ]
    done = subprocess.run(argv, env=env, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode == 2 and "openforge: " in done.stderr:
        raise ModelError(done.stderr.rsplit("openforge: ", 1)[1].strip())
    if done.returncode:
        tail = "\n".join(done.stderr.strip().splitlines()[-15:])
        raise ModelError(f"model {model!r} could not be prepared:\n{tail}")
