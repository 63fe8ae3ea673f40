"""What separates a sandbox from the host, as reached."""

from __future__ import annotations

import os
from pathlib import Path

from openforge.sandboxes.cgroups import Group
from openforge.sandboxes.protocol import Limits, kernel

_NAMESPACES = ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup")


def isolation(holder_pid: int, kind: str) -> str:
    """What separates the sandbox from this process, read from the kernel.

    e.g. "bubblewrap 0.8.0: user,mnt,pid,net,ipc,uts,cgroup; caps none; no_new_privs". The first process is read;
    one that cannot drop its privileges does not join (`join.enter`).

    Args:
        kind: what made it, and its version.
    """
    own = [n for n in _NAMESPACES if _namespace("self", n) != _namespace(holder_pid, n)]
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{holder_pid}/status").read_text().splitlines() if ":\t" in line
    )
    caps = int(status["CapEff"], 16) | int(status["CapPrm"], 16)
    parts = [f"{kind}: {','.join(own)}", f"caps {f'{caps:x}' if caps else 'none'}"]
    if status["NoNewPrivs"] == "1":
        parts.append("no_new_privs")
    if os.getuid() == 0:
        parts.append("uid 0 outside")  # RLIMIT_NPROC does not bind it, see Limits
    if "net" not in own:
        parts.append("the host's network")
    return "; ".join(parts)


def held(limits: Limits, group: Group) -> str:
    """What holds the limits that the kernel does not hold for everybody, e.g. "limits: processes 1024 (cgroup v1)"."""
    by = f"cgroup v{group.version}"
    words = []
    if limits.processes is not None:
        words.append(f"processes {limits.processes} ({_holds_processes(group, by)})")
    if limits.memory_bytes is not None:
        words.append(f"memory {limits.memory_bytes} ({by if 'memory' in group.folders else 'not held'})")
    if limits.cpus is not None:
        words.append(f"cpus {limits.cpus:g} ({by if 'cpu' in group.folders else 'not held'})")
    if limits.disk_bytes is not None:
        words.append(f"disk {limits.disk_bytes} (tmpfs)")
    return f"limits: {', '.join(words) or 'none'}"


def _holds_processes(group: Group, by: str) -> str:
    if "pids" in group.folders:
        return by
    return "rlimit" if os.getuid() != 0 and kernel() >= (5, 14) else "not held"


def _namespace(pid: int | str, name: str) -> str:
    return os.readlink(f"/proc/{pid}/ns/{name}")
