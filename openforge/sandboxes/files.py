"""File operations that run INSIDE a sandbox, in a joined process: standard library only.

The agent may have planted links, pipes or folders at any path. Nothing here needs to be clever about where a link
leads: the process sees the sandbox's file system only and holds no right that the agent lacks. What is left is that
a trap must not make an operation hang or fail.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from typing import Any

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def _is_folder(name: str, parent: int | None) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(name, dir_fd=parent).st_mode)
    except FileNotFoundError:
        return False


def _remove(name: str, parent: int) -> None:
    """Remove an entry of any kind; a folder whatever its depth and permissions, with no program of the sandbox's."""
    if not _is_folder(name, parent):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=parent)
        return
    os.fchdir(parent)
    path, left = [name], [_step_into(name)]
    while path:
        if left[-1]:
            path.append(left[-1].pop())
            left.append(_step_into(path[-1]))
        else:
            left.pop()
            os.chdir("..")
            os.rmdir(path.pop())


def _step_into(name: str) -> list[str]:
    """Change to a folder and remove its files; the folders in it. Step by step no path is ever too long."""
    os.chmod(name, 0o700)
    os.chdir(name)
    folders = []
    for entry in os.listdir("."):
        if _is_folder(entry, None):
            folders.append(entry)
        else:
            os.unlink(entry)
    return folders


def _open_folder(name: str, parent: int | None) -> int:
    fd = -1
    with contextlib.suppress(PermissionError):  # the agent's chmod, undone below
        fd = os.open(name, _FOLDER, dir_fd=parent)
    if fd < 0:
        os.chmod(name, 0o700, dir_fd=parent)
        fd = os.open(name, _FOLDER, dir_fd=parent)
    mode = os.fstat(fd).st_mode
    if mode & 0o700 != 0o700:
        os.fchmod(fd, stat.S_IMODE(mode) | 0o700)
    return fd


def _enter_folder(name: str, parent: int) -> int:
    """Open folder `name` of `parent`, making it a real folder if it is none: the uploaded files win."""
    if not _is_folder(name, parent):
        _remove(name, parent)
        os.mkdir(name, 0o755, dir_fd=parent)
    return _open_folder(name, parent)


def write(root: str, parts: list[str], mode: int, size: int, read: Callable[[int], bytes]) -> None:
    """Write `size` bytes from `read` to root/parts, replacing whatever is there.

    Links are not followed: one in the path's place is removed.
    """
    parent = _open_folder(root, None)
    try:
        for name in parts[:-1]:
            folder = _enter_folder(name, parent)
            os.close(parent)
            parent = folder
        beside = f".{os.getpid()}.upload"
        _remove(beside, parent)
        try:
            _fill(beside, parent, mode, size, read)
            if _is_folder(parts[-1], parent):
                _remove(parts[-1], parent)
            os.rename(beside, parts[-1], src_dir_fd=parent, dst_dir_fd=parent)
        except BaseException:  # half written it would keep a full disk full; whole, its name may be too long
            _remove(beside, parent)
            raise
    finally:
        os.close(parent)


def _fill(name: str, parent: int, mode: int, size: int, read: Callable[[int], bytes]) -> None:
    out = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=parent)
    try:
        _pour(out, size, read)
        os.fchmod(out, mode)
    finally:
        os.close(out)


def _pour(out: int, size: int, read: Callable[[int], bytes]) -> None:
    while size:
        chunk = read(min(size, 1 << 20))
        if not chunk:
            raise OSError(errno.EPIPE, "the sender went away")
        size -= len(chunk)
        view = memoryview(chunk)
        while view:
            view = view[os.write(out, view) :]


def write_at(root: str, parts: list[str], offset: int, size: int, read: Callable[[int], bytes]) -> int:
    """Write `size` bytes from `read` at `offset` of the regular file root/parts; the file's size then.

    Links are not followed. The file has at least `offset` bytes: a hole would be a piece that was never sent.
    """
    parent = _open_folder(root, None)
    try:
        for name in parts[:-1]:
            folder = os.open(name, _FOLDER, dir_fd=parent)
            os.close(parent)
            parent = folder
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW | os.O_CLOEXEC
        out = os.open(parts[-1], flags, dir_fd=parent)
    finally:
        os.close(parent)
    try:
        info = os.fstat(out)
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EINVAL, "no regular file")
        if info.st_size < offset:
            raise OSError(errno.ESPIPE, f"the file has {info.st_size} bytes, so nothing can be written at {offset}")
        os.lseek(out, offset, os.SEEK_SET)
        _pour(out, size, read)
        return os.fstat(out).st_size
    finally:
        os.close(out)


def _open_regular(path: str) -> int:
    # A named pipe would block the open, a terminal become ours.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    kind = os.fstat(fd).st_mode
    if stat.S_ISREG(kind):
        return fd
    os.close(fd)
    if stat.S_ISDIR(kind):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    raise OSError(errno.EINVAL, "no regular file")


def read(path: str, limit: int) -> bytes:
    """A regular file's content, at most `limit` bytes."""
    with os.fdopen(_open_regular(path), "rb") as f:
        data = f.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"more than {limit} bytes")
    return data


def read_at(path: str, offset: int, length: int | None, limit: int) -> tuple[bytes, int]:
    """At most `length` bytes from `offset` of a regular file (None: all, if within `limit`), and the file's size."""
    fd = _open_regular(path)
    try:
        size = os.fstat(fd).st_size
        if length is None and size - offset > limit:  # before anything is read: a sparse file is as large as it likes
            raise OSError(errno.EFBIG, f"{size} bytes, of which one call takes {limit}; ask for pieces of it")
        return os.pread(fd, limit if length is None else length, offset), size
    finally:
        os.close(fd)


def entries(path: str) -> list[dict[str, Any]]:
    """The entries of a folder, by name."""
    found = []
    with os.scandir(path) as it:
        for entry in it:
            info = entry.stat(follow_symlinks=False)
            kind = "other"
            for test, name in ((stat.S_ISREG, "file"), (stat.S_ISDIR, "directory"), (stat.S_ISLNK, "symlink")):
                if test(info.st_mode):
                    kind = name
            found.append({"name": entry.name, "type": kind, "size": info.st_size, "modified": info.st_mtime})
    return sorted(found, key=lambda e: str(e["name"]))
