"""`openforge doctor`: what this machine or node can do, a line a check, and what to ask an administrator for.

A check that fails in a way of its own is a line as well: the verb is for places where things are broken.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from openforge import machine, software
from openforge.sandboxes import bwrap
from openforge.verbs import node
from openforge.verbs.sizes import said

# What `make demo` writes once everything is built: five checkpoints of 0.6 GB, three optimizer states of 1.3 GB.
DEMO_BYTES = 8 * 10**9
# Below these, larger runs than the demo meet limits.
OPEN_FILES, SHARED_MEMORY, TEMPORARY, PORTS = 4096, 10**9, 10**9, 1000


@dataclass(frozen=True)
class Check:
    """One line.

    Attributes:
        state: ok; missing (`make demo` cannot run here); note (it can, and this is worth knowing).
        ask: what to change, or to ask an administrator for; empty if nothing.
    """

    name: str
    state: Literal["ok", "missing", "note"]
    says: str
    ask: str = ""

    def __str__(self) -> str:
        return f"{self.state:8}{self.name:22}{self.says}" + (f"; ask for: {self.ask}" if self.ask else "")


def run(root: Path, as_json: bool) -> int:
    """Print the checks; exit code 0 if `make demo` would run here, 1 if not."""
    checks = look(root)
    missing = [c.name for c in checks if c.state == "missing"]
    if as_json:
        print(json.dumps({"would_run_demo": not missing, "checks": [asdict(c) for c in checks]}, indent=1))
        return 1 if missing else 0
    for check in checks:
        print(check)
    print(f"make demo would not run here: {', '.join(missing)}" if missing else "make demo would run here")
    return 1 if missing else 0


def look(root: Path) -> list[Check]:
    """Every check, in the order of what to repair first."""
    groups: dict[str, Callable[[], Iterable[Check]]] = {
        "python": _python,
        "system": lambda: [_lack("system", machine.system(), f"Linux {os.uname().release}, {os.uname().machine}")],
        "isolation": _isolation,
        "memory": _memory,
        "disk": lambda: _disk(root),
        "results folder": lambda: _file_system(root),
        "cpu": _cpu,
        "ports": _ports,
        "gpu": _gpu,
        "scheduler": _scheduler,
        "software": lambda: _software(root),
        "shared memory": _shared_memory,
        "open files": _open_files,
        "clock": lambda: _clock(root),
    }
    found = []
    for name, group in groups.items():
        try:
            found += list(group())
        except Exception as e:
            found.append(Check(name, "note", f"could not be looked at ({type(e).__name__}: {_line(e)})"))
    return found


def _line(e: object) -> str:
    return " ".join(str(e).split())


def _lack(name: str, sentence: str, otherwise: str) -> Check:
    return Check(name, "missing", sentence.rstrip(".")) if sentence else Check(name, "ok", otherwise)


def _python() -> Iterator[Check]:
    version = ".".join(map(str, sys.version_info[:3]))
    yield _lack("python", machine.python(), version)
    yield Check("snakemake", "ok", metadata.version("snakemake"))


def _isolation() -> Iterator[Check]:
    try:
        found = bwrap.probe()
    except OSError as e:
        found = {"works": False, "bwrap": None, "why": f"bubblewrap cannot be started: {e}"}
    if found["works"]:
        yield Check("isolation", "ok", f"bubblewrap {found['version']} makes sandboxes on Linux {found['kernel']}")
    else:
        ask = "" if found["bwrap"] else "the package bubblewrap"
        yield Check("isolation", "missing", _line(found["why"]).rstrip("."), ask)
    settings = node.user_namespaces()
    listed = ", ".join(f"{k} = {v}" for k, v in settings.items()) or "this kernel names no setting of theirs"
    refused = node.refused_user_namespaces(settings)
    if found["works"] or not refused:
        yield Check("user namespaces", "ok" if found["works"] else "note", listed)
    else:
        yield Check("user namespaces", "missing", listed, f"sysctl -w {' '.join(refused)}")
    says = node.delegated_cgroup()
    yield Check("cgroups", "note" if says else "ok", says or "version 2, delegated to this user")


def _memory() -> Iterator[Check]:
    total, free, limit = node.memory()
    need = machine.MEMORY_GB * 2**30
    says = f"{total / 2**30:.1f} GB, {free / 2**30:.1f} available"
    sentence = machine.memory()
    if not sentence and limit < min(need, total):
        says += f", but this process's cgroup may use {limit / 2**30:.1f}"
        yield Check("memory", "missing", says, f"{machine.MEMORY_GB} GB (docker run -m, sbatch --mem)")
    elif not sentence and free < need / 2:
        yield Check("memory", "note", f"{says}: other programs use it")
    else:
        yield _lack("memory", sentence, says)


def _disk(root: Path) -> Iterator[Check]:
    place = node.existing(root / "results")
    free = node.disk_free(place)
    sentence = machine.disk(str(root))
    if not sentence and free < DEMO_BYTES and not (root / "results" / "demo").exists():
        sentence = f"The demo writes {said(DEMO_BYTES)}, {said(free)} are free in {place}"
    yield _lack("disk of results", sentence, f"{said(free)} free in {place}")
    try:
        temporary = Path(tempfile.gettempdir())
    except FileNotFoundError:
        yield Check(
            "disk of temporaries", "missing", "no folder for temporaries can be written", "write access to /tmp"
        )
        return
    free = node.disk_free(temporary)
    says = f"{said(free)} free in {temporary}"
    yield Check("disk of temporaries", "ok" if free >= TEMPORARY else "note", says)


def _file_system(root: Path) -> Iterator[Check]:
    place = node.existing(root / "results")
    try:
        with tempfile.TemporaryDirectory(dir=place, prefix=".doctor-") as folder:
            wrong = node.file_system(Path(folder))
    except OSError as e:
        yield Check("results folder", "missing", f"{place} cannot be written: {e.strerror or e}", "write access to it")
        return
    if wrong:
        yield Check("results folder", "missing", f"{place}: {wrong}", "a folder on a local disk, or NFS 4 with locks")
    else:
        yield Check("results folder", "ok", f"{place}: flock and atomic rename work")


def _cpu() -> Iterator[Check]:
    cores, mine, quota = node.cpu()
    says = f"{cores} cores, {mine} of them for this process"
    if quota is not None and quota < mine:
        says += f", {quota:.1f} by its cgroup's quota"
    few = min(mine, quota or mine) < 2
    yield Check("cpu", "note" if few else "ok", says + (": the demo wants 2" if few else ""))


def _ports() -> Iterator[Check]:
    sentence, free = node.ports()
    if sentence:
        yield Check("ports", "missing", sentence, "a loopback interface that is up")
    else:
        state: Literal["ok", "note"] = "ok" if free >= PORTS else "note"
        yield Check("ports", state, f"127.0.0.1 can be bound, {free} ports below 32768 are free")


def _gpu() -> Iterator[Check]:
    found = node.gpus()
    if found:
        yield from (Check("gpu", "ok", line) for line in found)
    elif node.gpu_devices():
        yield Check("gpu", "note", "/dev/nvidia* is there, nvidia-smi does not answer", "the NVIDIA driver's tools")
    else:
        yield Check("gpu", "note", "none: `device: cpu` works, `device: gpu` does not")


def _scheduler() -> Iterator[Check]:
    found = node.scheduler()
    yield Check("scheduler", "ok" if found else "note", found or "no sbatch and squeue: jobs run on this machine")


def _software(root: Path) -> Iterator[Check]:
    names = sorted(p.stem for p in (root / "envs").glob("*-*.txt") if "." not in p.stem)
    for name in names:
        try:
            software.python_of(name, root)
            yield Check(name, "ok", "built, its pins are current")
        except software.SoftwareMissing as e:
            yield Check(name, "note", _line(e))
        except (OSError, ValueError, KeyError, TypeError) as e:
            ready = software.folder(name, root) / "ready.json"
            yield Check(name, "note", f"{ready} cannot be read ({type(e).__name__}); remove it to build {name} anew")


def _shared_memory() -> Iterator[Check]:
    size, free = node.shared_memory()
    says = f"{said(size)} in /dev/shm, {said(free)} free"
    if size >= SHARED_MEMORY:
        yield Check("shared memory", "ok", says)
    else:
        yield Check("shared memory", "note", f"{says}: several GPUs want more", "docker run --shm-size=8g")


def _open_files() -> Iterator[Check]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= OPEN_FILES:
        yield Check("open files", "ok", "no limit" if soft == resource.RLIM_INFINITY else f"{soft} a process")
        return
    mine = hard == resource.RLIM_INFINITY or hard >= OPEN_FILES
    where = "type it yourself" if mine else "the limit is the administrator's"
    yield Check("open files", "note", f"{soft} a process; many episodes at once want more", f"ulimit -n 4096 ({where})")


def _clock(root: Path) -> Iterator[Check]:
    with contextlib.suppress(OSError):
        skew = node.clock_skew(node.existing(root / "results"))
        if abs(skew) > 2:
            says = f"the results' file system is {skew:+.0f} s off: jobs may be planned twice"
            yield Check("clock of results", "note", says, "both clocks set by NTP")
    sentence = node.clock(root)
    if sentence:
        yield Check("clock", "missing", sentence, "a clock set by NTP")
    else:
        yield Check("clock", "ok", node.now())
