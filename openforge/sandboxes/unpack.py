"""Unpacks a layer of an image: run as a program, standard library only, with the target as its root folder.

    unpack.py ROOT layer < layer.tar
    unpack.py ROOT finish

An image is not trusted: its links may lead anywhere. Nothing here looks where one leads, for there is nothing but ROOT
to be led to (chroot), and no program of the image runs. All files belong to this user, whatever the archive says: a
sandbox has one user. Rules of layers: the OCI image specification, "Image Layer Filesystem Changeset".
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openforge.sandboxes import layer
    from openforge.sandboxes.join import HOME, WORK
else:  # started by path with -I -S, without the package and its dependencies
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import layer
    from join import HOME, WORK

TOOLS = "/.openforge"  # where the first process's program is bound to
_OPAQUE, _WHITEOUT, _RESERVED = ".wh..wh..opq", ".wh.", ".wh..wh."
_POINTS = ("/proc", "/dev", "/sys", "/run", "/tmp", "/var", "/var/tmp", "/etc", "/home", HOME, WORK, TOOLS)
_AGENT = {"passwd": f"agent:x:1000:1000:agent:{HOME}:/bin/sh", "group": "agent:x:1000:"}


class BadLayer(ValueError):
    """A member of the layer cannot be unpacked."""


def names(member: str) -> list[str]:
    """The names on a path below the root."""
    parts = [p for p in member.split("/") if p not in ("", ".")]
    if ".." in parts:
        raise BadLayer(f"{member!r} has '..' in its path")
    return parts


def unpack(tar: tarfile.TarFile) -> None:
    """Lay a layer over the root folder."""
    made: set[str] = set()  # of this layer: what hides files hides those of the layers below
    for member in tar:
        parts = names(member.name)
        if not parts:
            continue
        parent, name = os.path.realpath("/" + "/".join(parts[:-1])), parts[-1]
        os.makedirs(parent, exist_ok=True)
        if name == _OPAQUE:
            clear(parent, made)
        elif name.startswith(_RESERVED):
            continue
        elif name.startswith(_WHITEOUT):
            hide(os.path.join(parent, name.removeprefix(_WHITEOUT)), made)
        else:
            path = os.path.join(parent, name)
            while path not in made:
                made.add(path)
                path = os.path.dirname(path)
            write(tar, member, os.path.join(parent, name))


def clear(folder: str, made: set[str]) -> None:
    """Remove what the layers below put into a folder."""
    for name in os.listdir(folder):
        hide(os.path.join(folder, name), made)


def hide(path: str, made: set[str]) -> None:
    """Remove an entry of the layers below."""
    if path not in made:
        remove(path)
    elif os.path.isdir(path) and not os.path.islink(path):
        clear(path, made)


def remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


def write(tar: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
    """Make one entry; a folder that stands stays, anything else in its place goes."""
    if not (member.isdir() and os.path.isdir(path) and not os.path.islink(path)):
        remove(path)
    if member.isdir():
        os.makedirs(path, exist_ok=True)
        os.chmod(path, (member.mode & 0o1777) | 0o700)
    elif member.isreg():
        source = tar.extractfile(member)
        assert source is not None
        with open(path, "xb") as f:
            shutil.copyfileobj(source, f, 1 << 20)
        # Nobody inside may read what the mode forbids its owner: there is no root with a capability to.
        os.chmod(path, (member.mode & 0o777) | 0o600)
        os.utime(path, (member.mtime, member.mtime))
    elif member.issym():
        os.symlink(member.linkname, path)
    elif member.islnk():
        os.link("/" + "/".join(names(member.linkname)), path, follow_symlinks=False)
    elif member.isfifo():
        os.mkfifo(path, member.mode & 0o777)
    elif not member.isdev():  # /dev is the sandbox's own
        raise BadLayer(f"{member.name!r} is of a kind that images do not have")


def finish() -> dict[str, str]:
    """Make what every sandbox has: mount points that are folders, the user, no names of the host; how to start it."""
    for point in _POINTS:
        if os.path.islink(point) or not os.path.isdir(point):
            remove(point)
            os.mkdir(point)
    for name, line in _AGENT.items():
        lines = _lines(f"/etc/{name}")
        others = [old for old in lines if not (old.startswith("agent:") or old.split(":")[2:3] == ["1000"])]
        _replace(f"/etc/{name}", [*others, line])
    _replace("/etc/hosts", ["127.0.0.1 localhost sandbox"])
    _replace("/etc/resolv.conf", [])
    return {"shell": "/bin/bash" if os.access("/bin/bash", os.X_OK) else "/bin/sh"}


def _lines(path: str) -> list[str]:
    if not (os.path.exists(path) and stat.S_ISREG(os.stat(path).st_mode)):
        return []
    return Path(path).read_text(errors="surrogateescape").splitlines()


def _replace(path: str, lines: list[str]) -> None:
    remove(path)
    Path(path).write_text("".join(f"{line}\n" for line in lines), errors="surrogateescape")


def main(root: str, step: str) -> None:
    tar = tarfile.open(fileobj=sys.stdin.buffer, mode="r|") if step == "layer" else None  # noqa: SIM115
    os.umask(0o022)
    layer.unshare()
    os.chroot(root)
    os.chdir("/")
    if tar is None:
        json.dump(finish(), sys.stdout)
        return
    unpack(tar)
    while sys.stdin.buffer.read(1 << 20):  # padding, which counts for the layer's digest
        pass


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2])
    except (OSError, tarfile.TarError, BadLayer) as e:
        sys.exit(f"{e.filename}: {e.strerror}" if isinstance(e, OSError) and e.filename else str(e))
