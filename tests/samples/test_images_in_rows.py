"""Images in training rows: image tokens by the published rule, reasons of calls, alignment after merging."""

from __future__ import annotations

import json
import random
from array import array
from pathlib import Path
from typing import Any

import pytest
from samples_rig import call, config, episode, score

from openforge import blobs, tables
from openforge.samples.build import build
from openforge.samples.images import Shown, Vision, VisionError
from openforge.samples.merge import SamplesError, merge

Json = dict[str, Any]
IMAGE, VIDEO = 9, 8
QWEN3 = Vision(IMAGE, frozenset({VIDEO}), patch=16, merge=2, least=65536, most=16777216)
QWEN25 = Vision(IMAGE, frozenset({VIDEO}), patch=14, merge=2, least=3136, most=12845056)
# A processor that makes one token of 4 x 4 pixels.
SMALL = Vision(IMAGE, frozenset({VIDEO}), patch=2, merge=2, least=16, most=400)
SIZES = {"a": (8, 4), "b": (4, 12), "c": (4, 8), "odd": None}  # 2, 3 and 2 tokens


@pytest.mark.parametrize(
    ("vision", "width", "height", "grid", "tokens"),
    [
        # As vLLM answered with these screenshots.
        (QWEN3, 640, 360, (1, 22, 40), 220),
        (QWEN3, 1280, 720, (1, 44, 80), 880),
        (QWEN3, 1280, 800, (1, 50, 80), 1000),
        # By hand: 720 / 28 = 25.7, 1280 / 28 = 45.7.
        (QWEN25, 1280, 720, (1, 52, 92), 26 * 46),
        # Half is rounded to even: 48 / 32 = 1.5 and 80 / 32 = 2.5 are both 2; 2 x 2 squares have too few pixels then:
        # sqrt(65536 / 3840) = 4.131, 48 x 4.131 / 32 = 6.2 and 80 x 4.131 / 32 = 10.3, rounded up.
        (QWEN3, 80, 48, (1, 14, 22), 7 * 11),
        # Too large: sqrt(8000 x 4000 / 16777216) = 1.3811, 4000 / 1.3811 / 32 = 90.5, rounded down.
        (QWEN3, 8000, 4000, (1, 180, 362), 90 * 181),
        # A line is never nothing: scaled up by sqrt(16 / 180) = 0.298, 180 x 0.298 / 4 = 13.4, or down by
        # sqrt(900 / 400) = 1.5, 300 / 1.5 / 4 = 50.
        (SMALL, 180, 1, (1, 2, 28), 14),
        (SMALL, 300, 3, (1, 2, 100), 50),
    ],
)
def test_patches_by_the_published_rule(
    vision: Vision, width: int, height: int, grid: tuple[int, int, int], tokens: int
) -> None:
    assert vision.grid(width, height) == grid
    assert vision.tokens(width, height) == tokens


def test_image_tokens_are_runs_of_the_right_lengths() -> None:
    good = array("i", [1, 9, 9, 2, 9, 9, 9, 3])
    assert SMALL.shows(good, [2, 3]) and SMALL.shows(array("i", [1, 2]), [])
    assert not any(SMALL.shows(good, other) for other in ([3, 2], [2], [2, 3, 1], [5], [2, 2], []))
    assert not SMALL.shows(array("i", [9, 9, 8]), [2])  # a video's token
    assert not SMALL.shows(array("i", [9, 9, 9, 9, 9]), [2, 3])  # nothing between them


def seen(n: int, prompt: list[int], images: list[str], response: list[int], parent: int | None = None) -> Json:
    return call(n, prompt, response, parent) | {"images": images}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (seen(0, [1, 9, 9, 2], ["a"], [3]), None),
        (seen(0, [1, 9, 9, 9, 2, 9, 9], ["b", "c"], [3]), None),
        (seen(0, [1, 2], [], [3]), None),
        (seen(0, [1, 9, 9, 9, 2], ["a"], [3]), "image_tokens"),  # another size than the trainer's
        (seen(0, [1, 2], ["a"], [3]), "image_tokens"),  # a template without images
        (seen(0, [1, 9, 2], [], [3]), "image_tokens"),  # text that reads like a placeholder
        (seen(0, [1, 9, 9, 2, 9, 9, 9], ["b", "a"], [3]), "image_tokens"),  # in another order
        (seen(0, [1, 2], [], [3, 9]), "image_token_sampled"),
        (seen(0, [1, 2], [], [8]), "image_token_sampled"),
        (seen(0, [1, 9, 9, 2], ["odd"], [3]), "image_format"),
    ],
)
def test_calls_that_cannot_be_trained_say_why(row: Json, reason: str | None) -> None:
    assert Shown(SMALL, SIZES).fault(row, lambda _: array("i", row["prompt_suffix_ids"])) == reason
    merged, dropped = merge([row], Shown(SMALL, SIZES).fault)
    assert (len(merged), dict(dropped)) == ((1, {}) if reason is None else (0, {reason: 1}))


def test_a_language_model_sees_nothing() -> None:
    shown = Shown(None, SIZES)
    assert merge([seen(0, [1, 9, 9, 2], [], [9])], shown.fault)[0]
    assert merge([seen(0, [1, 9, 9, 2], ["a"], [3])], shown.fault)[1] == {"image_tokens": 1}


