"""What a node has: figures of the kernel, the file systems and the devices. Linux, standard library."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import subprocess
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
# Start of the year of the oldest release: a clock before it was never set.
OLDEST = datetime(2025, 1, 1, tzinfo=UTC).timestamp()
# Setting, and what it must be for a user without rights to make a user namespace.
_NAMESPACES = {
    "user.max_user_namespaces": lambda v: v > 0,
    "kernel.unprivileged_userns_clone": lambda v: v == 1,
    "kernel.apparmor_restrict_unprivileged_userns": lambda v: v == 0,
}
_REPAIRED = {"user.max_user_namespaces": 15000, "kernel.unprivileged_userns_clone": 1}


def user_namespaces() -> dict[str, int]:
    """The kernel's settings on user namespaces, as sysctl names them."""
    found = {}
    for name in _NAMESPACES:
        with contextlib.suppress(OSError, ValueError):
            found[name] = int(Path("/proc/sys", *name.split(".")).read_text())
    return found


def refused_user_namespaces(settings: dict[str, int]) -> list[str]:
    """Assignments for sysctl that would allow them; empty if no setting refuses them."""
    return [f"{k}={_REPAIRED.get(k, 0)}" for k, v in settings.items() if not _NAMESPACES[k](v)]


def _own_cgroup(controller: str) -> Path | None:
    """This process's folder of a cgroup hierarchy, "" for version 2; None without it."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(",") and (not controller or (CGROUPS / controller).is_dir()):
            return CGROUPS / controller / path.lstrip("/")
    return None


def delegated_cgroup() -> str:
    """Why this user cannot set limits with cgroups of its own; empty if it can."""
    own = _own_cgroup("") if (CGROUPS / "cgroup.controllers").exists() else None
    if own is None:
        return "no cgroup version 2 to be seen: a sandbox's memory is not limited"
    if not os.access(own / "cgroup.subtree_control", os.W_OK):
        return "version 2, not delegated to this user: a sandbox's memory is not limited"
    return ""


def _limits(controller: str, v2: str, v1: str) -> list[str]:
    """The words of a limit's file in this process's cgroup and above it."""
    own, name = (_own_cgroup(""), v2) if (CGROUPS / "cgroup.controllers").exists() else (_own_cgroup(controller), v1)
    found = []
    for folder in [own, *own.parents] if own is not None else []:
        with contextlib.suppress(OSError):
            found.append((folder / name).read_text().strip())
        if folder == CGROUPS:
            break
    return found


def memory() -> tuple[int, int, int]:
    """Bytes of memory: in all, available now, and the limit of this process's cgroup (a huge number without one)."""
    info = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (int(info[k].split()[0]) * 1024 for k in ("MemTotal", "MemAvailable"))
    limits = [int(v) for v in _limits("memory", "memory.max", "memory.limit_in_bytes") if v.isdecimal()]
    return total, free, min(limits, default=1 << 62)


def cpu() -> tuple[int, int, float | None]:
    """Cores of the machine, cores this process may use, and its cgroup's quota in cores (None without one)."""
    quotas = []
    for words in _limits("cpu", "cpu.max", ""):
        quota, _, period = words.partition(" ")
        if quota.isdecimal() and period.isdecimal():
            quotas.append(int(quota) / int(period))
    return os.cpu_count() or 1, len(os.sched_getaffinity(0)), min(quotas, default=None)


def existing(path: Path) -> Path:
    """The folder itself, or the nearest one above it that exists."""
    return next(p for p in (path, *path.parents) if p.is_dir())


def disk_free(path: Path) -> int:
    return shutil.disk_usage(path).free


def file_system(folder: Path) -> str:
    """What the file system of an empty folder cannot do that a run needs; empty if it can."""
    old, new = folder / "old", folder / "new"
    for file in (old, new):
        file.write_text(file.name)
    os.replace(new, old)
    if old.read_text() != "new":
        return "a rename does not replace the file at once"
    with open(old) as mine, open(old) as other:
        try:
            fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            return f"flock does not work ({e.strerror})"
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return ""
    return "flock does not keep a second process out"


def clock_skew(folder: Path) -> float:
    """Seconds by which the file system's clock is ahead of this machine's."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as f:
        before = time.time()
        os.utime(f.fileno())  # the file server's own now
        return os.fstat(f.fileno()).st_mtime - before


def clock(root: Path) -> str:
    """Why the clock cannot be right; empty if nothing speaks against it."""
    if time.time() < OLDEST:
        return f"it says {now()}, before OpenForge was written"
    made = (root / "pyproject.toml").stat().st_mtime if (root / "pyproject.toml").exists() else 0.0
    if made > time.time() + 60:
        return f"it says {now()}, but {root / 'pyproject.toml'} was written later than that"
    return ""


def now() -> str:
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"


def ports() -> tuple[str, int]:
    """Why 127.0.0.1 cannot be bound (empty if it can), and how many ports of 1024 .. 32767 nobody listens at."""
    with socket.socket() as s:
        try:
            s.bind(("127.0.0.1", 0))
        except OSError as e:
            return f"127.0.0.1 cannot be bound: {e.strerror}", 0
    taken = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                taken.add(int(line.split()[1].rpartition(":")[2], 16))
    return "", 32768 - 1024 - sum(1024 <= port < 32768 for port in taken)


def gpus() -> list[str]:
    """A line a GPU: name, memory, driver; empty where nvidia-smi is missing or gives no answer."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = [line.split(", ") for line in done.stdout.splitlines() if done.returncode == 0]
    return [f"{words[0]}, {words[1]}, driver {words[2]}" for words in lines if len(words) == 3]


def gpu_devices() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*"))


def scheduler() -> str:
    """SLURM as far as it is seen from here; empty if it is not."""
    commands = [c for c in ("sbatch", "squeue") if shutil.which(c)]
    job = os.environ.get("SLURM_JOB_ID")
    words = [f"SLURM: {' and '.join(commands)} found"] if commands else []
    return ", ".join([*words, f"this is SLURM job {job}"] if job else words)


def shared_memory() -> tuple[int, int]:
    """Bytes of /dev/shm: size and free."""
    usage = shutil.disk_usage("/dev/shm")
    return usage.total, usage.free
