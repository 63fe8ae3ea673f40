"""`openforge serve`: which checkpoint, and what it says; the server itself is tests/policy's."""

from __future__ import annotations

from pathlib import Path

import pytest

from openforge import cli
from openforge.policy.lease import Endpoint
from openforge.verbs import VerbError, serve


def checkpoint(project: Path, k: int) -> Path:
    folder = project / f"results/mine/checkpoints/{k:04d}"
    folder.mkdir(parents=True)
    (folder / "checkpoint.json").write_text("{}")
    return folder


def test_the_newest_checkpoint_or_the_one_named(project: Path) -> None:
    zero, two = checkpoint(project, 0), checkpoint(project, 2)
    assert serve.checkpoint("mine", project) == ("mine", two)
    assert serve.checkpoint("mine@0", project) == ("mine", zero)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("mine", "does not stand; train it (snakemake train_mine), or prepare its base model"),
        ("mine@7", "checkpoints/0007 does not stand"),
        ("mine@last", "must be RUN, for its newest checkpoint, or RUN@k"),
        ("../mine", "must be RUN"),
    ],
)
def test_what_cannot_be_served_is_one_sentence(
    project: Path, name: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(VerbError):
        serve.checkpoint(name, project)
    assert cli.main(["serve", name]) == cli.USAGE
    assert sentence in capsys.readouterr().err


def test_url_key_and_model_are_told() -> None:
    text = serve.told(Endpoint("http://127.0.0.1:9/v1", "sesame", "policy", 4096, "2@abc"), "mine@2")
    for part in ("mine@2", "2@abc", "http://127.0.0.1:9/v1", "sesame", "model     policy"):
        assert part in text
