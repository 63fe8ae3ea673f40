"""What goes wrong, as the wire says it."""

from __future__ import annotations

import errno
from typing import Any

from openforge.sandboxes.protocol import SandboxError, SandboxFileError, SandboxLost
from openforge.sandboxes.server.wire import CODES

FULL = (errno.ENOSPC, errno.EDQUOT)
_FILE = {
    errno.ENOENT: "unknown",
    **dict.fromkeys(FULL, "disk_full"),
    errno.EFBIG: "too_large",
    errno.ESPIPE: "invalid",  # an offset past the file's end
}


class Problem(Exception):
    """An answer that is no success.

    Attributes:
        code: one of `wire.CODES`, which has its HTTP status.
        detail: a sentence; of a body of the wrong shape, a list of what is wrong where.
        retry_after: seconds, where waiting helps.
    """

    def __init__(self, code: str, detail: str | list[dict[str, Any]], retry_after: int | None = None) -> None:
        super().__init__(str(detail))
        self.code, self.detail, self.retry_after = code, detail, retry_after

    @property
    def status(self) -> int:
        """The HTTP status."""
        return CODES[self.code]


def of(error: SandboxError) -> Problem:
    """The problem that a sandbox's error is."""
    if isinstance(error, SandboxLost):
        return Problem("sandbox_lost", str(error))
    if isinstance(error, SandboxFileError):
        return Problem("invalid" if error.errno is None else _FILE.get(error.errno, "wrong_kind"), str(error))
    return Problem("wrong_kind", str(error))
