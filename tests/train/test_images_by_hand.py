"""Rows with images made by hand: a Qwen2.5-VL in the job against plain PyTorch, and the rule of image sizes against the
published image processor."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from openforge import tables
from openforge.software import python_of
from openforge.train import launch

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
Json = dict[str, Any]


def python(*argv: str | Path) -> str:
    env = launch.environment(1)
    env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], str(HERE)])
    done = subprocess.run([python_of("train-cpu"), *map(str, argv)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def oracle(folder: Path, checkpoint: str) -> Json:
    found: Json = json.loads(
        python(
            HERE / "images_oracle.py", folder / "checkpoints" / checkpoint, *map(folder.joinpath, ("samples", "blobs"))
        )
    )
    return found


def test_qwen25_vl_is_trained_on_merged_rows_beside_one_without_images(tmp_path: Path) -> None:
    python(HERE / "images_drive.py", tmp_path)
    found = {(m["step"], m["name"]): m["value"] for m in tables.read_rows(tmp_path / "metrics", tables.METRICS)}
    before, after = oracle(tmp_path, "0000"), oracle(tmp_path, "0001")
    assert found[-1, "training/images"] == 5 and found[0, "training/rows"] == 4
    assert found[0, "loss"] == pytest.approx(before["loss"], rel=1e-6)
    assert found[0, "grad_norm"] == pytest.approx(before["grad_norm"], rel=1e-5)
    assert before["vision_norm"] > 1
    # What was written is the model one step further down.
    assert after["loss"] < before["loss"] - 0.1


SIZES = """
import json, random, sys
from pathlib import Path
from PIL import Image
from transformers import AutoImageProcessor
from openforge.samples.images import Vision
draw, wrong, seen = random.Random(0), [], set()
for i, (patch, least, most) in enumerate([(14, 3136, 12845056), (16, 65536, 16777216), (14, 50000, 200000)]):
    folder = Path(sys.argv[1], str(i))
    folder.mkdir()
    size = {"size": {"shortest_edge": least, "longest_edge": most}}
    kind = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": patch, "merge_size": 2}
    (folder / "preprocessor_config.json").write_text(json.dumps(size | kind))
    (folder / "config.json").write_text('{"image_token_id": 1, "vision_config": {}}')
    see, vision = AutoImageProcessor.from_pretrained(folder), Vision.of(folder)
    for _ in range(40):
        width, height = (round(2 ** draw.uniform(3.5, 9.7)) for _ in range(2))
        grid = see(images=[Image.new("RGB", (width, height))], return_tensors="pt")["image_grid_thw"][0].tolist()
        seen.add(tuple(grid))
        if grid != list(vision.grid(width, height)):
            wrong.append([patch, width, height, grid])
print(json.dumps([wrong, len(seen)]))
"""


def test_the_rule_of_image_sizes_is_the_published_processors(tmp_path: Path) -> None:
    wrong, seen = json.loads(python("-c", SIZES, tmp_path))
    assert wrong == [] and seen > 60
