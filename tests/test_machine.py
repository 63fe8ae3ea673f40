"""What a machine lacks is one sentence, before anything is downloaded."""

from __future__ import annotations

import ast
import os
import platform
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import psutil
import pytest

from openforge import machine, tables
from openforge.config import Server
from openforge.config_sandbox import Sandbox
from openforge.policy.keeper import check_memory
from openforge.policy.server import ServerError
from openforge.rollout import backends, shard
from openforge.sandboxes import SandboxError
from openforge.train import launch
from openforge.train.job import Job, TrainError

ROOT = Path(__file__).resolve().parents[1]


def test_this_machine_will_do() -> None:
    done = subprocess.run([sys.executable, "openforge/machine.py"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("module", "name", "value", "words"),
    [
        (sys, "version_info", (3, 12, 1), "Python 3.11 .* this is Python 3.12"),
        (platform, "machine", lambda: "aarch64", "x86_64, this is Linux on aarch64"),
        (shutil, "disk_usage", lambda path: types.SimpleNamespace(free=3 * 2**30), "need 25 GB of disk, 3.0 are free"),
        (os, "sysconf", lambda name: 1024, "12 GB of memory"),
        (shutil, "which", lambda name: None, "apt-get install bubblewrap"),
    ],
)
def test_each_lack_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: object, name: str, value: object, words: str
) -> None:
    monkeypatch.chdir(tmp_path)  # nothing is built here yet
    monkeypatch.setattr(module, name, value)
    sentence = machine.lacks()
    monkeypatch.undo()
    assert re.search(words, sentence), sentence


def test_make_stops_before_it_downloads(tmp_path: Path) -> None:
    """`make demo` with a Python that is refused: no .venv is begun."""
    for f in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / f, tmp_path / f)
    (tmp_path / "envs").mkdir()
    shutil.copy(ROOT / "envs" / "core.txt", tmp_path / "envs" / "core.txt")
    (tmp_path / "openforge").mkdir()
    text = (ROOT / "openforge" / "machine.py").read_text().replace("(3, 11)", "(3, 99)")
    (tmp_path / "openforge" / "machine.py").write_text(text)
    done = subprocess.run(["make", f"PYTHON={sys.executable}", "demo"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0 and "OpenForge needs Python" in done.stderr and not (tmp_path / ".venv").exists()


def test_the_check_parses_on_an_old_python() -> None:
    ast.parse((ROOT / "openforge" / "machine.py").read_text(), feature_version=(3, 6))


def test_a_gpu_job_on_a_machine_without_one_is_a_sentence_at_its_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine, "gpus", list)
    sentence = r"server\.device is gpu, but .* has no GPU .*: run this job where one is, or use cpu"
    with pytest.raises(shard.MachineError, match=sentence):
        shard.check_machine(Server(device="gpu"))
    # Where the server is another machine's, its devices are too.
    shard.check_machine(Server(device="gpu", url="http://127.0.0.1:1/v1"))
    shard.check_machine(Server())
    samples = tmp_path / "samples.parquet"
    tables.write_table(samples, tables.SAMPLES, [])
    config = {"model": "tiny-random", "iterations": 1, "tasks": {"source": "tiny"}, "trainer": {"device": "gpu"}}
    job = Job("r", 1, "", None, str(samples), "", "", "", config, "")
    with pytest.raises(TrainError, match=r"trainer\.device is gpu, but .* has no GPU"):
        launch.train(job)


def test_building_a_gpu_environment_without_a_gpu_is_a_sentence(tmp_path: Path) -> None:
    if machine.gpus():
        pytest.skip("there is a GPU here")
    script = (ROOT / "scripts" / "software.py").read_text()
    fake = "import types\nsnakemake = types.SimpleNamespace(params=types.SimpleNamespace(env='serve-gpu'))\n"
    argv = [sys.executable, "-c", fake + script]
    done = subprocess.run(
        argv, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 1 and not list(tmp_path.iterdir())
    assert re.fullmatch(r"error: envs/serve-gpu\.txt is the package list of a GPU .* has no GPU .*\n", done.stderr)


REFUSING = """#!/bin/sh
[ "$1" = --version ] && echo "bubblewrap 0.8.0" && exit 0
echo "bwrap: No permissions to create new namespace, likely because the kernel does not allow it" >&2
exit 1
"""


@pytest.mark.parametrize(
    ("bwrap", "sentence"),
    [
        (None, "bubblewrap is not installed: install version 0.8 or later"),
        (
            REFUSING,
            "does not let bubblewrap make user namespaces; ask its administrator to set kernel.unprivileged_userns",
        ),
    ],
)
async def test_a_shard_refuses_before_a_server_starts_where_no_sandbox_can_be(
    bwrap: str | None, sentence: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if bwrap is not None:
        (tmp_path / "bwrap").write_text(bwrap)
        (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/nowhere" if bwrap is None else f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SandboxError, match=sentence):
        await backends.check("local", Sandbox(), "run", 1.0)


def test_too_little_memory_for_a_server_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(available=1e9))
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)
    with pytest.raises(ServerError, match=r"needs about 3\.3 GB of memory and 1\.0 GB are free: .*server\.kv_cache_gb"):
        check_memory(Server(), tmp_path)
