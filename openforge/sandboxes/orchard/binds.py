"""Files and folders of this host that must stand inside a pod: packed once, copied into each."""

from __future__ import annotations

import hashlib
import io
import os
import stat
import tarfile
from dataclasses import dataclass
from pathlib import Path

from openforge.sandboxes.protocol import Bind, SandboxError

MARKERS = "/opt/openforge/binds"  # an image that holds a bind already has an empty file of its digest here


def marker(bind: Bind, digest: str) -> str:
    """The file by which an image says that `bind` stands in it already, at its path inside and with this content."""
    place = hashlib.sha256(f"{digest} {inside(bind)}".encode()).hexdigest()[:32]
    return f"{MARKERS}/{place}"


def inside(bind: Bind) -> str:
    """Where a bind stands inside."""
    return bind.inside or str(bind.host.absolute())


@dataclass(frozen=True)
class Archive:
    """A bind as tar.gz, in which it is called "root", and the digest of names, modes, links and contents."""

    digest: str
    data: bytes


class Packer:
    """Packs each path once a job, and anew when anything below it has changed."""

    def __init__(self) -> None:
        self._packed: dict[Path, tuple[object, Archive]] = {}

    def pack(self, host: Path) -> Archive:
        """The archive of a file or folder; `SandboxError` if there is none."""
        if not host.exists():
            raise SandboxError(f"{host} does not exist and cannot be bound into the sandbox")
        seen = _stamp(host)
        packed = self._packed.get(host)
        if packed is None or packed[0] != seen:
            self._packed[host] = packed = (seen, Archive(digest(host), _tar(host)))
        return packed[1]


def _walk(host: Path) -> list[Path]:
    """A path and all below it, in order; links are not followed but the path's own."""
    root = Path(os.path.realpath(host))
    found = [root]
    for folder, names, files in os.walk(root):
        found += [Path(folder) / n for n in (*names, *files)]
    return sorted(found)


def _stamp(host: Path) -> object:
    """What changes when anything below `host` does, without reading it."""
    return [(str(p), s.st_mtime_ns, s.st_ctime_ns, s.st_size) for p in _walk(host) for s in [p.lstat()]]


def digest(host: Path) -> str:
    """sha256 of the names, kinds, permissions, links and contents below `host`; times and owners do not count."""
    found = hashlib.sha256()
    paths = _walk(host)
    for path in paths:
        info = path.lstat()
        content = b""
        if stat.S_ISLNK(info.st_mode):
            content = os.readlink(path).encode()
        elif stat.S_ISREG(info.st_mode):
            with open(path, "rb") as f:
                content = hashlib.file_digest(f, "sha256").digest()
        name = os.path.relpath(path, paths[0])
        found.update(repr((name, stat.S_IFMT(info.st_mode), info.st_mode & 0o777, content)).encode())
    return found.hexdigest()


def _tar(host: Path) -> bytes:
    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        return info

    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz", compresslevel=1) as archive:
        archive.add(os.path.realpath(host), "root", filter=plain)
    return out.getvalue()
