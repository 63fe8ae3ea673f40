"""The whole DAG with every real part on the tiny random model: vLLM, mini-swe-agent, bubblewrap, the proxy, veRL."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


def snakemake(root: Path, *words: str) -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith("OPENFORGE_")}
    command = [sys.executable, "-m", "snakemake", "--nocolor", *words]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """results/tiny of a clone, after `snakemake train_tiny`; it shares the built software environments."""
    root = tmp_path_factory.mktemp("tiny")
    for part in ("Snakefile", "rules", "scripts", "config", "profiles", "envs", "openforge"):
        src = ROOT / part
        (shutil.copytree if src.is_dir() else shutil.copy)(src, root / part)
    (root / ".software").symlink_to(ROOT / ".software")
    snakemake(root, "train_tiny")
    yield root / "results" / "tiny"


def processes(word: str) -> list[str]:
    """Command lines of live processes that hold a word."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            found += [line] if word in line else []
    return found


def rows(run: Path, table: str) -> list[dict[str, object]]:
    files = sorted(run.glob(f"{table}/**/{table}.parquet"))
    assert files
    return [r for f in files for r in pq.ParquetFile(f).read().to_pylist()]


def test_every_planned_rollout_has_one_final_scored_episode(run: Path) -> None:
    # config/tiny.yaml: 2 iterations of 4 groups x 4; 4 held-out tasks x 2 before and after; 2 by command.
    rollouts, episodes = rows(run, "rollouts"), rows(run, "episodes")
    assert len(rollouts) == 2 * 16 + 2 * 8 + 2
    final = [e["rollout_id"] for e in episodes if e["final"]]
    assert sorted(map(str, final)) == sorted(str(r["rollout_id"]) for r in rollouts)
    assert {s["status"] for s in rows(run, "scores")} == {"scored"}
    assert {e["status"] for e in episodes} == {"completed"}
    assert all("caps none" in str(e["isolation"]) and e["network"] == "proxy" for e in episodes)


def test_every_sampled_token_is_trained_once_or_has_a_reason(run: Path) -> None:
    calls = {(c["episode_id"], c["call"]): c for c in rows(run, "calls")}
    samples = rows(run, "samples")
    trained = [(s["episode_id"], c) for s in samples for c in s["calls"]]  # type: ignore[attr-defined]
    assert trained and len(trained) == len(set(trained))
    assert all(calls[key]["trainable"] and calls[key]["delivery"] == "confirmed" for key in trained)
    tokens = sum(len(calls[key]["response_token_ids"]) for key in trained)  # type: ignore[arg-type]
    assert sum(sum(s["loss_mask"]) for s in samples) == tokens  # type: ignore[call-overload]
    for report in run.glob("samples/**/report.json"):
        figures = json.loads(report.read_text())["episodes"]
        assert figures["trained"] + sum(figures["dropped"].values()) == figures["total"] == 16


def test_a_group_has_spread_and_the_weights_change(run: Path) -> None:
    advantages = [a for s in rows(run, "samples") for a, m in zip(s["advantages"], s["loss_mask"], strict=True) if m]  # type: ignore[call-overload]
    assert min(advantages) < 0 < max(advantages)
    versions = [json.loads((run / "checkpoints" / k / "checkpoint.json").read_text()) for k in ("0000", "0001", "0002")]
    assert len({v["sha256"] for v in versions}) == 3
    by_iteration = {e["iteration"]: e["policy_version"] for e in rows(run, "episodes") if e["purpose"] == "train"}
    assert by_iteration == {1: versions[0]["policy_version"], 2: versions[1]["policy_version"]}
    losses = [m["value"] for m in rows(run, "metrics") if m["name"] == "actor/pg_loss"]
    assert losses and all(abs(float(str(v))) < 100 for v in losses)


