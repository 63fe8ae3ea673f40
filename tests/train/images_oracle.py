"""Run by the train environment's Python, without veRL: a vision model's log-probs and gradients in plain PyTorch.

usage: images_oracle.py FOLDER SAMPLES BLOBS   -> one JSON object
"""

from __future__ import annotations

import io
import json
import math
import sys
from typing import Any

import pyarrow.parquet as pq
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText


def opened(data: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(data)).convert("RGBA")
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, image).convert("RGB")


def main(folder: str, samples: str, blobs: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    processor = AutoImageProcessor.from_pretrained(folder)
    kept = {b["sha256"]: b["bytes"] for b in pq.read_table(blobs).to_pylist()}
    rows = pq.read_table(samples).to_pylist()
    trained, apart, blind, loss = sum(sum(r["loss_mask"]) for r in rows), 0.0, 0.0, torch.zeros(())

    def scored(row: dict[str, Any], **see: Any) -> tuple[Any, Any]:
        """Log-probs of a row's tokens after the first, and which are trained."""
        ids = torch.tensor([row["token_ids"]])
        kinds = (ids == model.config.image_token_id).int()
        logits = model(ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=kinds, **see).logits[0, :-1]
        chosen = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        return chosen, torch.tensor(row["loss_mask"])[1:].bool()

    for row in rows:
        see = {}
        if row["images"]:
            see = dict(processor(images=[opened(kept[s]) for s in row["images"]], return_tensors="pt"))
        chosen, mask = scored(row, **see)
        recorded = torch.tensor(row["logprobs"])[1:]
        apart = max(apart, float((chosen - recorded)[mask].detach().abs().max()))
        if see:
            with torch.no_grad():
                other = scored(row, **see | {"pixel_values": -see["pixel_values"]})[0]
            blind = max(blind, float((other - recorded)[mask].abs().max()))
        loss = loss - (chosen * torch.tensor(row["advantages"])[1:]).sum() / trained
    loss.backward()
    norms = {n: float(p.grad.norm()) if p.grad is not None else 0.0 for n, p in model.named_parameters()}
    return {
        "apart": apart,
        "other_images": blind,
        "loss": float(loss.detach()),
        "grad_norm": math.hypot(*norms.values()),
        "vision_norm": math.hypot(*(v for n, v in norms.items() if ".visual." in n)),
        "without_gradient": sorted(n for n, v in norms.items() if v == 0),
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
