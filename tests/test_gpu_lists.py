"""The package lists of GPUs, which nothing here installs: every pin is there for this Python and fits the others."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from openforge import software

ROOT = Path(__file__).resolve().parents[1]
# It resolves from metadata alone, where pip would fetch gigabytes of CUDA to say the same.
UV = "uv==0.13.9"
# What veRL asks for and the training job never imports: experiment trackers, ray's dashboard, and what they need.
LEFT_OUT = {
    "train-gpu": {
        *("absl-py", "aiohttp-cors", "cffi", "cryptography", "cwevals", "distlib", "distro", "grpcio", "hf-xet"),
        *("lazy-importer", "markdown", "opencensus", "opencensus-context", "platformdirs", "proto-plus", "py-spy"),
        *("pyasn1", "pyasn1-modules", "pycparser", "pylatexenc", "python-discovery", "shellingham", "smart-open"),
        *("tensorboard", "tensorboard-data-server", "typer", "virtualenv", "wandb", "werkzeug", "wrapt"),
    },
    "serve-gpu": set(),
}


def pins(text: str) -> dict[str, str]:
    """Versions by normalised name."""
    found = (line.strip().partition("==") for line in text.splitlines() if "==" in line and not line.startswith("#"))
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, _, version in found}


@pytest.fixture(scope="module")
def uv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uv")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), UV]
    subprocess.run(pip, check=True, stdin=subprocess.DEVNULL)
    return folder / "bin" / "uv"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(LEFT_OUT))
def test_a_list_resolves_to_itself(uv: Path, tmp_path: Path, name: str) -> None:
    asked = ROOT / "envs" / f"{name}.txt"
    # pip's settings go to uv by its own names.
    places = {"UV_DEFAULT_INDEX": "PIP_INDEX_URL", "SSL_CERT_FILE": "PIP_CERT"}
    env = {**os.environ, **{k: os.environ[v] for k, v in places.items() if v in os.environ}}
    command = [str(uv), "pip", "compile", str(asked), "--no-header", "--no-annotate", "--python", sys.executable]
    done = subprocess.run(
        [*command, "--python-platform", "x86_64-manylinux_2_34", "--cache-dir", str(tmp_path)],
        env=env,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    found, expected = pins(done.stdout), pins(asked.read_text())
    assert set(found) - set(expected) == LEFT_OUT[name]
    assert {k: found[k] for k in expected} == expected


@pytest.mark.slow
def test_what_is_compiled_is_there_for_this_python() -> None:
    for name, version in pins((ROOT / "envs/train-gpu.source.txt").read_text()).items():
        done = subprocess.run(
            [sys.executable, "-m", "pip", "index", "versions", name],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        assert re.search(rf"[ ,]{re.escape(version)}(,|$)", done.stdout, re.M), (name, done.stdout + done.stderr)


def test_versions_are_those_of_the_cpu_list_but_torchs_and_transformers() -> None:
    cpu, gpu = (pins((ROOT / f"envs/train-{kind}.txt").read_text()) for kind in ("cpu", "gpu"))
    assert {k for k in cpu if gpu[k] != cpu[k]} == {"torch", "torchvision", "transformers"}
    # torchvision 0.26 is the release for torch 2.11.
    told = ("2.11.0", "0.26.0", "5.9.0", "0.9.1")
    assert (gpu["torch"], gpu["torchvision"], gpu["transformers"], gpu["verl"]) == told


def test_what_is_compiled_comes_after_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "envs").mkdir()
    before = {"x.txt": "torch==1.0\n", "x.source.txt": "needs-torch==2\n"}
    for file, text in before.items():
        (tmp_path / "envs" / file).write_text(text)
    ran: list[str] = []
    monkeypatch.setattr(software, "_run", lambda command, name: ran.append(" ".join(command[1:])))
    software.build("x", tmp_path)
    envs = tmp_path / "envs"
    assert ran[1:] == [
        f"-m pip install --quiet --no-deps -r {envs / 'x.txt'}",
        "-m pip install --quiet torch==1.0",
        f"-m pip install --quiet --no-deps --no-build-isolation -r {envs / 'x.source.txt'}",
    ]
    digest = software.pins_digest("x", tmp_path)
    (envs / "x.source.txt").write_text("needs-torch==3\n")
    assert software.pins_digest("x", tmp_path) != digest
