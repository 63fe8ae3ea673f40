"""Checkpoint and state folders without any training: carried over, refused, pruned; and the token trie."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openforge import tables
from openforge.config import RunConfig
from openforge.policy.weights import CheckpointError
from openforge.train import launch
from openforge.train.checkpoint import check_room, check_state, folder_beside, prune_states
from openforge.train.job import Job, TrainError
from openforge.train.trie import pack

WEIGHTS = b"weights of checkpoint 0"
# Digest of the one weights file's name and the digest of its bytes, worked out here on its own.
DIGEST = hashlib.sha256(b"model.safetensors\0" + hashlib.sha256(WEIGHTS).digest()).hexdigest()


CONFIG = RunConfig.model_validate({"model": "tiny-random", "iterations": 3, "tasks": {"source": "tiny"}})


def make_job(root: Path, k: int, samples: list[dict[str, Any]] | None = None) -> Job:
    table = root / f"samples{k}.parquet"
    tables.write_table(table, tables.SAMPLES, samples or [])
    return Job(
        run="run",
        iteration=k,
        checkpoint_in=str(root / f"checkpoints/{k - 1:04d}"),
        state_in=None if k == 1 else str(root / f"state/{k - 1:04d}"),
        samples=str(table),
        checkpoint_out=str(root / f"checkpoints/{k:04d}"),
        state_out=str(root / f"state/{k:04d}"),
        metrics_out=str(root / f"metrics{k}.parquet"),
        config=CONFIG.model_dump(mode="json"),
        config_digest="digest",
    )


def checkpoint_0(root: Path) -> Path:
    folder = root / "checkpoints/0000"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    (folder / "config.json").write_text("{}")
    card = {"iteration": 0, "policy_version": f"0@{DIGEST}", "sha256": DIGEST}
    (folder / "checkpoint.json").write_text(json.dumps(card))
    return folder


def state(root: Path, k: int, version: str, world: int = 1) -> Path:
    folder = root / f"state/{k:04d}"
    (folder / "huggingface").mkdir(parents=True)
    (folder / "optim_world_size_1_rank_0.pt").write_bytes(b"moments")
    card = {"iteration": k, "policy_version": version, "world_size": world}
    (folder / "state.json").write_text(json.dumps(card))
    return folder


def test_no_samples_carry_the_weights_on(tmp_path: Path) -> None:
    before = checkpoint_0(tmp_path)
    said: list[str] = []
    dropped = {
        "episodes": {"total": 3, "trained": 0, "dropped": {"zero_variance": 2, "status: shard_lost": 1}},
        "calls": {"total": 4, "trained": 0, "dropped": {}},
        "groups": {"total": 1, "trained": 0, "dropped": {"zero_variance": 1}},
    }
    (tmp_path / "report.json").write_text(json.dumps(dropped))
    launch.train(replace(make_job(tmp_path, 1), report=str(tmp_path / "report.json")), said.append)
    after = tmp_path / "checkpoints/0001"
    card = json.loads((after / "checkpoint.json").read_text())
    assert card["policy_version"] == f"1@{DIGEST}"
    assert card["trained"] is False and "every group was dropped" in card["reason"]
    assert os.stat(after / "model.safetensors").st_ino == os.stat(before / "model.safetensors").st_ino
    assert json.loads((before / "checkpoint.json").read_text())["iteration"] == 0
    metrics = tables.read_rows(tmp_path / "metrics1.parquet", tables.METRICS)
    assert {m["name"]: m["value"] for m in metrics} == {
        "training/rows": 0.0,
        "samples/episodes": 3.0,
        "samples/calls": 4.0,
        "samples/groups": 1.0,
        "samples/dropped/episodes/zero_variance": 2.0,
        "samples/dropped/episodes/status: shard_lost": 1.0,
        "samples/dropped/groups/zero_variance": 1.0,
    }
    assert said == [f"iteration 1: no sample to train on: every group was dropped; 1@{DIGEST} carries the weights on"]
    # A state without an optimizer is carried on in turn.
    launch.train(make_job(tmp_path, 2), said.append)
    assert json.loads((tmp_path / "state/0002/state.json").read_text())["world_size"] == 0


def test_no_samples_carry_the_optimizer_on(tmp_path: Path) -> None:
    checkpoint_0(tmp_path)
    launch.train(make_job(tmp_path, 1), lambda _: None)
    version = json.loads((tmp_path / "checkpoints/0001/checkpoint.json").read_text())["policy_version"]
    shutil.rmtree(tmp_path / "state/0001")
    state(tmp_path, 1, version, world=2)
    launch.train(make_job(tmp_path, 2), lambda _: None)
    after = tmp_path / "state/0002"
    assert (after / "optim_world_size_1_rank_0.pt").read_bytes() == b"moments"
    card = json.loads((after / "state.json").read_text())
    assert card == {"iteration": 2, "policy_version": f"2@{DIGEST}", "world_size": 2, "lora": None, "layout": None}


def test_a_state_of_other_weights_is_refused(tmp_path: Path) -> None:
    checkpoint = checkpoint_0(tmp_path)
    with pytest.raises(TrainError, match=r"belongs to policy 5@x, but .* is 0@"):
        check_state(state(tmp_path, 1, "5@x"), checkpoint, CONFIG)
    with pytest.raises(TrainError, match=r"written by 2 processes .* set trainer.nproc_per_node to 2"):
        check_state(state(tmp_path, 2, f"0@{DIGEST}", world=2), checkpoint, CONFIG)
    with pytest.raises(TrainError, match="holds no optimizer state"):
        check_state(tmp_path / "state/0003", checkpoint, CONFIG)


def test_a_state_that_was_cut_otherwise_is_refused(tmp_path: Path) -> None:
    checkpoint = checkpoint_0(tmp_path)
    hybrid = RunConfig.model_validate(CONFIG.model_dump() | {"actor": {"fsdp_config": {"fsdp_size": 1}}})
    plain = state(tmp_path, 1, f"0@{DIGEST}")
    with pytest.raises(
        TrainError, match=r"was cut as fsdp2, the configuration says strategy fsdp2 fsdp_size 1; set ac"
    ):
        check_state(plain, checkpoint, hybrid)
    card = json.loads((plain / "state.json").read_text())
    (plain / "state.json").write_text(json.dumps(card | {"layout": {"strategy": "fsdp2", "fsdp_size": 1}}))
    check_state(plain, checkpoint, hybrid)
    with pytest.raises(
        TrainError, match=r"was cut as strategy fsdp2 fsdp_size 1, the configuration says fsdp2; set act"
    ):
        check_state(plain, checkpoint, CONFIG)


def test_a_state_of_other_adapters_is_refused(tmp_path: Path) -> None:
    checkpoint = checkpoint_0(tmp_path)
    model = {"lora_rank": 4, "lora_alpha": 8}
    lora = RunConfig.model_validate(CONFIG.model_dump() | {"actor": {"model": model}})
    plain = state(tmp_path, 1, f"0@{DIGEST}")
    with pytest.raises(TrainError, match=r"with all weights .*, the configuration says lora_rank 4 lora_alpha 8 targ"):
        check_state(plain, checkpoint, lora)
    card = json.loads((plain / "state.json").read_text())
    (plain / "state.json").write_text(json.dumps(card | {"lora": {**model, "target_modules": "all-linear"}}))
    check_state(plain, checkpoint, lora)
    with pytest.raises(TrainError, match=r"with lora_rank 4 .*, the configuration says all weights .*actor.model back"):
        check_state(plain, checkpoint, CONFIG)


GAE = RunConfig.model_validate(CONFIG.model_dump(exclude={"algorithm"}) | {"algorithm": {"adv_estimator": "gae"}})


def test_a_state_without_a_critic_is_refused_where_one_goes_on(tmp_path: Path) -> None:
    checkpoint = checkpoint_0(tmp_path)
    plain = state(tmp_path, 1, f"0@{DIGEST}")
    with pytest.raises(TrainError, match=r"state/0001 holds no critic, which adv_estimator gae goes on from"):
        check_state(plain, checkpoint, GAE)
    (plain / "critic").mkdir()
    (plain / "critic/config.json").write_text("{}")
    check_state(plain, checkpoint, GAE)


def test_pruned_states_are_tombstones_that_name_the_nearest_full_one(tmp_path: Path) -> None:
    checkpoint = checkpoint_0(tmp_path)
    for k in range(1, 6):
        state(tmp_path, k, f"0@{DIGEST}")
    assert prune_states(tmp_path / "state", before=5, keep=10) == []
    assert prune_states(tmp_path / "state", before=5, keep=1) == ["0001", "0002", "0003"]
    assert sorted(f.name for f in (tmp_path / "state/0003").iterdir()) == ["state.json", "tombstone.json"]
    check_state(tmp_path / "state/0005", checkpoint, CONFIG)
    check_state(tmp_path / "state/0004", checkpoint, CONFIG)
    with pytest.raises(TrainError, match="state/0003 was pruned; no full state is left before it"):
        check_state(tmp_path / "state/0003", checkpoint, CONFIG)
    state(tmp_path, 0, f"0@{DIGEST}")
    with pytest.raises(TrainError, match="the nearest full state before it is 0000"):
        check_state(tmp_path / "state/0003", checkpoint, CONFIG)


def test_a_kill_while_a_state_is_pruned_is_made_good(tmp_path: Path) -> None:
    for k in (1, 2):
        state(tmp_path, k, f"0@{DIGEST}")
    (tmp_path / "state/0001/tombstone.json").write_text("{}")
    assert prune_states(tmp_path / "state", before=3, keep=1) == []
    assert sorted(f.name for f in (tmp_path / "state/0001").iterdir()) == ["state.json", "tombstone.json"]


def test_training_on_pruned_weights_is_refused(tmp_path: Path) -> None:
    (checkpoint_0(tmp_path) / "tombstone.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"weights of checkpoint 0 of run .* were pruned .*; none is kept"):
        launch.train(make_job(tmp_path, 1), lambda _: None)
    assert not (tmp_path / "checkpoints/0001").exists()


def test_too_little_disk_or_memory_is_said_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(checkpoint_0(tmp_path) / "model.safetensors", "ab") as f:
        f.truncate(2 * 10**9)
    job = make_job(tmp_path, 1)
    usage = shutil.disk_usage(tmp_path)
    # 2 GB of weights, 4 GB of moments, and 256 MiB of margin.
    for free, enough in ((6_260_000_000, False), (6_270_000_000, True)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        if enough:
            check_room(job)
            continue
        with pytest.raises(TrainError, match=r"needs about 6\.3 GB of disk .*, 6\.3 GB are free in .*/checkpoints;"):
            check_room(job)
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PHYS_PAGES": 1_900_000, "SC_PAGE_SIZE": 4096}[name])
    with pytest.raises(TrainError, match=r"at least 8\.0 GB of memory .*, this machine has 7\.8 GB"):
        check_room(job)


def test_a_critic_needs_room_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(checkpoint_0(tmp_path) / "model.safetensors", "ab") as f:
        f.truncate(2 * 10**9)
    usage = shutil.disk_usage(tmp_path)
    # 2 GB of weights, 4 GB of moments, 2 and 4 of the critic's, and 256 MiB of margin.
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=12_260_000_000))
    job = replace(make_job(tmp_path, 1), config=GAE.model_dump(mode="json"))
    with pytest.raises(TrainError, match=r"needs about 12\.3 GB of disk"):
        check_room(job)


def test_a_failed_write_leaves_the_old_folder_and_nothing_beside(tmp_path: Path) -> None:
    target = tmp_path / "0001"
    with folder_beside(target) as f:
        (f / "a").write_text("old")
    with pytest.raises(OSError, match="disk full"), folder_beside(target) as f:
        (f / "a").write_text("half")
        raise OSError("disk full")
    assert (target / "a").read_text() == "old"
    with folder_beside(target) as f:
        (f / "b").write_text("new")
    assert [p.name for p in target.iterdir()] == ["b"]
    assert [p.name for p in tmp_path.iterdir()] == ["0001"]


# ---- following the job ---------------------------------------------------------------------------
def follow(script: str, progress: launch.Progress) -> None:
    launch._follow([sys.executable, "-u", "-c", script], dict(os.environ), progress)


def test_a_failed_job_is_one_error_with_its_last_lines() -> None:
    said: list[str] = []
    with pytest.raises(TrainError, match=r"ended with code 1(.|\n)*ZeroDivisionError"):
        follow("print('noise'); print('train: step 1/2'); 1 / 0", said.append)
    assert said == ["step 1/2"]


def test_a_killed_job_is_one_sentence() -> None:
    with pytest.raises(TrainError, match=r"was killed \(signal 9\): by someone, or by the kernel for want of memory"):
        follow("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", lambda _: None)


def test_a_refusal_of_the_job_is_its_sentence() -> None:
    with pytest.raises(TrainError) as e:
        follow("print('noise'); print('openforge: write the samples again'); raise SystemExit(2)", print)
    assert str(e.value) == "write the samples again"


def test_an_interrupt_ends_the_job() -> None:
    # The job waits for its own death; the interrupt comes while we read its lines.
    pids: list[int] = []

    def interrupt(line: str) -> None:
        pids.append(int(line))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        follow("import os, threading; print('train:', os.getpid()); threading.Event().wait()", interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


# ---- trie ----------------------------------------------------------------------------------------
@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=8))
def test_the_trie_holds_every_prefix_once(rows: list[list[int]]) -> None:
    trie = pack([np.array(r) for r in rows])
    prefixes = {tuple(r[: i + 1]) for r in rows for i in range(len(r))}
    assert len(trie.token) == len(prefixes)
    for row, path in zip(rows, trie.paths, strict=True):
        assert trie.token[path].tolist() == row
        assert trie.depth[path].tolist() == list(range(len(row)))
        # A node's ancestors by interval are exactly the nodes of its own path.
        for i, node in enumerate(path):
            above = [j for j in range(len(trie.token)) if j <= node < trie.end[j]]
            assert above == sorted(path[: i + 1].tolist())
