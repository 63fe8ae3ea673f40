"""One process works on a run at a time: results/<run>/.locks/run.json, held by flock while the process lives.

The kernel drops the lock however its holder ends, so on one machine a stale lock cannot exist. The file says who holds
it; a holder on another machine, where flock may not reach, counts as alive until its SLURM job is gone.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import shutil
import socket
import subprocess
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from openforge.sandboxes.owner import Owner


class RunBusy(RuntimeError):
    """Another live process works on the run; one sentence names it."""


@dataclass(frozen=True)
class Holder:
    """Who works on a run.

    Attributes:
        since: ISO time.
        command: its command line.
        slurm_job: id of the SLURM job that it runs in, None outside.
    """

    owner: Owner
    since: str
    command: str
    slurm_job: str | None

    @classmethod
    def current(cls, command: str) -> Holder:
        return cls(
            Owner.current(), datetime.now(UTC).isoformat("T", "seconds"), command, os.environ.get("SLURM_JOB_ID")
        )

    def __str__(self) -> str:
        return f"process {self.owner.pid} on {self.owner.host}, at work since {self.since} ({self.command})"


def lock_file(run_dir: Path) -> Path:
    return run_dir / ".locks" / "run.json"


def read(run_dir: Path) -> Holder | None:
    """Who is written down as the run's holder, alive or not; None if nobody is."""
    try:
        data = json.loads(lock_file(run_dir).read_text())
        return Holder(Owner(**data.pop("owner")), **data)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None  # never taken, given back, or its writing was cut short by a kill: the flock decides


def held(run_dir: Path) -> bool:
    """Whether a live process works on the run."""
    try:
        fd = os.open(lock_file(run_dir), os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return _elsewhere(read(run_dir))


def take(run_dir: Path, command: str) -> None:
    """Work on a run until this process ends.

    Raises:
        RunBusy: somebody else does.
    """
    file = lock_file(run_dir)
    file.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        who = read(run_dir) or "a process that has not said its name yet"
        raise RunBusy(f"run {run_dir.name} has a live owner: {who}; wait until it ends, or end it") from None
    holder = read(run_dir)
    if _elsewhere(holder):
        os.close(fd)
        raise RunBusy(
            f"run {run_dir.name} has an owner on another machine: {holder}; it cannot be seen from here: "
            f"end it there, or remove {file} if that machine is gone"
        )
    os.ftruncate(fd, 0)
    os.pwrite(fd, json.dumps(asdict(Holder.current(command))).encode(), 0)
    # Given back by an orderly end; after any other, the kernel has dropped the flock and the name is of the dead.
    atexit.register(_give_back, fd, os.getpid())


def _give_back(fd: int, pid: int) -> None:
    if os.getpid() == pid:
        os.ftruncate(fd, 0)
        os.close(fd)


def _elsewhere(holder: Holder | None) -> bool:
    """Whether the holder is on another machine and may be alive there."""
    if holder is None or holder.owner.host == socket.gethostname():
        return False
    return holder.slurm_job is None or not _slurm_job_gone(holder.slurm_job)


def _slurm_job_gone(job: str) -> bool:
    """Whether SLURM says that a job has ended or is unknown; False where SLURM cannot be asked."""
    if shutil.which("squeue") is None:
        return False
    done = subprocess.run(["squeue", "-h", "-j", job, "-o", "%T"], capture_output=True, text=True, check=False)
    if done.returncode:
        return "Invalid job id" in done.stderr
    return not done.stdout.strip()