def test_images_stay_with_their_tokens_after_merging() -> None:
    """Fault 10: an image is one part of a message and many tokens of a prompt."""
    first = [1, 9, 9, 2]
    second = [*first, 5, 6, 3, 9, 9, 9, 4]
    third = [*second, 7, 4, 9, 9, 2]
    rows = [
        seen(0, first, ["a"], [5, 6]),
        seen(1, second, ["a", "b"], [7], 0),
        seen(2, third, ["a", "b", "c"], [5], 1),
    ]
    (row,), dropped = merge(rows, Shown(SMALL, SIZES).fault)
    assert not dropped
    assert row.token_ids.tolist() == [*third, 5] and row.images == ["a", "b", "c"]
    at = [i for i, m in enumerate(row.loss_mask) if m]
    assert [row.token_ids[i] for i in at] == [5, 6, 7, 5]
    assert [row.logprobs[i] for i in at] == [-0.005, -0.006, -1.007, -2.005]
    assert SMALL.shows(row.token_ids, [SMALL.tokens(*size) for name in row.images if (size := SIZES[name])])


def test_other_images_in_the_same_tokens_begin_another_row() -> None:
    """A harness that puts the newest screenshot in the place of the first one: by ids the prompt only grew."""
    prompt = [1, 9, 9, 2]
    rows = [seen(0, prompt, ["a"], [5]), seen(1, [*prompt, 5, 3], ["c"], [7], 0)]
    merged, dropped = merge(rows, Shown(SMALL, SIZES).fault)
    assert [(m.calls, m.images) for m in merged] == [([0], ["a"]), ([1], ["c"])] and not dropped
    assert sum(m.trained_tokens for m in merged) == 2
    rows[1]["images"] = ["a"]
    assert [m.calls for m in merge(rows, Shown(SMALL, SIZES).fault)[0]] == [[0, 1]]


def made(images: list[str]) -> tuple[list[Json], list[Json], list[Json]]:
    calls = [seen(0, [1, 9, 9, 2], images, [3 + i]) | {"episode_id": f"e{i}"} for i in range(2)]
    return [episode("e0"), episode("e1")], [score("e0", 1.0), score("e1", 0.0)], calls


def test_rows_name_their_images_and_every_call_is_counted() -> None:
    result = build(*made(["a"]), config(), (), Shown(SMALL, SIZES))
    assert [s["images"] for s in result.samples] == [["a"], ["a"]]
    tables.SAMPLES.arrow(result.samples)
    report = build(*made(["b"]), config(), (), Shown(SMALL, SIZES)).report
    assert report["calls"] == {"total": 2, "trained": 0, "dropped": {"image_tokens": 2}}
    assert report["episodes"]["dropped"] == {"no_trainable_call": 2}


def test_an_image_that_is_lost_stops_the_samples() -> None:
    with pytest.raises(SamplesError, match=r"^episode e0 shows image zz, which is not in the iteration's blobs$"):
        build(*made(["zz"]), config(), (), Shown(SMALL, SIZES))


def model(folder: Path, files: Json) -> Path:
    for name, data in files.items():
        (folder / f"{name}.json").write_text(json.dumps(data))
    return folder


SEES = {"image_token_id": 5, "video_token_id": 6, "vision_config": {}}


def test_how_a_model_sees_is_in_its_folder(tmp_path: Path) -> None:
    kind, size = {"image_processor_type": "Qwen2VLImageProcessorFast"}, {"shortest_edge": 10, "longest_edge": 99}
    settings = {"size": size, "patch_size": 16, "merge_size": 2} | kind
    expected = Vision(5, frozenset({6}), 16, 2, 10, 99)
    assert Vision.of(model(tmp_path, {"config": SEES, "preprocessor_config": settings})) == expected
    older = {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "merge_size": 2}
    older["image_processor_type"] = "Qwen2VLImageProcessor"
    found = Vision.of(model(tmp_path, {"preprocessor_config": older}))
    assert found == Vision(5, frozenset({6}), 14, 2, 3136, 12845056)
    (tmp_path / "preprocessor_config.json").unlink()
    assert Vision.of(model(tmp_path, {"processor_config": {"image_processor": settings}})) == expected
    assert Vision.of(model(tmp_path, {"config": {"vocab_size": 3}})) is None


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"config": SEES}, "processor_config.json cannot be read: "),
        ({"config": SEES, "preprocessor_config": {"image_processor_type": "CLIPImageProcessor"}}, "is CLIPImage"),
        ({"config": []}, "config.json must hold a JSON object"),
    ],
)
def test_a_model_that_sees_in_another_way_is_refused(tmp_path: Path, files: Json, sentence: str) -> None:
    with pytest.raises(VisionError, match=sentence) as e:
        Vision.of(model(tmp_path, files))
    assert "\n" not in str(e.value)


def test_images_are_read_from_the_blobs_of_all_shards(tmp_path: Path) -> None:
    draw = random.Random(0)
    rows = [
        {"sha256": f"h{i}", "mime": "image/png", "width": i + 1, "height": 7, "bytes": draw.randbytes(9)}
        for i in range(150)
    ]
    rows[3] |= {"mime": "image/webp", "width": None, "height": None}
    rows[4] |= {"mime": "application/json", "width": None, "height": None}
    files = [tmp_path / "1.parquet", tmp_path / "2.parquet"]
    for file, part in zip(files, (rows[:100], rows[100:]), strict=True):
        tables.write_table(file, tables.BLOBS, part)
    found = blobs.sizes(files)
    assert found.pop("h3") is None and "h4" not in found
    assert found == {r["sha256"]: (r["width"], 7) for r in rows if r["width"]}
    assert blobs.contents(files, {"h0", "h149", "none"}) == {"h0": rows[0]["bytes"], "h149": rows[149]["bytes"]}
