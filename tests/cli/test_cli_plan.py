"""`openforge plan RUN`: what is left and in all, measured on what the run has finished, else from stated defaults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import made_run
import pytest

from openforge import cli
from openforge.environments.claw_eval.folder import write_folder


def outlook(capsys: pytest.CaptureFixture[str], run: str) -> dict[str, Any]:
    assert cli.main(["plan", run, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    found: dict[str, Any] = json.loads(out)
    return found


def figure(found: dict[str, Any], name: str) -> tuple[float, str]:
    (one,) = [f for f in found["figures"] if f["name"] == name]
    return one["value"], one["basis"]


def sentence(capsys: pytest.CaptureFixture[str], run: str) -> str:
    assert cli.main(["plan", run]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return err


def test_a_fresh_run_is_planned_from_defaults(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "config" / "mine.yaml").write_text(
        "model: org/Some-7B-Instruct@abc\niterations: 3\ntasks: {source: tiny, train: 9, heldout: 5}\n"
        "data: {train_batch_size: 4}\nrollout: {n: 6, shards: 2}\nsampling: {max_tokens: 100}\n"
        "cells:\n  - {name: heldout, n: 2, at: every}\n  - {name: some, tasks: 3, at: last}\n"
    )
    found = outlook(capsys, "mine")
    rules = {"tasks": 1, "prepare": 1, "plan": 8, "rollout": 11, "score": 8, "samples": 3, "train": 3, "eval": 5}
    software = {f"software {n}": 1 for n in ("harness-mini", "serve-cpu", "train-cpu")}
    assert found["jobs"]["left"] == found["jobs"]["total"] == rules | {"write_report": 1} | software
    # 3 iterations of 4 groups of 6; 4 checkpoints on 5 tasks twice, the last one on 3 tasks.
    assert found["episodes"] == {w: {"train": 72, "eval": 43} for w in ("left", "total")}
    assert found["gpu_hours"] == {"left": 0, "total": 0}
    assert {f["basis"] for f in found["figures"]} == {"default"} and all(f["source"] for f in found["figures"])
    assert figure(found, "checkpoint") == (28e9, "default")
    # Checkpoints 0-3, the newest state and one besides; tables are small beside them.
    assert found["disk_bytes"]["left"] == pytest.approx(4 * 28e9 + 2 * 56e9, rel=1e-3)
    assert found["hours"]["left"] == found["hours"]["total"] > 0


def test_what_is_left_is_measured_on_the_runs_own_iterations(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = finished / "results" / "made"
    for k in range(3):
        (run_dir / f"checkpoints/{k:04d}/model.safetensors").write_bytes(b"x" * 10**6)
    (run_dir / "state/0001/tombstone.json").touch()
    (run_dir / "state/0002/optim.pt").write_bytes(b"x" * 2 * 10**6)
    config = finished / "config" / "made.yaml"
    config.write_text(config.read_text().replace("iterations: 2", "iterations: 4"))
    found = outlook(capsys, "made")
    assert found["episodes"] == {"left": {"train": 16, "eval": 11}, "total": {"train": 32, "eval": 20}}
    assert found["jobs"]["left"] == {
        **{"plan": 5, "rollout": 5, "score": 5, "samples": 2, "train": 2, "eval": 3, "write_report": 1},
        **{f"software {n}": 1 for n in ("harness-mini", "serve-cpu", "train-cpu")},
    }
    assert found["jobs"]["total"]["rollout"] == 9 and found["jobs"]["total"]["prepare"] == 1
    # made_run: 3 tokens a turn; in training 24 turns of 16 rollouts and one of a lost attempt.
    assert figure(found, "sampled tokens, train train") == (75 / 16, "measured")
    assert figure(found, "sampled tokens, eval heldout") == (3 * 18 / 12, "measured")
    assert figure(found, "prompt tokens, eval greedy") == (10.0, "measured")
    left = 75 + 6 * 4.5 + 3 * 3 + 2 * 3
    assert found["sampled_tokens"]["left"] == pytest.approx(left)
    # So far: training, heldout twice, greedy twice, pi once.
    assert found["sampled_tokens"]["total"] == pytest.approx(left + 75 + 54 + 18 + 6)
    # Timings: rollouts 4 and 6.5 s for 16, train 3 s; the rest are defaults.
    assert figure(found, "rollout, train train") == (10.5 / 16, "measured")
    assert figure(found, "rollout, eval pi") == (10.5 / 16, "measured")
    assert figure(found, "train") == (3.0, "measured")
    assert figure(found, "plan") == (0.5, "default")
    seconds = 27 * 10.5 / 16 + 2 * 3.0 + 10 * 0.5 + 2 * 0.8 + 3 * 1.0 + 1.5 + 3 * 60
    assert found["hours"]["left"] == pytest.approx(seconds / 3600)
    assert figure(found, "checkpoint")[0] == pytest.approx(10**6, rel=0.02)
    assert figure(found, "optimizer state")[0] == pytest.approx(2 * 10**6, rel=0.02)
    # Two more checkpoints, and a state beside the newest.
    tables = 27 * figure(found, "tables")[0]
    assert found["disk_bytes"]["left"] == pytest.approx(2 * 10**6 + 2 * 10**6 + tables, rel=0.02)


def test_gpu_hours_count_the_gpus_of_each_job(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = finished / "config" / "made.yaml"
    text = config.read_text().replace("iterations: 2", "iterations: 4")
    config.write_text(
        text + "server: {device: gpu, tensor_parallel_size: 2}\ntrainer: {device: gpu, nproc_per_node: 4}\n"
    )
    found = outlook(capsys, "made")
    assert found["gpu_hours"]["left"] == pytest.approx((27 * 10.5 / 16 * 2 + 2 * 3.0 * 4) / 3600)
    # Finished: 16 training rollouts, the evaluations of checkpoint 0 at the same pace, two times 3 s of training.
    done = (10.5 + 9 * 10.5 / 16) * 2 + 2 * 3.0 * 4
    assert found["gpu_hours"]["total"] == pytest.approx(found["gpu_hours"]["left"] + done / 3600)
    (finished / "config" / "made.yaml").write_text(text)
    assert outlook(capsys, "made")["gpu_hours"] == {"left": 0, "total": 0}


def test_a_finished_run_has_nothing_left(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = outlook(capsys, "made")
    assert found["jobs"]["left"] == {} and found["episodes"]["left"] == {"train": 0, "eval": 0}
    for key in ("prompt_tokens", "sampled_tokens", "hours", "disk_bytes", "gpu_hours"):
        assert found[key]["left"] == 0
    assert cli.main(["plan", "made"]) == 0
    out = capsys.readouterr().out
    # Tasks, checkpoint 0, two iterations of five jobs, five evaluations of four, the report.
    assert [line.split() for line in out.splitlines() if line.startswith("jobs")] == [["jobs", "0", "33"]]


def test_an_evaluation_suite_and_tasks_of_ones_own(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = {"turns": 3, "tokens": None, "seconds": 9.0}
    for name in ("one", "two", "three"):
        task = made_run.task(name, "copy", "heldout" if name != "one" else "train")
        write_folder(project / "mytasks" / name, {**task, "task_limits": limits})
    suite = project / "config" / "eval_x.yaml"
    suite.write_text(
        "model: tiny-random\ntasks: {source: mytasks}\ncells: [{name: a, n: 4}, {name: b, split: train}]\n"
    )
    found = outlook(capsys, "eval_x")
    assert found["episodes"]["left"] == {"train": 0, "eval": 2 * 4 + 1}
    assert found["jobs"]["left"]["prepare_policy"] == 1 and "train" not in found["jobs"]["left"]
    suite.write_text(suite.read_text() + "policy: http://127.0.0.1:9/v1\nserver: {device: gpu}\n")
    found = outlook(capsys, "eval_x")
    # An endpoint's GPUs are not this run's, and it needs no server of ours.
    assert found["gpu_hours"]["left"] == 0 and "prepare_policy" not in found["jobs"]["left"]
    assert "software serve-gpu" not in found["jobs"]["left"]


def test_sentences(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sentence(capsys, "nope") == "error: there is no run 'nope' in config/; runs there: mine\n"
    config = project / "config" / "mine.yaml"
    config.write_text("model: tiny-random\niterations: 1\ntasks: {source: gone}\ncells: [{name: a}]\n")
    assert "tasks.source 'gone'" in sentence(capsys, "mine")
    config.write_text("model: tiny-random\niterations: 1\ntasks: {source: tiny}\ncells: [{name: a}]\n")
    table = project / "results" / "mine" / "tasks.parquet"
    table.parent.mkdir()
    table.write_bytes(b"PAR1 cut off")
    assert f"{table} cannot be read as table tasks" in sentence(capsys, "mine")
