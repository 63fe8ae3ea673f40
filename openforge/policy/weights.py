"""Identity of a checkpoint folder: digest of its weights and `checkpoint.json`. Standard library only.

Imported by the software environments of vLLM and veRL, which have no package of the light core.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

# Stands in a folder of which only the card is left: its weights or optimizer state were pruned.
TOMBSTONE = "tombstone.json"


class CheckpointError(ValueError):
    """A folder that is no checkpoint; the message names the folder and what it lacks."""


def weights_sha256(folder: Path) -> str:
    """SHA-256 over the sorted names and the bytes of all *.safetensors in `folder`.

    Raises:
        CheckpointError: there are none.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} holds no *.safetensors file; a policy needs its weights in that format")
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0")
        with open(file, "rb") as f:
            digest.update(hashlib.file_digest(f, "sha256").digest())
    return digest.hexdigest()


def policy_version(iteration: int, sha256: str) -> str:
    """`iteration@sha256`, the identity of a policy: never the number alone."""
    return f"{iteration}@{sha256}"


def write_checkpoint(folder: Path, iteration: int, **extra: Any) -> dict[str, Any]:
    """Write checkpoint.json, the last file of a checkpoint folder that is still under its temporary name.

    Args:
        folder: holds the *.safetensors.
        iteration: k of the checkpoint, 0 for the prepared base model.
        extra: further JSON values, e.g. model and source.

    Returns:
        What was written: iteration, policy_version, sha256 and `extra`.
    """
    sha256 = weights_sha256(folder)
    record = {
        "iteration": iteration,
        "policy_version": policy_version(iteration, sha256),
        "sha256": sha256,
        **extra,
    }
    (folder / "checkpoint.json").write_text(json.dumps(record, indent=1) + "\n")
    return record


def read_checkpoint(folder: Path) -> dict[str, Any]:
    """checkpoint.json of a folder.

    Raises:
        CheckpointError: it is missing or no JSON object with a policy_version.
    """
    try:
        record = json.loads((folder / "checkpoint.json").read_text())
        record["policy_version"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise CheckpointError(f"{folder} is no checkpoint: checkpoint.json is missing or unreadable ({e})") from None
    return dict(record)


def check_kept(folder: Path) -> None:
    """Refuse a checkpoint whose weights were pruned or are lost.

    Raises:
        CheckpointError: names the run, the checkpoint and the nearest one that is kept.
    """
    if not (folder / TOMBSTONE).exists():
        if (folder / "checkpoint.json").exists() and not any(folder.glob("*.safetensors")):
            raise CheckpointError(
                f"{folder} has lost its weights: there is no *.safetensors beside its checkpoint.json"
            )
        return
    k = int(folder.name)
    cards = folder.parent.glob("[0-9]*/checkpoint.json")
    kept = sorted(int(c.parent.name) for c in cards if not (c.parent / TOMBSTONE).exists())
    nearest = f"the nearest kept one is {min(kept, key=lambda i: abs(i - k))}" if kept else "none is kept"
    raise CheckpointError(
        f"the weights of checkpoint {k} of run {folder.parent.parent.name} were pruned (trainer.keep_checkpoints); "
        f"{nearest}"
    )
