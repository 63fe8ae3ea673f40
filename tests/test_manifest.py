"""manifest.json: what an entry holds, that jobs may append together, and that no secret gets in."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from openforge import manifest
from openforge.config import RunConfig, digest

ROOT = Path(__file__).resolve().parents[1]
BEGAN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def config(**over: Any) -> RunConfig:
    base: dict[str, Any] = {"model": "tiny-random", "iterations": 2, "tasks": {"source": "tiny"}, "seed": 7}
    return RunConfig.model_validate(base | over)


@pytest.fixture
def run(run_dir: Path) -> Path:
    for k in (0, 1):
        (run_dir / f"checkpoints/{k:04d}").mkdir(parents=True)
        card = {"iteration": k, "policy_version": f"{k}@{'ab'[k]}", "sha256": "ab"[k]}
        (run_dir / f"checkpoints/{k:04d}/checkpoint.json").write_text(json.dumps(card))
    return run_dir


def test_an_entry_says_what_the_iteration_was_made_with(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENFORGE_COMMAND", "snakemake train_made")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    manifest.append(run, config(), ROOT, BEGAN, manifest.trained(run, 1))
    data = json.loads((run / "manifest.json").read_text())
    (entry,) = data["entries"]
    assert (entry["iteration"], entry["policy_version"], entry["model_sha256"]) == (1, "1@b", "a")
    assert data["configs"][entry["config"]]["rollout"]["quorum"] == 0.75
    body = json.dumps(data["configs"][entry["config"]], sort_keys=True)
    assert entry["config"] == hashlib.sha256(body.encode()).hexdigest()
    assert entry["seeds"] == {"seed": 7, "tasks.seed": 0, "actor.data_loader_seed": 1}
    assert entry["tasks_sha256"] == hashlib.sha256((run / "tasks.parquet").read_bytes()).hexdigest()
    files = (ROOT / "envs" / name for name in ("train-cpu.txt", "train-cpu.site.py"))
    pins = b"".join(f.name.encode() + b"\0" + f.read_bytes() for f in files)
    assert entry["packages"]["train-cpu"] == hashlib.sha256(pins).hexdigest()
    assert set(entry["packages"]) >= {"core", "serve-gpu", "harness-pi"}
    assert entry["command"] == "snakemake train_made" and entry["scheduler"] == {"SLURM_JOB_ID": "4711"}
    assert entry["began"] == "2026-01-02T03:04:05+00:00" and entry["ended"] > "2026"
    assert entry["hardware"]["cores"] == len(os.sched_getaffinity(0)) and entry["hardware"]["memory"] > 2**28
    assert entry["versions"]["python"] == sys.version.split()[0]


def test_the_digest_is_of_the_resolved_configuration() -> None:
    # A default that is spelt out is the same configuration; another value is not.
    assert digest(config()) == digest(config(lag=0, rollout={"quorum": 0.75}))
    assert digest(config()) != digest(config(rollout={"quorum": 0.5}))


def test_an_evaluation_names_its_weights() -> None:
    about = manifest.evaluated("c", 2, "tiny@2", ["2@abc"])
    assert about | {"policy": "tiny@2", "iteration": 2, "model_sha256": "abc"} == about
    assert manifest.evaluated("c", None, "http://h", ["none@http://h"])["model_sha256"] is None


def test_configurations_are_kept_once_and_entries_in_order(run: Path) -> None:
    for over in ({}, {}, {"rollout": {"n": 3}}):
        manifest.append(run, config(**over), ROOT, BEGAN, {"iteration": 1})
    data = manifest.read(run)
    assert len(data["configs"]) == 2 and len(data["entries"]) == 3
    assert data["configs"][data["entries"][2]["config"]]["rollout"]["n"] == 3


def test_jobs_append_together(run: Path) -> None:
    script = """
import sys
from pathlib import Path
from datetime import UTC, datetime
from openforge import manifest
from openforge.config import RunConfig
c = RunConfig.model_validate({"model": "m", "iterations": 1, "tasks": {"source": "tiny"}})
print(flush=True)
sys.stdin.readline()
for i in range(5):
    manifest.append(Path(sys.argv[1]), c, Path(sys.argv[1]), datetime.now(UTC), {"iteration": i})
"""
    command = [sys.executable, "-c", script, str(run)]
    jobs = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for job in jobs:
        assert job.stdout is not None and job.stdout.readline() == "\n"
    for job in jobs:
        job.communicate("go\n")
    assert sorted(e["iteration"] for e in manifest.read(run)["entries"]) == sorted(3 * list(range(5)))
    assert not list(run.glob(".manifest*"))


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"schema": 1, "configs": {}}', '{"schema": 9, "configs": {}, "entries": []}']
)
def test_a_damaged_manifest_is_one_sentence_and_stays(run: Path, text: str) -> None:
    (run / "manifest.json").write_text(text)
    with pytest.raises(manifest.ManifestError, match=r"manifest\.json is damaged \(.*\); move it away") as e:
        manifest.append(run, config(), ROOT, BEGAN, {"iteration": 1})
    assert "\n" not in str(e.value)
    assert (run / "manifest.json").read_text() == text


def test_no_secret_gets_in(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "s3 cr'et")
    monkeypatch.setenv("SANDBOX_API_KEY", "s3 cr'et-and-more")
    monkeypatch.setenv("EMPTY_KEY", "")
    named = {"judge": [{"api_key_env": "MY_KEY"}], "other_env": "EMPTY_KEY", "plain": "HOME"}
    hidden = manifest.secrets(named)
    assert sorted(hidden) == ["s3 cr'et", "s3 cr'et-and-more"]
    words = ["snakemake", "--config", "a=s3 cr'et", "b=s3 cr'et-and-more", "c=kept"]
    text = manifest.redact(shlex.join(words), hidden)
    assert "cr" not in text and "and-more" not in text and "kept" in text and text.count("***") == 2
    assert manifest.redact({"a": ["x s3 cr'et", 1, None]}, hidden) == {"a": ["x ***", 1, None]}
    monkeypatch.setenv("OPENFORGE_COMMAND", shlex.join(words[3:]))
    manifest.append(run, config(), ROOT, BEGAN, {"iteration": 1, "note": "s3 cr'et-and-more"})
    assert "cr" not in json.dumps([manifest.read(run)["entries"][0][k] for k in ("command", "note")])


def test_git_names_commit_and_changes(tmp_path: Path) -> None:
    assert manifest.git(tmp_path) is None

    def git(*words: str) -> str:
        named = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        done = subprocess.run(["git", *named, *words], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "-q")
    (tmp_path / "Snakefile").write_text("a")
    git("add", ".")
    git("commit", "-qm", "x")
    commit = git("rev-parse", "HEAD")
    assert manifest.git(tmp_path) == {"commit": commit, "dirty": None}
    seen = set()
    for name, text in (("Snakefile", "b"), ("Snakefile", "c"), ("rules", "new"), ("rules", "newer")):
        (tmp_path / name).write_text(text)
        found = manifest.git(tmp_path)
        assert found is not None and found["commit"] == commit and found["dirty"] is not None
        seen.add(found["dirty"])
    assert len(seen) == 4
