"""The bubblewrap command line of a sandbox, and whether this machine can run it."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openforge.sandboxes.images import Image
from openforge.sandboxes.join import HOME, WORK
from openforge.sandboxes.protocol import Bind, Limits, SandboxError, kernel
from openforge.sandboxes.unpack import TOOLS

# The first process. Pid 1 cannot be killed from inside, not even by `kill -9 -1`, and one that ignores SIGCHLD has
# its orphans reaped by the kernel. The empty line says that the sandbox is set up. It then waits for a line: if all
# that started it was killed meanwhile, bwrap's death signal never reached it, and it must end by itself, for nobody
# has noted its pid.
_SCRIPT = "echo && read -r noted && exec {} --ignore-signal=CHLD {} infinity </dev/null"
_HOLDER = ["/bin/sh", "-c", _SCRIPT.format("env", "sleep")]

# What a process with the host's uid 0 could still read or write in /proc without any capability, when root owns the
# sandbox. bwrap means to protect sys itself, but tests the folder, which nobody may write, and not what lies in it:
# kernel/core_pattern would be the agent's.
_PROC_READ_ONLY = ("sys", "sysrq-trigger", "irq", "bus")
_PROC_FILES = ("kcore", "keys", "kmsg", "latency_stats", "mtrr", "sched_debug", "timer_list")
_PROC_FOLDERS = ("acpi", "asound", "dynamic_debug", "scsi")

_ETC = {
    "passwd": "root:x:0:0:root:/root:/usr/sbin/nologin\n"
    f"agent:x:1000:1000:agent:{HOME}:/bin/bash\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": "root:x:0:\nagent:x:1000:\nnogroup:x:65534:\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "hosts": "127.0.0.1 localhost sandbox\n",
    "resolv.conf": "",
}
RESOLVER = "/etc/resolv.conf"
_ETC_HOST_FILES = ("ld.so.cache", "ssl/openssl.cnf")
_ETC_HOST_FOLDERS = ("alternatives", "ssl/certs")  # not ssl: private keys lie beside


def write_etc(etc: Path, network: str) -> None:
    """A minimal /etc: the host's own holds accounts, keys and names. With network `open` it has the host's resolver."""
    etc.mkdir()
    for name, text in _ETC.items():
        (etc / name).write_text(text)
    for name in _ETC_HOST_FOLDERS:  # mount points; bwrap could not make them in a read-only folder
        (etc / name).mkdir(parents=True)
    for name in _ETC_HOST_FILES:  # copied: a mount costs more
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(f"/etc/{name}", etc / name)
    if network == "open":
        shutil.copyfile(RESOLVER, etc / "resolv.conf")


def _system() -> list[str]:
    args = ["--ro-bind", "/usr", "/usr"]
    for path in ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"):
        if os.path.islink(path):
            args += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            args += ["--ro-bind", path, path]
    return args


def _etc(etc: Path) -> list[str]:
    args = ["--ro-bind", str(etc), "/etc"]
    for name in _ETC_HOST_FOLDERS:
        if os.path.exists(f"/etc/{name}"):
            args += ["--ro-bind", f"/etc/{name}", f"/etc/{name}"]
    return args


def _proc() -> list[str]:
    args = ["--proc", "/proc"]
    for name in _PROC_READ_ONLY:
        if os.path.exists(f"/proc/{name}"):
            args += ["--ro-bind", f"/proc/{name}", f"/proc/{name}"]
    for name in _PROC_FILES:
        if os.path.exists(f"/proc/{name}"):
            args += ["--ro-bind", "/dev/null", f"/proc/{name}"]
    for name in _PROC_FOLDERS:
        if os.path.isdir(f"/proc/{name}"):
            args += ["--perms", "0555", "--size", "4096", "--tmpfs", f"/proc/{name}", "--remount-ro", f"/proc/{name}"]
    return args


def arguments(
    folder: Path, binds: Sequence[Bind], limits: Limits, info_fd: int, network: str, image: Image | None, tools: Path
) -> list[str]:
    """The bwrap command of the sandbox in `folder`, which has disk/work and disk/home.

    Args:
        image: the root file system is <folder>/root then, which is this image with a writable layer; None is this
            host's system, read-only, with <folder>/etc as its /etc.
        tools: see `images.tools`; only with an image.

    Raises:
        SandboxError: bwrap is missing, or a bind's source is.
    """
    size = str(limits.tmp_bytes)
    args = [_executable(), "--unshare-all", "--unshare-user", "--unshare-cgroup", "--disable-userns"]
    args += ["--share-net"] if network == "open" else []
    args += ["--uid", "1000", "--gid", "1000", "--hostname", "sandbox", "--clearenv", "--chdir", "/"]
    args += ["--die-with-parent", "--new-session", "--as-pid-1", "--info-fd", str(info_fd)]
    args += [*_system(), *_etc(folder / "etc")] if image is None else ["--bind", str(folder / "root"), "/"]
    args += [*_proc(), "--dev", "/dev"]
    args += ["--perms", "1777", "--size", size, "--tmpfs", "/dev/shm"]
    args += ["--perms", "1777", "--size", size, "--tmpfs", "/tmp"]
    if image is None:
        args += ["--dir", "/run", "--dir", "/var", "--dir", "/home", "--symlink", "/tmp", "/var/tmp"]
    else:
        args += ["--ro-bind", str(tools), TOOLS]
        args += ["--ro-bind", RESOLVER, RESOLVER] if network == "open" else []
    args += ["--bind", str(folder / "disk/work"), WORK, "--bind", str(folder / "disk/home"), HOME]
    for bind in binds:  # last: /tmp and /workspace would hide what lies below them
        if not bind.host.exists():
            raise SandboxError(f"{bind.host} does not exist and cannot be bound into the sandbox")
        inside = bind.inside or str(bind.host)
        if image is not None:
            _no_link(image.root, inside)
        args += ["--ro-bind", str(bind.host), inside]
    args += ["--remount-ro", "/dev"]
    if image is None:  # it is a tmpfs in memory, without a size: nothing may be written there
        return [*args, "--remount-ro", "/", "--", *_HOLDER]
    return [*args, "--", *_loaded("sh"), "-c", _SCRIPT.format(*(" ".join(_loaded(p)) for p in ("env", "sleep")))]


def _loaded(program: str) -> list[str]:
    """The command line of one of `tools`, whatever libraries the image has."""
    return [f"{TOOLS}/ld.so", "--library-path", TOOLS, f"{TOOLS}/{program}"]


def _no_link(root: Path, inside: str) -> None:
    """bwrap makes the mount point before it has left the host's files: a link of the image could lead it there."""
    path = root
    for name in Path(inside).parts[1:]:
        path = path / name
        if path.is_symlink():
            raise SandboxError(f"cannot bind at {inside}: the image has a link at /{path.relative_to(root)}")


