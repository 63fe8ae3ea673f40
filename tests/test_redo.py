"""from_iteration: what moves, what stays, and that a kill between any two renames is made good."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from openforge import config_paths, redo, store
from openforge.config import ConfigError, EvalConfig, RunConfig, from_iteration, load


def config(**over: Any) -> RunConfig:
    base: dict[str, Any] = {"model": "tiny-random", "iterations": 2, "tasks": {"source": "tiny"}}
    return RunConfig.model_validate(base | over)


@pytest.fixture
def run(run_dir: Path) -> Path:
    """The made run with what a real one has besides its tables."""
    for k in range(3):
        for folder, card in (("checkpoints", "checkpoint.json"), ("state", "state.json")):
            if k or folder == "checkpoints":
                (run_dir / folder / f"{k:04d}").mkdir(parents=True)
                (run_dir / folder / f"{k:04d}" / card).write_text(f'{{"iteration": {k}}}')
        (run_dir / "checkpoints" / f"{k:04d}" / "model.safetensors").write_text("weights")
    for name, k in (("train-0001", "0001"), ("train-0002", "0002"), ("eval-heldout-0000", "0000")):
        (run_dir / "timings" / f"{name}.json").write_text(json.dumps({"stage": "x", "seconds": 1.0, "k": k}))
    (run_dir / "timings" / "report.json").write_text(json.dumps({"stage": "report", "seconds": 1.0}))
    for part in ("train-train-0002", "train-train-0003", "eval-heldout-0001", "eval-heldout-0002"):
        (run_dir / "partial" / part / "0001" / "digest").mkdir(parents=True)
        (run_dir / "partial" / part / "0001" / "digest" / "episodes.jsonl").write_text("{}\n")
    (run_dir / "artifacts/purpose=train/cell=train/iteration=0002/shard=0001").mkdir(parents=True)
    (run_dir / "artifacts/purpose=train/cell=train/iteration=0002/shard=0001/a.tar").write_text("log")
    (run_dir / "summary.json").write_text("{}")
    (run_dir / "tasks" / "iteration=0009").mkdir(parents=True)
    (run_dir / "tasks" / "iteration=0009" / "task.yaml").write_text("a user's")
    config_paths.freeze(config(), run_dir)
    return run_dir


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def later(name: str) -> bool:
    """Whether a file of the made run is of iteration 2 or later, or says something about all of them."""
    marks = ("iteration=0002", "checkpoints/0002", "state/0002", "-0002/", "-0003/", "train-0002.json", "summary.json")
    return not name.startswith("tasks/") and any(m in name for m in marks)


def test_later_iterations_move_and_nothing_is_lost(run: Path) -> None:
    before = files(run)
    store.refresh(run)
    line = redo.redo(run, config(seed=9), 2)
    assert line == "made: from_iteration=2, earlier results of iterations 2 and later are in superseded/0001"
    after = files(run)
    # By hand: the made run's 19 files of iteration or checkpoint 2, and the 8 of the fixture.
    moved = {n for n in before if later(n)}
    assert {"rollouts/purpose=eval/cell=pi/iteration=0002/rollouts.parquet", "timings/train-0002.json"} <= moved
    assert {n.removeprefix("superseded/0001/") for n in after if n.startswith("superseded/")} == {*moved, "frozen.json"}
    assert all(after[f"superseded/0001/{n}"] == before[n] for n in (*moved, "frozen.json"))
    assert all(after[n] == before[n] for n in before if n not in moved and n != "frozen.json")
    assert json.loads((run / "frozen.json").read_text())["seed"] == 9
    # The store no longer sees them: 8 training episodes of iteration 1 and its lost attempt.
    assert store.rows(run, "select count(*) as n from all_episodes where purpose = 'train'") == [{"n": 9}]
    assert store.rows(run, "select max(iteration) as k from rollouts") == [{"k": 1}]
    assert store.unreadable(run) == []


def test_a_run_without_results_begins(tmp_path: Path) -> None:
    redo.check("new", config(), tmp_path / "new", 1)
    assert redo.redo(tmp_path / "new", config(), 1) == "new: from_iteration=1, nothing to move"
    assert "going on" in redo.redo(tmp_path / "new", config(), 1)
    assert not (tmp_path / "new" / "superseded").exists()


def test_the_same_command_goes_on_and_another_one_moves_again(run: Path) -> None:
    redo.redo(run, config(seed=9), 2)
    (run / "checkpoints" / "0002").mkdir()
    (run / "checkpoints" / "0002" / "checkpoint.json").write_text("new")
    for same in (config(seed=9), config(seed=9, iterations=7)):
        redo.check("made", same, run, 2)
        assert "going on" in redo.redo(run, same, 2) and "going on" in redo.outlook(run, same, 2)
    assert (run / "checkpoints" / "0002" / "checkpoint.json").read_text() == "new"
    assert "would move 1 files and folders of iterations 2 and later to superseded/0002" in redo.outlook(
        run, config(seed=8), 2
    )
    redo.redo(run, config(seed=8), 2)
    assert (run / "superseded/0002/checkpoints/0002/checkpoint.json").read_text() == "new"
    redo.redo(run, config(seed=9), 2)
    redo.redo(run, config(seed=9), 1)
    assert [p.name for p in sorted((run / "superseded").iterdir())] == ["0001", "0002", "0003", "0004"]
    assert redo.last_finished(run) == 0


class Killed(BaseException):
    pass


def test_a_kill_at_any_moment_is_made_good(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tmp_path / "whole" / "made"
    shutil.copytree(run, whole)
    redo.redo(whole, config(seed=9), 2)
    expected = {n: b for n, b in files(whole).items() if n != redo.RECORD}
    # Every change of a name is a step: of folders and, within write_beside, of small files.
    real, real_replace, left = os.rename, os.replace, 0

    def step(change: Any) -> Any:
        def maybe(*a: Any) -> None:
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            change(*a)

        return maybe

    for n in range(200):
        copy = tmp_path / f"killed{n}" / "made"
        shutil.copytree(run, copy)
        left = n
        with monkeypatch.context() as m:
            m.setattr(os, "rename", step(real))
            m.setattr(os, "replace", step(real_replace))
            try:
                redo.redo(copy, config(seed=9), 2)
                break
            except Killed:
                pass
        # The next command, whatever it is, finishes; the same one then finds its work done, or not yet begun.
        redo.finish(copy)
        redo.redo(copy, config(seed=9), 2)
        assert {n: b for n, b in files(copy).items() if n != redo.RECORD} == expected
        shutil.rmtree(copy)
    assert n > 20


def test_another_disk_is_copied_to(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, real, real_rmtree = files(run), os.rename, shutil.rmtree

    def rename(a: Path, b: Path) -> None:
        if Path(a).is_relative_to(run / "checkpoints"):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        real(a, b)

    def killed(folder: Path) -> None:
        (Path(folder) / "checkpoint.json").unlink()
        raise Killed

    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(Killed):
        redo.redo(run, config(seed=9), 2)
    # Killed half-way through the removal of what was copied: the copy stays as it is.
    monkeypatch.setattr(shutil, "rmtree", real_rmtree)
    redo.finish(run)
    assert not (run / "checkpoints/0002").exists()
    kept = run / "superseded/0001/checkpoints/0002/checkpoint.json"
    assert kept.read_bytes() == before["checkpoints/0002/checkpoint.json"]


def test_what_cannot_be_made_anew_is_a_sentence(run: Path) -> None:
    for k in (0, -1, 4):
        with pytest.raises(
            ConfigError, match=f"from_iteration={k}: run made has finished 2 iterations; K must be from 1 to 3"
        ):
            redo.check("made", config(), run, k)
    suite = EvalConfig.model_validate({"model": "tiny-random", "tasks": {"source": "tiny"}})
    with pytest.raises(ConfigError, match="eval_x is an evaluation and has no iterations"):
        redo.check("eval_x", suite, run, 1)
    for k in (1, 2, 3):
        redo.check("made", config(), run, k)
    (run / "state/0001/tombstone.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"state of iteration 1 was pruned .*; run made can be made anew from 1, 3$"):
        redo.check("made", config(), run, 2)
    (run / "checkpoints/0001/tombstone.json").write_text("{}")
    # With a lag, iteration 3 samples from checkpoint 1.
    with pytest.raises(ConfigError, match=r"weights of checkpoint 1 of run made were pruned .* from 1$"):
        redo.check("made", config(lag=1), run, 3)
    redo.check("made", config(), run, 3)
    (run / redo.RECORD).write_text("{")
    with pytest.raises(ConfigError, match=r"redo\.json is damaged .* remove it"):
        redo.finish(run)


def test_from_iteration_is_a_number_and_no_key(tmp_path: Path) -> None:
    assert from_iteration({"from_iteration": 2, "seed": 1}) == 2
    assert from_iteration({}) is None and from_iteration(None) is None
    for wrong in ("two", True, 2.0, None):
        with pytest.raises(ConfigError, match=r"from_iteration is .*; it must be an iteration's number, from 1"):
            from_iteration({"from_iteration": wrong})
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "r.yaml").write_text("model: m\niterations: 1\ntasks: {source: tiny}\n")
    loaded = load("r", tmp_path, {"from_iteration": 2, "seed": 1})
    assert loaded.config.seed == 1 and "from_iteration" not in loaded.config.model_dump()
    (tmp_path / "config" / "r.yaml").write_text("model: m\niterations: 1\ntasks: {source: tiny}\nfrom_iteration: 2\n")
    with pytest.raises(ConfigError, match="unknown key 'from_iteration'"):
        load("r", tmp_path)


def test_the_guard_names_the_command(run: Path) -> None:
    with pytest.raises(ConfigError, match="snakemake train_made --config from_iteration=3"):
        config_paths.check_frozen("made", config(lag=1), run)
    with pytest.raises(ConfigError, match="1 to 3"):
        config_paths.check_frozen("made", config(data={"train_batch_size": 3}), run)
    config_paths.check_frozen("made", config(lag=1, seed=3), run, anew=True)
    for over in ({"model": "other"}, {"environment": "x"}, {"tasks": {"source": "demo"}}):
        for anew in (False, True):
            with pytest.raises(ConfigError, match="another run name") as e:
                config_paths.check_frozen("made", config(**over), run, anew=anew)
            assert "from_iteration" not in str(e.value)
