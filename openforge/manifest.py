"""results/<run>/manifest.json: what every iteration, and every evaluation of a suite, was made with.

Entries are appended and never changed; of several about one iteration the last one tells of the files that stand.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from openforge import __version__
from openforge import config as typed
from openforge.config import EvalConfig, RunConfig
from openforge.policy.weights import read_checkpoint
from openforge.software import pins_digest
from openforge.tables import write_beside

FILE = "manifest.json"
VERSION = 1
HIDDEN = "***"
# Variables that hold secrets without being named in a configuration.
_SECRET = ("SANDBOX_API_KEY",)
# What of a project decides over its results, where it is not in git yet.
_SOURCES = ("Snakefile", "rules", "scripts", "config", "envs", "profiles", "openforge", "pyproject.toml")
_SCHEDULER = ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_PARTITION")


class ManifestError(ValueError):
    """A manifest.json that cannot be read; one sentence."""


def read(run_dir: Path) -> dict[str, Any]:
    """The manifest of a run: schema, configs by digest, entries; an empty one where there is none.

    Raises:
        ManifestError: it is damaged.
    """
    file = run_dir / FILE
    try:
        data: dict[str, Any] = json.loads(file.read_text())
        if data["schema"] == VERSION and isinstance(data["configs"], dict) and isinstance(data["entries"], list):
            return data
        problem = f"its schema is {data['schema']}, {VERSION} is expected"
    except FileNotFoundError:
        return {"schema": VERSION, "configs": {}, "entries": []}
    except (OSError, ValueError, KeyError, TypeError) as e:
        problem = str(e) or type(e).__name__
    raise ManifestError(f"{file} is damaged ({problem}); move it away and a new one is begun")


def append(
    run_dir: Path, config: RunConfig | EvalConfig, root: Path, began: datetime, about: Mapping[str, Any]
) -> dict[str, Any]:
    """Append an entry, safe beside other jobs that do; returns it.

    Args:
        root: the project, for its commit and package lists.
        began: when the work began (UTC).
        about: what the entry tells of, see `trained` and `evaluated`.

    Raises:
        ManifestError: the manifest is damaged.
    """
    digest = typed.digest(config)
    entry: dict[str, Any] = {
        **about,
        "began": began.isoformat(timespec="seconds"),
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "config": digest,
        "seeds": _seeds(config),
        "tasks_sha256": _sha256(run_dir / "tasks.parquet"),
        "packages": packages(root),
        "git": git(root),
        "versions": {
            "openforge": __version__,
            "snakemake": version("snakemake"),
            "python": platform.python_version(),
        },
        "hardware": hardware(),
        "scheduler": {k: os.environ[k] for k in _SCHEDULER if k in os.environ},
        "command": os.environ.get("OPENFORGE_COMMAND"),
    }
    data = config.model_dump(mode="json")
    hidden = secrets(data)
    entry, data = redact(entry, hidden), redact(data, hidden)
    lock = run_dir / ".locks" / FILE
    lock.parent.mkdir(parents=True, exist_ok=True)
    with open(lock, "a") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        manifest = read(run_dir)
        manifest["configs"][digest] = data
        manifest["entries"].append(entry)
        write_beside(run_dir / FILE, json.dumps(manifest, indent=1) + "\n")
    return entry


def trained(run_dir: Path, k: int) -> dict[str, Any]:
    """What an entry of iteration k tells of: its checkpoint and the base model."""
    return {
        "iteration": k,
        "policy_version": read_checkpoint(run_dir / "checkpoints" / f"{k:04d}")["policy_version"],
        "model_sha256": read_checkpoint(run_dir / "checkpoints" / "0000")["sha256"],
    }


def evaluated(cell: str, iteration: int | None, policy: str, versions: list[str]) -> dict[str, Any]:
    """What an entry of a suite's evaluation tells of: its cell and the policy, with the digest of its weights."""
    shas = sorted({v.partition("@")[2] for v in versions if v and not v.startswith("none@")})
    return {
        "cell": cell,
        "iteration": iteration,
        "policy": policy,
        "policy_versions": versions,
        "model_sha256": shas[0] if len(shas) == 1 else None,
    }


def _seeds(config: RunConfig | EvalConfig) -> dict[str, int]:
    seeds = {"seed": config.seed, "tasks.seed": config.tasks.seed}
    return seeds | ({"actor.data_loader_seed": config.actor.data_loader_seed} if isinstance(config, RunConfig) else {})


def _sha256(file: Path) -> str | None:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else None


def packages(root: Path) -> dict[str, str]:
    """SHA-256 of every package list in envs/ by the name of its environment."""
    names = {p.name.split(".")[0] for p in (root / "envs").glob("*.txt")}
    return {name: pins_digest(name, root) for name in sorted(names)}


def git(root: Path) -> dict[str, str | None] | None:
    """Commit, and a digest of what differs from it (None: nothing does); None outside git."""
    commit = _git(root, "rev-parse", "HEAD")
    if commit is None:
        return None
    changed = _git(root, "diff", "HEAD", "--binary", "--no-color", "--no-ext-diff") or b""
    new = (_git(root, "ls-files", "--others", "--exclude-standard", "-z", "--", *_SOURCES) or b"").split(b"\0")
    digest = hashlib.sha256(changed)
    for name in filter(None, new):
        digest.update(name + b"\0")
        file = root / os.fsdecode(name)
        digest.update(hashlib.sha256(file.read_bytes()).digest() if file.is_file() else b"-")
    return {"commit": commit.decode().strip(), "dirty": digest.hexdigest() if changed or any(new) else None}


def _git(root: Path, *words: str) -> bytes | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def hardware() -> dict[str, Any]:
    """The machine of this job: CPU model, cores it may use, memory in bytes, names of its GPUs."""
    cpu = None
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "gpus": _gpus(),
    }


def _gpus() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, timeout=30
        )
    except subprocess.TimeoutExpired:
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


def secrets(config: Any) -> list[str]:
    """Values of the environment variables that hold secrets: those that keys ending in _env name, and ours."""
    names = {*_SECRET, *_variables(config)}
    return [value for name in sorted(names) if (value := os.environ.get(name))]


def _variables(data: Any) -> Iterator[str]:
    if isinstance(data, Mapping):
        for key, value in data.items():
            if str(key).endswith("_env") and isinstance(value, str):
                yield value
            else:
                yield from _variables(value)
    elif isinstance(data, (list, tuple)):
        for item in data:
            yield from _variables(item)


def redact(data: Any, hidden: list[str]) -> Any:
    """The same data with every secret in its texts replaced, as it is or as a shell's command line quotes it."""
    if isinstance(data, Mapping):
        return {k: redact(v, hidden) for k, v in data.items()}
    if isinstance(data, (list, tuple)):
        return [redact(v, hidden) for v in data]
    if isinstance(data, str):
        # The longest first: one secret may be part of another.
        for secret in sorted({s for h in hidden for s in (h, h.replace("'", "'\"'\"'"))}, key=len, reverse=True):
            data = data.replace(secret, HIDDEN)
    return data