def _executable() -> str:
    found = shutil.which("bwrap")
    if found is None:
        raise SandboxError("bubblewrap is not installed: install version 0.8 or later (Debian: apt install bubblewrap)")
    return found


def explain(error: str) -> str:
    """One sentence on why bwrap failed, from what it printed."""
    text = " ".join(error.split()) or "it printed nothing"
    if "Unknown option" in text:
        return f"bubblewrap is too old, version 0.8 or later is needed ({text})"
    if "namespace" in text or "uid map" in text or "Operation not permitted" in text:
        return (
            "this machine does not let bubblewrap make user namespaces; ask its administrator to set "
            "kernel.unprivileged_userns_clone=1, user.max_user_namespaces above 0 and, on Ubuntu, "
            f"kernel.apparmor_restrict_unprivileged_userns=0 ({text})"
        )
    return f"bubblewrap failed: {text}"


def version() -> str:
    """bubblewrap's version, e.g. 0.8.0."""
    done = subprocess.run([_executable(), "--version"], capture_output=True, text=True, check=False)
    return done.stdout.removeprefix("bubblewrap").strip() or "unknown"


def probe() -> dict[str, Any]:
    """Whether local sandboxes work here: {bwrap, version, kernel, works, why}; `why` is None if they do."""
    result: dict[str, Any] = {"bwrap": None, "version": None, "kernel": platform.release(), "works": False}
    try:
        result["bwrap"] = _executable()
    except SandboxError as e:
        return {**result, "why": str(e)}
    result["version"] = version()
    if kernel() < (5, 8):
        return {**result, "why": f"Linux 5.8 or later is needed to join a sandbox, this is {platform.release()}"}
    argv = [result["bwrap"], "--unshare-all", "--unshare-user", "--disable-userns", "--as-pid-1"]
    argv += ["--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--", "true"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    works = done.returncode == 0
    return {**result, "works": works, "why": None if works else explain(done.stderr)}
