"""Images of messages as blobs: stored once by their hash, `sha256:...` in their place."""

from __future__ import annotations

import base64
import hashlib
import re
import struct
from typing import Any

from openforge.proxy.calls import Json

REFERENCE = "sha256:"


def stored(message: Json, blobs: dict[str, Json]) -> tuple[Json, list[str]]:
    """A message with references in place of its images' data, and their hashes in order.

    Args:
        message: chat message; images are parts of type image_url with a data URL. What is none stays as it is.
        blobs: gets a row of `tables.BLOBS` for each.
    """
    if not isinstance(message.get("content"), list):
        return message, []
    hashes: list[str] = []
    parts = [_part(p, blobs, hashes) for p in message["content"]]
    return ({**message, "content": parts}, hashes) if hashes else (message, [])


def _part(part: Any, blobs: dict[str, Json], hashes: list[str]) -> Any:
    if not isinstance(part, dict) or part.get("type") != "image_url":
        return part
    image = part.get("image_url")
    image = image if isinstance(image, dict) else {"url": image}
    found = decoded(image.get("url"))
    if found is None:
        return part
    mime, data = found
    sha256 = hashlib.sha256(data).hexdigest()
    if sha256 not in blobs:
        width, height = size(data) or (None, None)
        blobs[sha256] = {"sha256": sha256, "mime": mime, "width": width, "height": height, "bytes": data}
    hashes.append(sha256)
    return {**part, "image_url": {**image, "url": REFERENCE + sha256}}


_BASE64 = re.compile(r"data:[^,]{0,200};base64,")


def by_its_data(part: Json) -> bool:
    """Whether a part of a message is an image that is in the message, by a base64 data URL (its head says so: decoding
    every image of a history at every call would cost more than all else)."""
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, dict) else image
    return part.get("type") == "image_url" and isinstance(url, str) and _BASE64.match(url) is not None


def decoded(url: Any) -> tuple[str, bytes] | None:
    """Media type and bytes of a base64 data URL (RFC 2397); None for anything else."""
    if not isinstance(url, str) or not url.startswith("data:"):
        return None
    head, comma, data = url[5:].partition(",")
    mime, _, coding = head.rpartition(";")
    if not comma or coding != "base64":
        return None
    try:
        return mime or "text/plain", base64.b64decode(data, validate=True)
    except ValueError:
        return None


def size(data: bytes) -> tuple[int, int] | None:
    """Width and height in pixels as the header of a PNG, JPEG or GIF tells them; None for anything else."""
    try:
        if data.startswith(b"\x89PNG\r\n\x1a\n") and data[12:16] == b"IHDR":
            width, height = struct.unpack_from(">II", data, 16)
            return width, height
        if data[:6] in (b"GIF87a", b"GIF89a"):
            width, height = struct.unpack_from("<HH", data, 6)
            return width, height
        if data.startswith(b"\xff\xd8"):
            return _jpeg(data)
    except (struct.error, IndexError):
        pass
    return None


def _jpeg(data: bytes) -> tuple[int, int] | None:
    """From the first start of frame (ITU-T T.81, B.2.2)."""
    at = 2
    while data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
        elif 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack_from(">HH", data, at + 5)
            return width, height
        elif marker == 0x01 or 0xD0 <= marker <= 0xD8:  # without a length
            at += 2
        else:
            at += 2 + struct.unpack_from(">H", data, at + 2)[0]
    return None
