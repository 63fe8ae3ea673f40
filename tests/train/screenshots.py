"""Pictures that look like screenshots, as PNG files, with nothing but the standard library."""

from __future__ import annotations

import random
import struct
import zlib


def png(width: int, height: int, seed: int, transparent: bool = False) -> bytes:
    """A PNG of coloured rectangles and text-like noise, in RGB or RGBA with holes (W3C PNG specification, 5 and 11)."""
    draw, depth = random.Random(seed), 4 if transparent else 3
    rows = [bytearray(bytes([draw.randrange(256) for _ in range(depth)]) * width) for _ in range(height)]
    for _ in range(12):
        left, top = draw.randrange(width), draw.randrange(height)
        right, bottom = draw.randint(left + 1, width), draw.randint(top + 1, height)
        colour = bytes([draw.randrange(256) for _ in range(depth)])
        for row in rows[top:bottom]:
            row[left * depth : right * depth] = colour * (right - left)
    for row in rows[height // 3 : height // 3 + 40]:
        row[: 40 * depth] = draw.randbytes(40 * depth)
    body = zlib.compress(b"".join(b"\0" + row for row in rows))
    head = struct.pack(">2I5B", width, height, 8, 6 if transparent else 2, 0, 0, 0)
    parts = (b"IHDR" + head, b"IDAT" + body, b"IEND")
    chunks = (struct.pack(">I", len(p) - 4) + p + struct.pack(">I", zlib.crc32(p)) for p in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)
