"""What separates a sandbox from the host, as reached."""

from __future__ import annotations

import os
from pathlib import Path

_NAMESPACES = ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup")


def isolation(holder_pid: int, version: str) -> str:
    """What separates the sandbox from this process, read from the kernel.

    e.g. "bubblewrap 0.8.0: user,mnt,pid,net,ipc,uts,cgroup; caps none; no_new_privs". The first process is read;
    one that cannot drop its privileges does not join (`join.enter`).
    """
    own = [n for n in _NAMESPACES if _namespace("self", n) != _namespace(holder_pid, n)]
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{holder_pid}/status").read_text().splitlines() if ":\t" in line
    )
    caps = int(status["CapEff"], 16) | int(status["CapPrm"], 16)
    parts = [f"bubblewrap {version}: {','.join(own)}", f"caps {f'{caps:x}' if caps else 'none'}"]
    if status["NoNewPrivs"] == "1":
        parts.append("no_new_privs")
    if os.getuid() == 0:
        parts.append("uid 0 outside")  # RLIMIT_NPROC does not bind it, see Limits
    return "; ".join(parts)


def _namespace(pid: int | str, name: str) -> str:
    return os.readlink(f"/proc/{pid}/ns/{name}")
