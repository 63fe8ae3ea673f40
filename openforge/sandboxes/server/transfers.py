"""Files in and out of a sandbox, streamed in from the wire."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator
from typing import Any

from openforge.sandboxes.local_sandbox import DOWNLOAD_BYTES, LocalSandbox
from openforge.sandboxes.paths import inside, target
from openforge.sandboxes.protocol import SandboxLost
from openforge.sandboxes.requests import Spawner, checked
from openforge.sandboxes.server.problems import Problem

TRANSFER_BYTES = DOWNLOAD_BYTES  # of one file in one call


async def upload(
    spawner: Spawner,
    sandbox: LocalSandbox,
    path: str,
    data: AsyncIterable[bytes],
    size: int,
    mode: int = 0o644,
    offset: int | None = None,
) -> int:
    """Write `size` bytes to a file inside, as `wire` says of `offset`; the file's size then."""
    root, parts = target(path)
    where = {"root": root, "parts": parts, "bytes": size}
    if offset:
        request: dict[str, Any] = {"op": "write_at", "path": path, "offset": offset, **where}
    else:
        request = {"op": "write", "files": [{"mode": mode, **where}]}
    child = await spawner.request()
    try:
        await child.send({"holder": sandbox.holder_pid, "cwd": "/", **request})
        await child.stream(data)
        answer = await child.answer()
    finally:
        child.close()
    if answer is None:
        raise SandboxLost(f"the process that should write {path} inside the sandbox was killed")
    reply = checked(answer[0])
    return int(reply.get("file_bytes", size))


async def download(
    spawner: Spawner, sandbox: LocalSandbox, path: str, offset: int, length: int | None
) -> tuple[bytes, int]:
    """A piece of a regular file inside, and the file's whole size. Without a length the rest must fit in one call."""
    if length is not None and length > TRANSFER_BYTES:
        raise Problem("too_large", f"length is {length}; one call takes at most {TRANSFER_BYTES} bytes")
    request = {"op": "read_at", "path": inside(path), "offset": offset, "length": length, "limit": TRANSFER_BYTES}
    reply, data = await spawner.call({"holder": sandbox.holder_pid, "cwd": "/", **request})
    return data, int(reply["file_bytes"])


async def whole(data: bytes) -> AsyncIterator[bytes]:
    """Data that is there already, as a stream."""
    yield data
