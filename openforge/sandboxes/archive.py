"""A folder of a sandbox as a tar that is safe to unpack, and such a tar into another sandbox.

What packs it runs among the agent's files, so its output is hostile: it is read here, where nothing is extracted, and
written anew with files, folders and links that stay inside, and nothing else.
"""

from __future__ import annotations

import asyncio
import io
import posixpath
import secrets
import tarfile
from collections.abc import Callable

from openforge.sandboxes.join import BASE_ENV, HOME
from openforge.sandboxes.protocol import Sandbox, SandboxError

COPY_BYTES = 512 << 20  # of all files together
TAR_SECONDS = 120.0
_LAST = 1 << 33  # latest time of a file that is kept, epoch seconds

Edit = Callable[[bytes], bytes]


async def pack(sandbox: Sandbox, folder: str, edit: Edit | None = None) -> bytes:
    """A folder inside as an uncompressed tar: regular files, folders and links that stay in it, by relative names.

    Call it when nothing runs inside any more.

    Args:
        edit: changes a file's content.

    Raises:
        SandboxError: it cannot be packed, or is too large.
    """
    beside = f"{HOME}/.{secrets.token_hex(8)}.tar"
    # What its owner has closed to itself is no reason not to look at it; links are not followed.
    await sandbox.exec(["chmod", "-R", "u+rwX", "."], timeout=TAR_SECONDS, cwd=folder, env=BASE_ENV)
    await _tar(sandbox, folder, "-cf", beside)
    try:
        data = await sandbox.download_content(beside)
    finally:
        await sandbox.exec(["rm", "-f", beside], timeout=TAR_SECONDS, cwd="/", env=BASE_ENV)
    try:
        return await asyncio.to_thread(rewritten, data, edit)
    except (tarfile.TarError, ValueError, ArithmeticError, EOFError, OSError) as e:
        raise SandboxError(f"what sandbox {sandbox.sandbox_id} packed of {folder} cannot be used: {e}") from None


async def unpack(sandbox: Sandbox, data: bytes, folder: str) -> None:
    """Unpack what `pack` made into an empty folder of a sandbox that no agent has touched.

    Raises:
        SandboxError: it cannot be unpacked.
    """
    beside = f"{HOME}/.{secrets.token_hex(8)}.tar"
    await sandbox.upload_content(data, beside)
    await _tar(sandbox, folder, "-xpf", beside)
    await sandbox.exec(["rm", "-f", beside], timeout=TAR_SECONDS, cwd="/", env=BASE_ENV)


async def _tar(sandbox: Sandbox, folder: str, how: str, file: str) -> None:
    argv = ["tar", "-C", folder, how, file, *(["."] if how == "-cf" else [])]
    done = await sandbox.exec(argv, timeout=TAR_SECONDS, cwd="/", env=BASE_ENV)
    if done.exit_code != 0:
        told = done.stderr.decode(errors="replace").strip()[-300:] or f"exit code {done.exit_code}"
        raise SandboxError(f"{folder} of sandbox {sandbox.sandbox_id} could not be copied: {told}")


def rewritten(data: bytes, edit: Edit | None = None) -> bytes:
    """The tar with nothing in it but what stays inside: links last, so that no file is written through one.

    Raises:
        tarfile.TarError: it is no tar.
        ValueError: its files are too large together.
    """
    out, links, left = io.BytesIO(), [], COPY_BYTES
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as source, tarfile.open(fileobj=out, mode="w") as target:
        for member in source:
            name = posixpath.normpath(member.name)
            if name == "." or not _inside(name):
                continue
            clean = tarfile.TarInfo(name)
            clean.mode, clean.mtime = member.mode & 0o777, min(max(int(member.mtime), 0), _LAST)
            if member.isdir():
                clean.type, clean.mode = tarfile.DIRTYPE, clean.mode | 0o700
                target.addfile(clean)
            elif member.issym():
                if _inside(posixpath.normpath(posixpath.join(posixpath.dirname(name), member.linkname))):
                    clean.type, clean.linkname = tarfile.SYMTYPE, member.linkname
                    links.append(clean)
            elif member.isreg() or member.islnk():
                content = _content(source, member, left)
                if content is not None:
                    left -= len(content)
                    content = content if edit is None else edit(content)
                    clean.size = len(content)
                    target.addfile(clean, io.BytesIO(content))
        for link in links:
            target.addfile(link)
    return out.getvalue()


def _inside(name: str) -> bool:
    return not name.startswith("/") and name != ".." and not name.startswith("../")


def _content(source: tarfile.TarFile, member: tarfile.TarInfo, most: int) -> bytes | None:
    """Content of a file or hard link; None where a link leads to nothing."""
    try:
        file = source.extractfile(member)
    except KeyError:
        return None
    if file is None:
        return None
    # Not as a whole: a sparse member may claim any size.
    content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"its files have more than {COPY_BYTES >> 20} MiB together")
    return content