def test_the_report_and_the_store_stand(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    assert summary["heldout"]["after"]["pass_at_1"]["n"] == 4
    page = (run / "report" / "index.html").read_text()
    assert "http://" not in page.replace("http://www.w3.org", "") and "https://" not in page
    query = "select iteration, avg(reward) from episodes where purpose = 'train' group by 1 order by 1"
    cli = Path(sys.executable).with_name("duckdb")
    done = subprocess.run(
        [str(cli), "-readonly", "-json", "store.duckdb", query], cwd=run, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    by_iteration = {r["iteration"]: r["avg(reward)"] for r in json.loads(done.stdout)}
    rewards: dict[object, list[float]] = {}
    score = {s["episode_id"]: s["reward"] for s in rows(run, "scores")}
    for e in rows(run, "episodes"):
        if e["purpose"] == "train":
            rewards.setdefault(e["iteration"], []).append(float(str(score[e["episode_id"]])))
    assert by_iteration == pytest.approx({k: sum(v) / len(v) for k, v in rewards.items()})


def openforge(root: Path, *words: str) -> list[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("OPENFORGE_")} | {"PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "openforge", *words]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return done.stdout.splitlines()


def test_an_episode_by_hand_under_a_checkpoint_of_the_run(run: Path) -> None:
    root = run.parents[1]
    out = root / "episode.json"
    task = root / "results" / "tiny" / "tasks" / "tiny-train-0000"
    lines = openforge(root, "episode", "--task", str(task), "--model", "tiny@2", "--config", "tiny", "--json", str(out))
    written = json.loads(out.read_text())
    last = json.loads((run / "checkpoints" / "0002" / "checkpoint.json").read_text())
    assert written["episode"]["policy_version"] == last["policy_version"]
    # config/tiny.yaml's harness has two steps.
    assert [line.split(":")[0] for line in lines if line.startswith("turn ")] == ["turn 1", "turn 2"]
    assert len(written["calls"]) == 2 and written["calls"][0]["messages"][0]["content"] == "Say something."
    assert f"reward: {written['reward']:g}" in lines and any(line.startswith("harness: ") for line in lines)


@pytest.mark.parametrize("cell", ["heldout", "command"])
def test_a_recorded_episode_is_replayed_the_same_without_a_policy(run: Path, cell: str) -> None:
    recorded = next(e for e in rows(run, "episodes") if e["cell"] == cell)
    lines = openforge(run.parents[1], "episode", "--replay", str(recorded["episode_id"]), "--run", "tiny")
    assert lines[-2] == f"requests: all {recorded['turns']} came the same"
    reward = json.loads(str(recorded["verifier_output"]))["score"]
    assert lines[-1].startswith(f"verdict: the same: completed, reward {reward:g}, ")


def test_the_number_of_files_depends_on_shards_only(run: Path) -> None:
    """Iteration 1 has 2 shards of 8 episodes: whatever the episodes, these are its files."""
    shard = {f"{table}/{{}}/shard={s:04d}/{table}.parquet" for table in ("episodes", "calls", "blobs") for s in (1, 2)}
    once = {f"{table}/{{}}/{table}.parquet" for table in ("rollouts", "scores", "samples", "metrics")}
    part = "purpose=train/cell=train/iteration=0001"
    expected = {f.format(part) for f in shard | once | {"samples/{}/report.json"}}
    found = {str(p.relative_to(run)) for p in run.rglob("*") if p.is_file() and part in str(p)}
    assert found == expected | {f"artifacts/{part}/shard={s:04d}.zip" for s in (1, 2)}
    timings = {p.name for p in [*run.glob("timings/*-train-train-0001*.json"), *run.glob("timings/train-0001*.json")]}
    jobs = ("plan-train-train", "score-train-train", "samples-train-train", "train")
    shards = {f"rollout-train-train-0001-{s:04d}.json" for s in (1, 2)}
    assert timings == {f"{job}-0001.json" for job in jobs} | shards


def test_the_manifest_tells_of_every_iteration(run: Path) -> None:
    manifest = json.loads((run / "manifest.json").read_text())
    cards = [json.loads((run / f"checkpoints/{k:04d}/checkpoint.json").read_text()) for k in (1, 2)]
    assert [e["policy_version"] for e in manifest["entries"]] == [c["policy_version"] for c in cards]
    assert [e["config"] for e in manifest["entries"]] == [c["config_digest"] for c in cards]
    assert all(manifest["configs"][c["config_digest"]]["trainer"]["threads"] == 1 for c in cards)


def test_nothing_is_left_behind(run: Path) -> None:
    assert not list((run / "partial").rglob("*")) if (run / "partial").exists() else True
    root = run.parents[1]
    # The warm server ends with the command that owned it: as soon as it has noticed.
    deadline = time.monotonic() + 60
    while alive := processes(str(root)):
        assert time.monotonic() < deadline, alive
        time.sleep(0.1)


def test_a_second_command_has_nothing_to_do(run: Path) -> None:
    assert "Nothing to be done" in snakemake(run.parents[1], "train_tiny")
