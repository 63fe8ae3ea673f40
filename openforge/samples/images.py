"""Which tokens of a prompt stand for an image, by its size and the model's own image processor.

The sampler's processor and the trainer's are of two environments. A recorded prompt is trained on only where its image
tokens are exactly those that the trainer's patches fill, image by image.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Width and height in pixels by an image's hash; None where they could not be told.
Sizes = Mapping[str, tuple[int, int] | None]

PROCESSOR = "Qwen2VLImageProcessor"  # that of Qwen2-VL, Qwen2.5-VL and Qwen3-VL


class VisionError(ValueError):
    """A model folder whose image processor is missing or another than is known here; one sentence."""


@dataclass(frozen=True)
class Vision:
    """How a model sees images.

    Attributes:
        image: id of the token that stands for a square of merged patches.
        others: ids that stand for parts of videos.
        patch: pixels of a patch's side.
        merge: patches of such a square's side.
        least: pixels that an image has at least once it is resized.
        most: pixels that it has at most.
    """

    image: int
    others: frozenset[int]
    patch: int
    merge: int
    least: int
    most: int

    @staticmethod
    def of(folder: Path) -> Vision | None:
        """How the model of a Hugging Face folder sees; None for a language model.

        Raises:
            VisionError: it sees, and its image processor is not one of Qwen's.
        """
        config = _json(folder / "config.json")
        if "image_token_id" not in config or "vision_config" not in config:
            return None
        file = folder / "preprocessor_config.json"
        # transformers 5 writes one file for all of a model's processors.
        settings = (
            _json(file) if file.exists() else _json(folder / "processor_config.json").get("image_processor") or {}
        )
        kind = str(settings.get("image_processor_type"))
        if kind.removesuffix("Fast") != PROCESSOR:
            raise VisionError(
                f"{folder}: its image processor is {kind}; images are trained on with that of Qwen2.5-VL and Qwen3-VL "
                f"({PROCESSOR})"
            )
        size = settings.get("size") or {}
        # What a folder leaves out, the published processor has its own values for; the trainer's grids are checked
        # against these again (train/images.py).
        return Vision(
            image=int(config["image_token_id"]),
            others=frozenset({int(config["video_token_id"])} if "video_token_id" in config else ()),
            patch=int(settings.get("patch_size", 14)),
            merge=int(settings.get("merge_size", 2)),
            least=int(settings.get("min_pixels") or size.get("shortest_edge", 56 * 56)),
            most=int(settings.get("max_pixels") or size.get("longest_edge", 28 * 28 * 1280)),
        )

    def grid(self, width: int, height: int) -> tuple[int, int, int]:
        """Patches of an image of so many pixels: frames (1), rows, columns.

        Both sides become the nearest multiple of patch x merge; an area outside of least ... most is first scaled to
        that bound, and then rounded to its inner side.

        Source: Qwen2-VL's dynamic resolution (arXiv 2409.12191, section 2.1), as its published processor resizes.
        """
        unit = self.patch * self.merge
        rows, columns = (round(side / unit) for side in (height, width))
        if rows * columns * unit**2 > self.most:
            shrink = math.sqrt(height * width / self.most)
            rows, columns = (max(1, math.floor(side / shrink / unit)) for side in (height, width))
        elif rows * columns * unit**2 < self.least:
            grow = math.sqrt(self.least / (height * width))
            rows, columns = (math.ceil(side * grow / unit) for side in (height, width))
        return 1, rows * self.merge, columns * self.merge

    def tokens(self, width: int, height: int) -> int:
        """Tokens that stand for an image of so many pixels."""
        return math.prod(self.grid(width, height)) // self.merge**2

    def shows(self, ids: array[int], tokens: Sequence[int]) -> bool:
        """Whether the image tokens among `ids` stand in runs of exactly so many, in this order, and no video's do."""
        return not any(other in ids for other in self.others) and _runs(ids, self.image) == list(tokens)


def _runs(ids: array[int], token: int) -> list[int]:
    """Lengths of the runs of a token, in order."""
    runs: list[int] = []
    at = -1
    for _ in range(ids.count(token)):
        before, at = at, ids.index(token, at + 1)
        if runs and at == before + 1:
            runs[-1] += 1
        else:
            runs.append(1)
    return runs


@dataclass(frozen=True)
class Shown:
    """What is known of the images of an iteration's calls.

    Attributes:
        vision: how the model sees; None for a language model.
        sizes: of the images in the iteration's blobs.
    """

    vision: Vision | None
    sizes: Sizes

    def fault(self, call: Mapping[str, Any], prompt_of: Callable[[int], array[int]]) -> str | None:
        """Why a call cannot be trained on, by its images; None where it can. `prompt_of` gives the prompt of an index.

        Raises:
            KeyError: the hash of an image that has no size here.
        """
        images, vision = call["images"] or [], self.vision
        if vision is None:
            return "image_tokens" if images else None
        if any(i in call["response_token_ids"] for i in (vision.image, *vision.others)):
            return "image_token_sampled"
        sizes = [self.sizes[sha256] for sha256 in images]
        known = [size for size in sizes if size is not None]
        if len(known) < len(sizes):
            return "image_format"
        tokens = [vision.tokens(*size) for size in known]
        return None if vision.shows(prompt_of(int(call["call"])), tokens) else "image_tokens"


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as e:
        raise VisionError(f"{file} cannot be read: {e}") from None
    if not isinstance(found, dict):
        raise VisionError(f"{file} must hold a JSON object")
    return found
