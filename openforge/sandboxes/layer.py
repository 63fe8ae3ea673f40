"""A sandbox's own file systems, mounted where nobody else sees them: standard library only.

`mount` runs in a freshly forked child that then becomes bwrap. The mounts are in a mount namespace of its own and go
with the last process in it, so that nothing has to be unmounted, whoever is killed.
"""

from __future__ import annotations

import ctypes
import os
import sys

_CLONE_NEWNS = 0x00020000
_CLONE_NEWUSER = 0x10000000
_MS_NOSUID, _MS_NODEV = 2, 4
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18

_libc = ctypes.CDLL(None, use_errno=True)


def _mount(source: str, target: str, kind: str | None, flags: int, options: str | None) -> None:
    words = [None if w is None else os.fsencode(w) for w in (source, target, kind, options)]
    if _libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), f"mount of {kind or source} on {target}")


def unshare() -> None:
    """A mount namespace of this process's own; for an ordinary user in a user namespace where its ids are the same.

    Raises:
        OSError: the kernel refuses.
    """
    uid, gid = os.geteuid(), os.getegid()
    flags = _CLONE_NEWNS if uid == 0 else _CLONE_NEWNS | _CLONE_NEWUSER
    if _libc.unshare(flags) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "unshare")
    if uid != 0:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as f:
                f.write(text)
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE, None)


def mount(folder: str, disk: int | None, lower: str | None) -> None:
    """Mount what the sandbox in `folder` writes to, in a mount namespace of this process's own.

    Args:
        folder: it has the empty folders `disk`, and `lower` and `root` where there is a `lower`.
        disk: bytes of a file system in memory on <folder>/disk, which then gets the folders that `folders` makes;
            None leaves those to be a part of <folder>/disk as it is.
        lower: a root file system, never written to: <folder>/root becomes this with a writable layer above it.

    Raises:
        OSError: the kernel refuses.
    """
    unshare()
    os.chdir(folder)
    if disk is not None:
        _mount("tmpfs", "disk", "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={disk},mode=700")
        folders("disk", lower is not None)
    if lower is not None:
        _mount(lower, "lower", None, _MS_BIND, None)  # its path may hold what the options of overlayfs cannot
        where = "lowerdir=lower,upperdir=disk/upper,workdir=disk/workdir"
        # An ordinary user may not set trusted.* attributes; `userxattr` (Linux 5.11) takes user.* in their place.
        _mount("overlay", "root", "overlay", _MS_NOSUID | _MS_NODEV, f"{where},userxattr")
    os.chdir("/")


def folders(disk: str, image: bool) -> None:
    """Make the folders below <folder>/disk."""
    for name in ("work", "home", *(("upper", "workdir") if image else ())):
        os.mkdir(os.path.join(disk, name), 0o755)


if __name__ == "__main__":  # whether overlayfs works on this folder's file system: an error, or nothing
    try:
        mount(sys.argv[1], None, sys.argv[2])
        os.chdir(sys.argv[1])
        os.unlink("root/file")  # what is removed is hidden by an entry that an ordinary user may not always make
        assert os.listdir("root") == []
    except OSError as e:
        sys.exit(f"{e.filename}: {e.strerror}")
