"""Control groups of sandboxes: memory, processes and CPU, version 1 or 2, where this user may make them."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from openforge.sandboxes.protocol import Limits, SandboxError, SandboxUnsupported

CONTROLLERS = ("memory", "pids", "cpu")
PERIOD = 100_000  # microseconds over which CPU time is counted
_MAIN = "openforge.main"  # of version 2: a group that has groups below it may hold no process itself
REMOVE_SECONDS = 5.0


@dataclass(frozen=True)
class Hierarchy:
    """Where groups can be made: the version, and the folder that has them by controller."""

    version: int
    folders: Mapping[str, Path]


@dataclass(frozen=True)
class Group:
    """The groups of one sandbox.

    Attributes:
        version: 1 or 2.
        folders: by controller; in version 2 all are the same.
    """

    version: int
    folders: Mapping[str, Path]

    def paths(self) -> list[str]:
        """Each folder once."""
        return sorted({str(f) for f in self.folders.values()})

    def processes(self) -> list[str]:
        """The files that a process joins by writing 0 to them."""
        return [f"{path}/cgroup.procs" for path in self.paths()]

    def make(self, limits: Limits) -> None:
        """Make the folders and set the limits; `SandboxError` names the file that refused."""
        try:
            for path in self.paths():
                os.mkdir(path)
            for controller, name, value, optional in _settings(self.version, limits):
                if controller in self.folders:
                    file = self.folders[controller] / name
                    if optional and not file.exists():  # a kernel without swap accounting
                        continue
                    file.write_text(str(value))
        except OSError as e:
            remove(self.paths())
            raise SandboxError(f"control group {e.filename}: {e.strerror}") from None

    def memory_kills(self) -> int:
        """Processes of the sandbox that the kernel killed because it was at its limit of memory."""
        folder = self.folders.get("memory")
        if folder is None:
            return 0
        text = (folder / ("memory.oom_control" if self.version == 1 else "memory.events")).read_text()
        return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill ")), 0)


def _settings(version: int, limits: Limits) -> Iterable[tuple[str, str, int | str, bool]]:
    """(controller, file, value, whether the kernel may lack the file)."""
    if limits.processes is not None:
        yield "pids", "pids.max", limits.processes, False
    if limits.memory_bytes is not None:
        if version == 1:
            yield "memory", "memory.limit_in_bytes", limits.memory_bytes, False
            yield "memory", "memory.memsw.limit_in_bytes", limits.memory_bytes, True
        else:
            yield "memory", "memory.max", limits.memory_bytes, False
            yield "memory", "memory.swap.max", 0, True
    if limits.cpus is not None:
        quota = max(1000, round(limits.cpus * PERIOD))
        if version == 1:
            yield "cpu", "cpu.cfs_period_us", PERIOD, False
            yield "cpu", "cpu.cfs_quota_us", quota, False
        else:
            yield "cpu", "cpu.max", f"{quota} {PERIOD}", False


def needed(limits: Limits) -> list[str]:
    """The controllers that these limits take."""
    asked = {"memory": limits.memory_bytes, "pids": limits.processes, "cpu": limits.cpus}
    return [name for name in CONTROLLERS if asked[name] is not None]


def plan(name: str, limits: Limits, found: Hierarchy) -> Group:
    """The groups that a sandbox of this name will have, not made yet: those of its limits that can be had."""
    folders = {c: found.folders[c] / f"openforge-{name}" for c in needed(limits) if c in found.folders}
    return Group(found.version, folders)


def check(limits: Limits, group: Group) -> None:
    """Raises `SandboxUnsupported` if a limit is asked that there is no group for."""
    lacking = [c for c in needed(limits) if c not in group.folders and c != "pids"]  # see `Limits`
    if lacking and not limits.best_effort:
        names = " and ".join({"memory": "memory_bytes", "cpu": "cpus"}[c] for c in lacking)
        raise SandboxUnsupported(
            f"limits of {names} need control groups that this user may make, and there are none here: run below "
            f"`systemd-run --user --scope -p Delegate=yes`, ask the administrator for such a group, or set "
            "best_effort to do without"
        )


def remove(paths: Iterable[str]) -> None:
    """Remove groups whose processes are dead; what is gone already is fine."""
    for path in paths:
        end = time.monotonic() + REMOVE_SECONDS
        while True:
            try:
                os.rmdir(path)
            except FileNotFoundError:
                pass
            except OSError as e:
                # A killed process leaves its group a moment after its death can be seen.
                if e.errno == errno.EBUSY and time.monotonic() < end:
                    time.sleep(0.002)
                    continue
                raise SandboxError(f"control group {path} cannot be removed: {e.strerror}") from None
            break


@functools.cache
def available() -> Hierarchy:
    """Where this process may make groups; no folders if nowhere."""
    return find(Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text())


def find(cgroup: str, mountinfo: str) -> Hierarchy:
    """`available`, from the texts of /proc/self/cgroup and /proc/self/mountinfo (cgroups(7), proc(5))."""
    mounts = _mounts(mountinfo)
    own = [line.split(":", 2) for line in cgroup.splitlines()]
    folders = {}
    for _, names, path in own:
        for name in names.split(","):
            if name in CONTROLLERS and name in mounts:
                folder = _below(mounts[name], path)
                if folder is not None and os.access(folder, os.W_OK):
                    folders[name] = folder
    if folders:
        return Hierarchy(1, folders)
    for _, names, path in own:
        folder = _below(mounts["cgroup2"], path) if names == "" and "cgroup2" in mounts else None
        if folder is not None:
            return Hierarchy(2, _version_2(folder))
    return Hierarchy(2, {})


def _mounts(mountinfo: str) -> dict[str, tuple[str, Path]]:
    """(root, mount point) of each controller's hierarchy, and of version 2's as "cgroup2"."""
    found = {}
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        root, point = before.split(" ")[3:5]
        if kind == "cgroup2":
            found["cgroup2"] = (root, Path(point))
        elif kind == "cgroup":
            for name in options.split(","):
                if name in CONTROLLERS:
                    found[name] = (root, Path(point))
    return found


def _below(mount: tuple[str, Path], path: str) -> Path | None:
    """The folder of a group, given its hierarchy's mount; None if it lies outside of what is mounted."""
    root, point = mount
    inside = os.path.relpath(path, root)
    return None if inside.startswith("..") else point / inside


def _delegated(folder: Path) -> list[str]:
    with contextlib.suppress(OSError):
        if os.access(folder, os.W_OK):
            return [c for c in (folder / "cgroup.controllers").read_text().split() if c in CONTROLLERS]
    return []


def _version_2(folder: Path) -> dict[str, Path]:
    """The folder by controllers that it hands down; our own processes make room for them."""
    if folder.name == _MAIN:
        folder = folder.parent
    control = folder / "cgroup.subtree_control"
    with contextlib.suppress(OSError):
        missing = [c for c in _delegated(folder) if c not in control.read_text().split()]
        if missing:
            if (folder / "cgroup.type").exists():  # not the root group, which may have both
                main = folder / _MAIN
                main.mkdir(exist_ok=True)
                for pid in (folder / "cgroup.procs").read_text().split():
                    (main / "cgroup.procs").write_text(pid)
            control.write_text(" ".join(f"+{c}" for c in missing))
        return {c: folder for c in control.read_text().split() if c in CONTROLLERS}
    return {}
