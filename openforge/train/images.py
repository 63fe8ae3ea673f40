"""Images of training rows: from the recorded bytes to what veRL hands to the model, by the checkpoint's processor."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageOps
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText

from openforge import blobs
from openforge.samples.images import Vision
from openforge.train.job import TrainError
from openforge.train.rows import Row

_ORIENTATION = 0x0112  # an EXIF tag; from 5 on rows and columns are swapped


def load(checkpoint: Path, rows: Sequence[Row], files: Sequence[str], table: str) -> Images | None:
    """The images of `rows`, out of the blobs `files`; None where the model of `checkpoint` is a language model.

    Raises:
        TrainError: an image that is missing or no image, or a row whose image tokens are not those of its images;
            names `table` and the sample.
        VisionError: the model's image processor is not known here.
    """
    vision = Vision.of(checkpoint)
    if vision is not None:
        return Images(checkpoint, vision, rows, files, table)
    for row in rows:
        if row.images:
            raise TrainError(f"{table}: sample {row.sample_id} shows images, but {checkpoint} is a language model")
    return None


class Images:
    """What the model takes beside the tokens of a row: positions in three dimensions, patches and their grids."""

    def __init__(self, checkpoint: Path, vision: Vision, rows: Sequence[Row], files: Sequence[str], table: str) -> None:
        self._vision = vision
        self._bytes = blobs.contents(files, {sha256 for row in rows for sha256 in row.images})
        self._grids: dict[str, tuple[int, int, int]] = {}
        for row in rows:
            self._check(row, f"{table}: sample {row.sample_id}")
        self._processor = AutoImageProcessor.from_pretrained(checkpoint)
        # Without weights: only its rule of positions is asked for.
        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(checkpoint))
        self._rope_index = model.model.get_rope_index

    def _check(self, row: Row, where: str) -> None:
        for sha256 in row.images:
            if sha256 in self._grids:
                continue
            if sha256 not in self._bytes:
                raise TrainError(f"{where} shows image {sha256}, which is not in the iteration's blobs")
            try:
                self._grids[sha256] = self._vision.grid(*_size(self._bytes[sha256]))
            except OSError as e:
                raise TrainError(f"{where} shows image {sha256}, which cannot be read: {e}") from None
        tokens = [t * h * w // self._vision.merge**2 for t, h, w in (self._grids[s] for s in row.images)]
        if not self._vision.shows(array("i", row.token_ids.tolist()), tokens):
            raise TrainError(
                f"{where}: its image tokens are not those of its images ({tokens}); write the samples again, which "
                "leaves such calls out and counts them"
            )

    def positions(self, row: Row) -> torch.Tensor:
        """Positions of a row's tokens, int64 (4, L): in the text, and in time, height and width as the model's own
        `get_rope_index` gives them."""
        ids = torch.from_numpy(row.token_ids)[None]
        grids = torch.tensor([self._grids[s] for s in row.images]) if row.images else None
        where, _ = self._rope_index(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == self._vision.image).int(),
            image_grid_thw=grids,
        )
        return torch.cat([torch.arange(ids.shape[1])[None], where[:, 0]])

    def patches(self, row: Row) -> Mapping[str, torch.Tensor]:
        """veRL's multi_modal_inputs of a row: pixel_values (patches, values of a patch), image_grid_thw (images, 3);
        empty for a row without images. They are made when they are asked for."""
        return _Patches(self, row) if row.images else {}

    def make(self, row: Row) -> dict[str, torch.Tensor]:
        """The same, made now.

        Raises:
            TrainError: the processor cuts an image in another way than its settings say.
        """
        made = self._processor(images=[picture(self._bytes[s]) for s in row.images], return_tensors="pt")
        found, expected = made["image_grid_thw"].tolist(), [list(self._grids[s]) for s in row.images]
        if found != expected:
            raise TrainError(
                f"sample {row.sample_id}: the image processor makes grids {found} of its images, but {expected} by its "
                "settings; is another version of transformers installed than envs/ names?"
            )
        return {name: made[name] for name in ("pixel_values", "image_grid_thw")}


class _Patches(Mapping[str, torch.Tensor]):
    """A row's patches, made each time they are asked for: those of a whole iteration would not fit in memory."""

    def __init__(self, images: Images, row: Row) -> None:
        self._images, self._row = images, row

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._images.make(self._row)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(("pixel_values", "image_grid_thw"))

    def __len__(self) -> int:
        return 2

    def items(self) -> Any:
        return self._images.make(self._row).items()


def picture(data: bytes) -> Image.Image:
    """An image as vLLM hands it to the processor: upright, in RGB, what is transparent on white."""
    image = ImageOps.exif_transpose(Image.open(BytesIO(data)))
    if image.mode == "RGB":
        return image
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        over = image.convert("RGBA")
        white = Image.new("RGB", image.size, (255, 255, 255))
        white.paste(over, mask=over.getchannel("A"))
        return white
    return image.convert("RGB")


def _size(data: bytes) -> tuple[int, int]:
    """Width and height of an image once it is upright, without its pixels."""
    with Image.open(BytesIO(data)) as image:
        width, height = image.size
        return (height, width) if image.getexif().get(_ORIENTATION, 1) >= 5 else (width, height)
