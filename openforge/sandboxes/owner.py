"""Who a sandbox belongs to, written beside its folder; and the reaper that acts on it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from openforge.sandboxes import cgroups
from openforge.sandboxes.protocol import SandboxError

_PF_EXITING = 0x4  # of the flags in /proc/PID/stat


def start_time(pid: int) -> int | None:
    """Start of a process in clock ticks since boot, None if there is none: with it, a pid names one process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(b")")[2].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def exiting(pid: int) -> bool:
    """Whether a process is gone or on its way out; a sandbox's first process takes all others along before it goes."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return bool(int(stat.rpartition(b")")[2].split()[6]) & _PF_EXITING)


@dataclass(frozen=True)
class Owner:
    """A process, named so that no later one can be taken for it: host, boot, pid and start (clock ticks)."""

    host: str
    boot: str
    pid: int
    start: int

    @classmethod
    def of(cls, pid: int) -> Owner:
        """The owner with this pid on this machine; `SandboxError` if there is none."""
        start = start_time(pid)
        if start is None:
            raise SandboxError(f"process {pid} does not exist and cannot own a sandbox")
        return cls(socket.gethostname(), _boot(), pid, start)

    @classmethod
    def current(cls) -> Owner:
        """This process."""
        return cls.of(os.getpid())

    def alive(self) -> bool:
        """Whether it still runs. One on another machine counts as alive: it cannot be seen from here."""
        if self.host != socket.gethostname():
            return True
        return self.boot == _boot() and start_time(self.pid) == self.start


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclass(frozen=True)
class Label:
    """<root>/<sandbox_id>.json. It is written before the folder <root>/<sandbox_id>/ is made and removed after it.

    `holder` is the sandbox's first process, None until it runs; `groups` are the folders of its control groups.
    """

    run: str
    episode_id: str
    owner: Owner
    holder: Owner | None
    groups: tuple[str, ...] = ()

    def text(self) -> str:
        """Its JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, path: Path) -> Label:
        """Raises ValueError, TypeError or KeyError for a file that is no label."""
        data = json.loads(path.read_text())
        holder = data["holder"]
        owner = Owner(**data["owner"])
        groups = tuple(data.get("groups", ()))
        return cls(data["run"], data["episode_id"], owner, None if holder is None else Owner(**holder), groups)


def kill(process: Owner, seconds: float = 10) -> None:
    """Kill a process of this machine and wait until it is dead; nothing if it is no longer there.

    For a sandbox's first process the kernel kills all others inside before it counts as dead.
    """
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        if not process.alive():  # after the pidfd is held: from here on the pid cannot be another's
            return
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        if not select.select([pidfd], [], [], seconds)[0]:
            raise SandboxError(f"process {process.pid} does not die; it is stuck in the kernel (see /proc/PID/stack)")
    except ProcessLookupError:
        pass
    finally:
        os.close(pidfd)


def kill_starting(folder: Path) -> None:
    """Kill the processes of a sandbox that was still starting: nobody noted them, but their command line names it.

    bwrap's child waits for ever for a parent that was killed before it let the child go on.
    """
    word = os.fsencode(folder.absolute()) + b"/"
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
                pidfd = os.pidfd_open(int(name))
                try:
                    if any(word in argument for argument in Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")):
                        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                        select.select([pidfd], [], [], 10)
                finally:
                    os.close(pidfd)


def kill_namespace(holder_pid: int) -> None:
    """Kill from outside, one by one, the processes in the pid namespace of `holder_pid`, but not that one itself."""
    with contextlib.suppress(OSError):
        namespace = os.readlink(f"/proc/{holder_pid}/ns/pid")
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != holder_pid:
                with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
                    pidfd = os.pidfd_open(int(name))
                    try:
                        if os.readlink(f"/proc/{name}/ns/pid") == namespace:
                            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                    finally:
                        os.close(pidfd)


def remove(folder: Path) -> None:
    """Remove a sandbox's folder, whatever the agent made of it."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():  # folders without permission, or nested deeper than Python recurses
        subprocess.run(["chmod", "-R", "u+rwx", "--", str(folder)], check=False, capture_output=True)
        done = subprocess.run(["rm", "-rf", "--", str(folder)], check=False, capture_output=True, text=True)
        if done.returncode != 0:
            raise SandboxError(f"{folder} cannot be removed: {done.stderr.strip()}")


def reap(root: Path, run: str) -> list[str]:
    """Remove this run's sandboxes whose owner is dead: their processes, folders and labels; returns their ids.

    Sandboxes of other runs, of living owners and of other machines are left alone.
    """
    reaped = []
    for path in sorted(root.glob("*.json")):
        try:
            label = Label.read(path)
        except (OSError, ValueError, TypeError, KeyError):
            continue  # not ours to judge, or removed by its owner meanwhile
        if label.run != run or label.owner.alive():
            continue
        if label.holder is not None:
            kill(label.holder)
        else:
            kill_starting(root / path.stem)
        cgroups.remove(label.groups)
        remove(root / path.stem)
        path.with_suffix(".tmp").unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        reaped.append(path.stem)
    for path in root.glob("*.tmp"):
        # A label whose owner was killed before it could be named: nothing stands behind it.
        with contextlib.suppress(OSError):
            if _abandoned(path, run):
                path.unlink()
    return reaped


def _abandoned(beside: Path, run: str) -> bool:
    """Whether a label that was never named is nobody's: an owner needs no second to write one."""
    try:
        label = Label.read(beside)
    except (ValueError, TypeError, KeyError):
        return time.time() - beside.stat().st_mtime > 1
    return label.run == run and not label.owner.alive()
