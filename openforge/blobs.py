"""Images in files of the table `blobs`: their sizes without their bytes, and the bytes of those that are asked for."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

import pyarrow.parquet as pq

from openforge.tables import BLOBS, check_file


def sizes(files: Iterable[str | Path]) -> dict[str, tuple[int, int] | None]:
    """Width and height in pixels of every image by its hash; None where its header does not tell them.

    Raises:
        TableError: a file is damaged or another table's.
    """
    found: dict[str, tuple[int, int] | None] = {}
    for file in files:
        check_file(file, BLOBS)
        with pq.ParquetFile(file) as f:
            for row in f.read(["sha256", "mime", "width", "height"]).to_pylist():
                if row["mime"].startswith("image/"):
                    known = row["width"] is not None and row["height"] is not None
                    found[row["sha256"]] = (row["width"], row["height"]) if known else None
    return found


def contents(files: Iterable[str | Path], hashes: Collection[str]) -> dict[str, bytes]:
    """The bytes of those of `hashes` that are in the files; what else is there is never in memory at once.

    Raises:
        TableError: a file is damaged or another table's.
    """
    found: dict[str, bytes] = {}
    for file in files:
        check_file(file, BLOBS)
        with pq.ParquetFile(file) as f:
            for batch in f.iter_batches(64, columns=["sha256", "bytes"]):
                for sha256, data in zip(batch["sha256"].to_pylist(), batch["bytes"], strict=True):
                    if sha256 in hashes:
                        found[sha256] = data.as_py()
    return found
