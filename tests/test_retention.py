"""Which weights stay under trainer.keep_checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import made_run
import pytest

from openforge import retention, tables
from openforge.config import ConfigError, RunConfig, load
from openforge.policy.weights import CheckpointError, check_kept

ROOT = Path(__file__).resolve().parents[1]
EVERY = {"name": "curve", "at": "every"}


def config(keep: dict[str, int] | None, **over: Any) -> RunConfig:
    base: dict[str, Any] = {"model": "m", "iterations": 9, "tasks": {"source": "tiny"}}
    return RunConfig.model_validate(base | {"trainer": {"keep_checkpoints": keep}} | over)


def checkpoints(run_dir: Path, last: int) -> Path:
    for k in range(last + 1):
        folder = run_dir / f"checkpoints/{k:04d}"
        (folder / "more").mkdir(parents=True)
        for name in ("model.safetensors", "config.json", "more/x"):
            (folder / name).write_bytes(b"w")
        (folder / "checkpoint.json").write_text(json.dumps({"iteration": k}))
    return run_dir


def results(run_dir: Path, cell: str, rates: dict[int, float]) -> None:
    for k, p in rates.items():
        tables.write_beside(run_dir / f"eval/cell={cell}/iteration={k:04d}/eval.json", json.dumps({"p": p}))


def left(run_dir: Path) -> list[int]:
    return sorted(int(p.parent.name) for p in run_dir.glob("checkpoints/*/model.safetensors"))


def plan(run_dir: Path, k: int, policy: int) -> None:
    row = made_run.rollout(made_run.task("t", "copy", "train"), "train", "train", k, 0)
    path = run_dir / tables.partition_path("rollouts", "train", "train", k)
    tables.write_table(path, tables.ROLLOUTS, [{**row, "policy": f"{run_dir.name}@{policy}"}])


@pytest.mark.parametrize(
    ("keep", "spare", "stay"),
    [
        (None, 0, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"last": 2}, 0, [0, 6, 7]),
        ({"last": 1}, 0, [0, 7]),
        # While train(7) is not known to be finished it may have to run again, from checkpoint 6.
        ({"last": 1}, 1, [0, 6, 7]),
        ({"every": 3}, 0, [0, 3, 6, 7]),
        ({"last": 3, "every": 4}, 0, [0, 4, 5, 6, 7]),
        ({"last": 99}, 0, [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_what_is_named_stays(tmp_path: Path, keep: dict[str, int] | None, spare: int, stay: list[int]) -> None:
    run = checkpoints(tmp_path / "r", 7)
    pruned = retention.prune(run, config(keep), spare)
    assert left(run) == stay and pruned == [k for k in range(8) if k not in stay]
    # The card of a pruned one stands as it was: it is what a finished iteration is known by.
    assert len(list(run.glob("checkpoints/*/checkpoint.json"))) == 8
    for k in pruned:
        assert sorted(p.name for p in (run / f"checkpoints/{k:04d}").iterdir()) == ["checkpoint.json", "tombstone.json"]
    assert retention.prune(run, config(keep), spare) == []


def test_the_best_stay(tmp_path: Path) -> None:
    run = checkpoints(tmp_path / "r", 5)
    rates = {0: 0.1, 1: 0.7, 2: 0.9, 3: 0.7, 4: 0.2, 5: 0.3}
    results(run, "curve", rates)
    results(run, "other", dict.fromkeys(range(6), 0.5))
    cells = [{"name": "other", "at": "last"}, EVERY]
    # 2, and of the equal 1 and 3 the later one.
    assert retention.prune(run, config({"best": 2}, cells=cells)) == [1, 4]
    (run / "eval/cell=curve/iteration=0002/eval.json").write_text("{}")
    said: list[str] = []
    retention.apply(run, config({"best": 1}, cells=cells), said.append)
    assert left(run) == [0, 2, 3, 5]
    assert (
        len(said) == 1 and said[0].startswith("warning: no weights were pruned:") and "eval.json is damaged" in said[0]
    )


def test_what_is_still_to_be_read_stays(tmp_path: Path) -> None:
    run = checkpoints(tmp_path / "r", 6)
    keep = {"last": 1}
    # An evaluation of every checkpoint that lacks those of 2 and 3.
    results(run, "curve", {0: 0.0, 1: 0.0, 4: 0.0, 5: 0.0, 6: 0.0})
    # Rollouts of iteration 7 planned from checkpoint 4; those of 6 are history.
    plan(run, 7, 4)
    plan(run, 6, 1)
    retention.prune(run, config(keep, cells=[EVERY]))
    assert left(run) == [0, 2, 3, 4, 6]
    # A suite has planned to sample from 3, and one from another run's 2.
    for suite, policy in (("eval_a", "r@3"), ("eval_b", "other@2")):
        raw = made_run.rollout(made_run.task("t", "copy", "heldout"), "eval", "c", 3, 0)
        path = tmp_path / suite / tables.partition_path("rollouts", "eval", "c", 3)
        tables.write_table(path, tables.ROLLOUTS, [{**raw, "policy": policy}])
    retention.prune(run, config(keep))
    assert left(run) == [0, 3, 4, 6]
    results(tmp_path / "eval_a", "c", {3: 0.5})
    retention.prune(run, config(keep))
    assert left(run) == [0, 4, 6]
    # With a lag the next rollouts sample from one before the newest.
    again = checkpoints(tmp_path / "s", 6)
    retention.prune(again, config(keep, lag=1))
    assert left(again) == [0, 5, 6]


def test_a_kill_while_pruning_is_made_good(tmp_path: Path) -> None:
    run = checkpoints(tmp_path / "r", 3)
    (run / "checkpoints/0001/tombstone.json").write_text("{}")
    (run / "checkpoints/0001/config.json").unlink()
    assert retention.prune(run, config({"last": 1})) == [2]
    assert left(run) == [0, 3]


def test_pruned_weights_are_a_sentence_that_names_the_nearest(tmp_path: Path) -> None:
    run = checkpoints(tmp_path / "r", 6)
    retention.prune(run, config({"every": 3}))
    check_kept(run / "checkpoints/0003")
    for k, nearest in ((1, 0), (2, 3), (4, 3), (5, 6)):
        with pytest.raises(
            CheckpointError, match=f"checkpoint {k} of run r were pruned .*; the nearest kept one is {nearest}$"
        ):
            check_kept(run / f"checkpoints/{k:04d}")


@pytest.mark.parametrize(
    ("keep", "sentence"),
    [
        ("{}", r"'trainer\.keep_checkpoints' is empty; set last, every or best"),
        ("{best: 1}", r"'trainer\.keep_checkpoints\.best' has no effect without a cell that has 'at: every'"),
        ("{last: 0}", r"'trainer\.keep_checkpoints\.last' is 0"),
        ("{newest: 1}", r"unknown key 'trainer\.keep_checkpoints\.newest'"),
    ],
)
def test_a_keep_that_cannot_be_is_a_sentence(tmp_path: Path, keep: str, sentence: str) -> None:
    (tmp_path / "config").mkdir()
    text = f"model: m\niterations: 1\ntasks: {{source: tiny}}\ntrainer: {{keep_checkpoints: {keep}}}\n"
    (tmp_path / "config" / "r.yaml").write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        load("r", tmp_path)
