"""Paths inside a sandbox, as callers give them."""

from __future__ import annotations

import posixpath

from openforge.sandboxes.join import HOME, WORK
from openforge.sandboxes.protocol import SandboxError, SandboxFileError

WRITABLE = (WORK, HOME, "/tmp")  # where files may be uploaded to


def inside(path: str) -> str:
    """The absolute path inside; what is relative is so to the work folder."""
    if not path or "\0" in path:
        raise SandboxFileError(f"{path!r} is no path")
    return posixpath.join(WORK, path)


def target(remote: str) -> tuple[str, list[str]]:
    """A path to write to, as a writable folder and the names below it."""
    path = inside(remote)
    parts = [p for p in path.split("/") if p not in ("", ".")]
    for root in WRITABLE:
        names = root.strip("/").split("/")
        if ".." not in parts and parts[: len(names)] == names and len(parts) > len(names):
            return root, parts[len(names) :]
    raise SandboxError(f"cannot write to {remote!r}: the path must lie below {', '.join(WRITABLE)}, without '..'")
