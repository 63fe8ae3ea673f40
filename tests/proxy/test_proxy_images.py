"""Images of messages: stored once by hash, with the size that their header tells, and shown by reference."""

from __future__ import annotations

import base64
import hashlib
import json
import struct
import zlib
from typing import Any

import pytest
from proxy_rig import Rig, chat
from test_proxy_lineage import call, episode

from openforge.proxy.images import decoded, size
from openforge.proxy.lineage import call_rows, prompt_ids, without_images
from openforge.tables import BLOBS, CALLS

Json = dict[str, Any]


def png(width: int, height: int, grey: int = 0) -> bytes:
    """A whole greyscale PNG (RFC 2083)."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    lines = (b"\0" + bytes([grey]) * width) * height
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")


def jpeg(width: int, height: int, frame: int = 0xC0, before: bytes = b"") -> bytes:
    """The head of a JPEG (T.81 B.1): APP0 of JFIF, what is put before the frame, the frame's header."""
    app0 = b"\xff\xe0\x00\x10JFIF\x00\x01\x01\x00\x00\x01\x00\x01\x00\x00"
    return (
        b"\xff\xd8"
        + app0
        + before
        + bytes([0xFF, frame])
        + struct.pack(">HBHHB", 11, 8, height, width, 1)
        + b"\x01\x11\x00"
    )


def url(data: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def shown(data: bytes, **more: Any) -> Json:
    return {"type": "image_url", "image_url": {"url": url(data), **more}}


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (png(640, 360), (640, 360)),
        (png(1, 1), (1, 1)),
        (jpeg(1280, 720), (1280, 720)),
        (jpeg(3, 5, frame=0xC2), (3, 5)),  # progressive
        # Huffman tables (C4) look like a frame, a fill byte stands before the marker, a thumbnail lies within APP1.
        (jpeg(7, 9, before=b"\xff\xc4\x00\x05\x01\x02\x03\xff"), (7, 9)),
        (jpeg(7, 9, before=b"\xff\xe1\x00\x0a" + jpeg(1, 1)[-10:-2]), (7, 9)),
        (b"GIF89a" + struct.pack("<HH", 20, 10) + b"\0\0\0", (20, 10)),
        (b"", None),
        (b"\x89PNG\r\n\x1a\n", None),
        (jpeg(8, 8)[:24], None),
        (b"\xff\xd8\xff\xd9", None),
        (b"RIFF\0\0\0\0WEBPVP8 ", None),
        (b"text", None),
    ],
)
def test_size_by_the_header(data: bytes, found: tuple[int, int] | None) -> None:
    assert size(data) == found


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("data:image/png;base64,aGk=", ("image/png", b"hi")),
        ("data:image/svg+xml;charset=utf-8;base64,aGk=", ("image/svg+xml;charset=utf-8", b"hi")),
        ("data:;base64,", ("text/plain", b"")),
        ("data:image/png;base64,a", None),
        ("data:image/png;base64,a*k=", None),
        ("data:image/png,hi", None),
        ("data:image/png;base64", None),
        ("https://h/x.png", None),
        (None, None),
    ],
)
def test_data_urls(given: Any, found: tuple[str, bytes] | None) -> None:
    assert decoded(given) == found


def test_images_are_blobs_in_the_prompts_order() -> None:
    a, b = png(4, 2), png(4, 2, grey=9)
    hash_a, hash_b = (hashlib.sha256(x).hexdigest() for x in (a, b))
    text = {"type": "text", "text": "look"}
    far = {"type": "image_url", "image_url": {"url": "https://h/x.png"}}
    first = [{"role": "user", "content": [text, shown(b, detail="low"), far]}]
    # Fault 10: image tokens (9) are many for one part; ids and logprobs stand as they came.
    result = {"role": "tool", "tool_call_id": "c", "content": [shown(a), shown(b)]}
    second = [*first, {"role": "assistant", "content": "ok"}, result]
    rows, blobs = call_rows(
        episode(
            call(0, [1, 9, 9, 9, 2], [3, 4], messages=first),
            call(1, [1, 9, 9, 9, 2, 3, 4, 9, 9, 9, 9, 9, 9, 5], [6], messages=second),
        )
    )
    CALLS.arrow(rows), BLOBS.arrow(blobs)
    assert [r["images"] for r in rows] == [[hash_b], [hash_b, hash_a, hash_b]]
    assert {b["sha256"]: (b["mime"], b["width"], b["height"], b["bytes"]) for b in blobs} == {
        hash_a: ("image/png", 4, 2, a),
        hash_b: ("image/png", 4, 2, b),
    }
    reference = {"type": "image_url", "image_url": {"url": f"sha256:{hash_b}", "detail": "low"}}
    assert json.loads(rows[0]["messages"]) == [{"role": "user", "content": [text, reference, far]}]
    assert [m["role"] for m in json.loads(rows[1]["messages"])] == ["assistant", "tool"]
    assert "base64" not in rows[0]["messages"] + rows[1]["messages"]
    assert without_images(first) == json.loads(rows[0]["messages"]) and first[0]["content"][1] == shown(b, detail="low")
    assert [(r["trainable"], r["reason"], r["parent"]) for r in rows] == [(False, "images", None), (False, "images", 0)]
    assert prompt_ids(rows, 1) == [1, 9, 9, 9, 2, 3, 4, 9, 9, 9, 9, 9, 9, 5]


def test_calls_with_images_in_them_are_trained() -> None:
    asked = [{"role": "user", "content": [{"type": "text", "text": "look"}, shown(png(4, 2))]}]
    rows, _ = call_rows(episode(call(0, [1, 9, 9, 2], [3], messages=asked)))
    assert rows[0]["reason"] is None and len(rows[0]["images"]) == 1
    sound = [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": ""}}, shown(png(4, 2))]}]
    rows, _ = call_rows(episode(call(0, [1, 9, 9, 2], [3], messages=sound)))
    assert rows[0]["reason"] == "images"


async def test_a_screenshot_through_the_proxy(rig: Rig) -> None:
    data = png(32, 16)
    asked = chat("x")
    asked["messages"] = [{"role": "user", "content": [{"type": "text", "text": "see"}, shown(data)]}]
    rig.stub.answers(200, {"choices": [{"message": {"content": "a square"}, "finish_reason": "stop"}], "usage": {}})
    rig.session()
    assert (await rig.ask(asked))[0] == 200
    assert rig.stub.bodies[0]["messages"][0]["content"][1] == shown(data)
    rows, blobs = call_rows(rig.records("call"))
    assert rows[0]["images"] == [hashlib.sha256(data).hexdigest()] and blobs[0]["bytes"] == data
