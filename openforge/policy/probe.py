"""The probe: a fixed prompt whose logprobs tell whether a server serves the weights it claims.

Whoever writes a checkpoint scores the prompt with its own model and leaves `probe.json` beside the weights;
whoever serves the checkpoint compares. Needs torch only where a model is scored, so that every environment can
import it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

LENGTH = 32

# Measured against a transformers forward: fp32 differs by 4e-5 at most, bf16 by 0.23, stale weights by 1 and more.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.3}


class PolicyMismatch(RuntimeError):
    """The server's logprobs are not those of the checkpoint it should serve; the run must stop."""


def probe_ids(vocab_size: int, without: Collection[int] = ()) -> list[int]:
    """The prompt: `LENGTH` token ids spread over a vocabulary of `vocab_size`, always the same ones.

    Args:
        without: ids that cannot stand in a prompt of text; the one before takes the place of such a one.
    """
    ids = []
    for i in range(LENGTH):
        token = (7919 * i * i + 104729 * i + 17) % vocab_size
        while token in without:
            token -= 1
        ids.append(token)
    return ids


def vision_ids(config: Any) -> set[int]:
    """Ids of the tokens that stand for images and videos, by a transformers configuration; none for a text model."""
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return {i for name in names if isinstance(i := getattr(config, name, None), int)}


def _has_mrope(model: Any) -> bool:
    """Whether a model's positions have the dimensions of time, height and width beside that of text."""
    text = getattr(model.config, "text_config", None)
    return "mrope_section" in (getattr(text, "rope_parameters", None) or {})


def write_probe(model: Any, folder: Path) -> None:
    """Score the probe with `model` and write probe.json: ids (LENGTH) and logprobs (LENGTH - 1, natural log).

    Args:
        model: a causal language model: `model(ids)` with ids of shape (1, LENGTH) gives `.logits` of shape
            (1, LENGTH, vocab); its embedding's rows are the vocabulary.
        folder: the checkpoint folder.
    """
    import torch

    rows, device = model.get_input_embeddings().weight.shape[0], next(model.parameters()).device
    ids = probe_ids(rows, vision_ids(model.config))
    was_training = model.training
    model.eval()
    with torch.no_grad():
        tokens = torch.tensor([ids], device=device)
        # veRL's Qwen2.5-VL wants positions where transformers' own makes them up: of text, the same in each dimension.
        where = {"position_ids": torch.arange(LENGTH, device=device).expand(4, 1, -1)} if _has_mrope(model) else {}
        logprobs = torch.log_softmax(model(tokens, **where).logits[0, :-1].float(), -1)
        scored = logprobs.gather(1, tokens[0, 1:, None])[:, 0].tolist()
    model.train(was_training)
    keep_probe(folder, ids, scored)


def keep_probe(folder: Path, ids: Sequence[int], logprobs: Sequence[float]) -> None:
    """Write probe.json: ids (LENGTH) and logprobs (LENGTH - 1) of all but the first."""
    (folder / "probe.json").write_text(json.dumps({"ids": list(ids), "logprobs": list(logprobs)}) + "\n")


def read_probe(folder: Path) -> tuple[list[int], list[float]]:
    """Ids and logprobs of the folder's probe.json.

    Raises:
        PolicyMismatch: it is missing or unreadable, so that the weights cannot be told from others.
    """
    try:
        probe = json.loads((folder / "probe.json").read_text())
        return list(probe["ids"]), [float(x) for x in probe["logprobs"]]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise PolicyMismatch(
            f"{folder}/probe.json is missing or unreadable ({e}); the policy cannot be checked"
        ) from None


def compare(expected: Sequence[float], served: Sequence[float], dtype: str, what: str) -> float:
    """The largest absolute difference of two logprob lists.

    Raises:
        PolicyMismatch: it is above the tolerance of `dtype`, not finite, or the lengths differ.
    """
    if len(expected) != len(served):
        raise PolicyMismatch(f"{what}: the server scored {len(served)} probe tokens, the checkpoint {len(expected)}")
    worst = max(abs(a - b) for a, b in zip(expected, served, strict=True))
    if not math.isfinite(worst) or worst > TOLERANCE[dtype]:
        raise PolicyMismatch(
            f"{what}: the server's probe logprobs differ from the checkpoint's by {worst:.3g} "
            f"(at most {TOLERANCE[dtype]:g} in {dtype}): it serves other weights"
        )
    return worst
