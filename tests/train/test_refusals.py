"""Samples that cannot be trained on: one sentence each, before a model is loaded and with nothing written."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from openforge import tables
from openforge.config import RunConfig
from openforge.train.checks import check_samples
from openforge.train.job import Job, TrainError

VERSION = "0@aa"


def sample(**changes: Any) -> dict[str, Any]:
    """Four tokens, the last two trained."""
    return {
        "sample_id": "s1",
        "episode_id": "e1",
        "group_id": "g1",
        "calls": [0],
        "token_ids": [3, 1, 4, 1],
        "loss_mask": [0, 0, 1, 1],
        "logprobs": [0.0, 0.0, -0.5, -0.25],
        "rewards": [0.0, 0.0, 0.0, 1.0],
        "advantages": [0.0, 0.0, 0.7, 0.7],
        "weight": 1.0,
        "policy_version": VERSION,
        "images": [],
        **changes,
    }


def job(root: Path, samples: list[dict[str, Any]], config_json: str = '{"vocab_size": 10}', k: int = 1) -> Job:
    folder = root / "checkpoints/0000"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config_json)
    (folder / "checkpoint.json").write_text(json.dumps({"iteration": 0, "policy_version": VERSION}))
    tables.write_table(root / "samples.parquet", tables.SAMPLES, samples)
    config = RunConfig.model_validate(
        {
            "model": "tiny-random",
            "iterations": 1,
            "tasks": {"source": "tiny"},
            "actor": {"ppo_max_token_len_per_gpu": 6},
        }
    )
    return Job(
        run="run",
        iteration=k,
        checkpoint_in=str(folder),
        state_in=None,
        samples=str(root / "samples.parquet"),
        checkpoint_out=str(root / "checkpoints/0001"),
        state_out=str(root / "state/0001"),
        metrics_out=str(root / "m.parquet"),
        config=config.model_dump(mode="json"),
        config_digest="d",
    )


def refused(root: Path, *samples: dict[str, Any], **settings: Any) -> str:
    """What the job says of a table, as it is read back, without the table's path."""
    made = job(root, list(samples), **settings)
    with pytest.raises(TrainError) as e:
        check_samples(made, tables.read_rows(made.samples, tables.SAMPLES))
    assert "\n" not in str(e.value)
    return str(e.value).replace(f"{made.samples}: ", "").replace(made.checkpoint_in, "CHECKPOINT")


def test_a_good_sample_passes(tmp_path: Path) -> None:
    made = job(tmp_path, [sample(), sample(sample_id="s2")], config_json='{"text_config": {"vocab_size": 5}}')
    check_samples(made, tables.read_rows(made.samples, tables.SAMPLES))


def test_advantages_are_the_tables_or_the_jobs(tmp_path: Path) -> None:
    left = [sample(advantages=None), sample(sample_id="s2", advantages=None)]
    made = job(tmp_path, left)
    check_samples(made, tables.read_rows(made.samples, tables.SAMPLES))
    said = refused(tmp_path, sample(), left[1])
    assert said == "some samples have advantages and some have none; write the samples again"


SEES = {"image_token_id": 5, "vision_config": {}, "text_config": {"vocab_size": 10}}
LONG = {"token_ids": [1] * 7, "loss_mask": [0] + [1] * 6}
LONG |= {c: [-0.5] * 7 for c in ("logprobs", "rewards", "advantages")}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"logprobs": [-0.5, -0.25]}, "has 4 token ids and 2 logprobs; each token needs one value"),
        ({"logprobs": []}, "has 4 token ids and 0 logprobs; each token needs one value"),
        ({"advantages": [0.7]}, "has 4 token ids and 1 advantages; each token needs one value"),
        ({"loss_mask": [0, 0, 0, 0]}, "trains no token"),
        ({"loss_mask": [1, 0, 1, 1]}, "trains its first token, which nothing predicts"),
        ({"token_ids": [3, 1, 10, 1]}, "holds token id 10, but the vocabulary of CHECKPOINT has 10 tokens"),
        ({"token_ids": [3, 1, -1, 1]}, "holds token id -1, but the vocabulary of CHECKPOINT has 10 tokens"),
        (LONG, "has 7 tokens, more than a row may have (6, by actor.ppo_max_token_len_per_gpu)"),
        ({"logprobs": [0.0, 0.0, -0.5, math.nan]}, "has nan among the logprobs of its trained tokens"),
        ({"logprobs": [0.0, 0.0, 0.5, -0.5]}, "has 0.5 among the logprobs of its trained tokens; each must be a log"),
        ({"advantages": [0.0, 0.0, math.inf, 0.0]}, "has inf among the advantages of its trained tokens"),
        ({"policy_version": "0@bb"}, "was sampled by 0@bb, but CHECKPOINT is 0@aa; remove the iteration's episodes"),
    ],
)
def test_a_sample_that_cannot_be_trained_is_one_sentence(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    said = refused(tmp_path, sample(), sample(sample_id="s2", **changes))
    assert said.startswith(f"sample s2 {sentence}")


def test_a_model_that_sees_has_no_critic(tmp_path: Path) -> None:
    made = job(tmp_path, [sample(advantages=None)], config_json=json.dumps(SEES))
    processor = {"image_processor_type": "Qwen2VLImageProcessor"}
    (tmp_path / "checkpoints/0000/preprocessor_config.json").write_text(json.dumps(processor))
    made.config["algorithm"] = {"adv_estimator": "gae"}
    with pytest.raises(
        TrainError, match=r"^algorithm\.adv_estimator gae has a critic, and there is none of a model that"
    ):
        check_samples(made, tables.read_rows(made.samples, tables.SAMPLES))


def test_a_null_is_no_logprob(tmp_path: Path) -> None:
    made = job(tmp_path, [sample()])
    with pytest.raises(TrainError, match="sample s1 has a NULL among its logprobs"):
        check_samples(made, [sample(logprobs=[0.0, 0.0, None, -0.5])])
    with pytest.raises(TrainError, match="sample s1 has 4 token ids and no logprobs"):
        check_samples(made, [sample(logprobs=None)])


def test_an_older_policy_is_not_compared_with_the_newest(tmp_path: Path) -> None:
    made = job(tmp_path, [sample(policy_version="1@cc")], k=3)
    check_samples(made, tables.read_rows(made.samples, tables.SAMPLES))


def test_a_model_that_does_not_name_its_vocabulary_is_refused(tmp_path: Path) -> None:
    assert "config.json does not give the model's vocab_size (KeyError" in refused(tmp_path, sample(), config_json="{}")
    assert "config.json does not give the model's vocab_size (JSON" in refused(tmp_path, sample(), config_json="{")
