"""Runs inside the train environment: a tiny random Qwen2.5-VL whose rows are made by hand, trained by the job, each row
in a micro-batch of its own.

usage: images_drive.py FOLDER   -> its checkpoints/0000 and 0001, samples, blobs, metrics
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from openforge.train import epoch  # first: it registers the CPU platform before veRL looks for one

import torch  # isort: skip
from screenshots import png  # isort: skip
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration  # isort: skip

from openforge import tables
from openforge.config import RunConfig
from openforge.policy.weights import read_checkpoint, write_checkpoint
from openforge.train.job import Job

IMAGE, VIDEO, START, END = 60, 61, 62, 63
# Squares of 28 x 28 pixels, by hand: 300 / 28 = 10.7 by 180 / 28 = 6.4, and 4 by 5.
SCREENS = ((png(300, 180, 1), 11 * 6), (png(112, 140, 2), 4 * 5))


def tiny(folder: Path) -> None:
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 64,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "initializer_range": 0.1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "out_hidden_size": 64,
            "window_size": 112,
            "fullatt_block_indexes": [1],
        },
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=False,
    )
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    processor = {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "merge_size": 2}
    processor |= {"temporal_patch_size": 2, "image_processor_type": "Qwen2VLImageProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    write_checkpoint(folder, 0)


def rows(version: str) -> list[dict[str, Any]]:
    """Merged rows: two trained responses with an image before each, one between text, none."""
    made = []
    for e, screens in enumerate(([0, 1], [1], [], [1, 0])):
        ids, mask, images = [1, 2, 3 + e], [0, 0, 0], []
        for turn, s in enumerate(screens or [None]):
            if s is not None:
                shown = [START, *[IMAGE] * SCREENS[s][1], END, 7]
                images.append(hashlib.sha256(SCREENS[s][0]).hexdigest())
                ids, mask = ids + shown, mask + [0] * len(shown)
            ids, mask = [*ids, 10 + turn, 20 + e, 30], [*mask, 1, 1, 1]
        made.append(
            {
                "sample_id": f"s{e}",
                "episode_id": f"e{e}",
                "group_id": "g",
                "calls": list(range(max(1, len(screens)))),
                "token_ids": ids,
                "loss_mask": mask,
                "logprobs": [-0.5 * m for m in mask],
                "rewards": [0.0] * (len(ids) - 1) + [1.0],
                "advantages": [float(m) for m in mask],
                "weight": 1.0,
                "policy_version": version,
                "images": images,
            }
        )
    return made


def main(folder: Path) -> None:
    base = folder / "checkpoints/0000"
    tiny(base)
    version = str(read_checkpoint(base)["policy_version"])
    tables.write_table(folder / "samples", tables.SAMPLES, rows(version))
    stored = [
        {"sha256": hashlib.sha256(data).hexdigest(), "mime": "image/png", "width": 1, "height": 1, "bytes": data}
        for data, _ in SCREENS
    ]
    tables.write_table(folder / "blobs", tables.BLOBS, stored)
    config = RunConfig.model_validate(
        {
            "model": "tiny-random-vl",
            "iterations": 1,
            "tasks": {"source": "tiny"},
            "algorithm": {"adv_estimator": "sft", "rollout_correction": {"bypass_mode": True}},
            "actor": {
                "optim": {"lr": 3e-3},
                "policy_loss": {"loss_mode": "gpg"},
                "use_dynamic_bsz": False,
                "ppo_micro_batch_size_per_gpu": 1,
            },
            "trainer": {"threads": 1},
        }
    )
    job = Job(
        run="qwen25",
        iteration=1,
        checkpoint_in=str(base),
        state_in=None,
        samples=str(folder / "samples"),
        checkpoint_out=str(folder / "checkpoints/0001"),
        state_out=str(folder / "state/0001"),
        metrics_out=str(folder / "metrics"),
        config=config.model_dump(mode="json"),
        config_digest="d",
        blobs=[str(folder / "blobs")],
    )
    job.write(folder / "job.json")
    epoch.main(folder / "job.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
