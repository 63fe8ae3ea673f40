"""Append-only record of a proxy process: one JSON line a record, written before the answer leaves.

A record that `append` returned from survives kill -9 (it is in the kernel's page cache); `sync` makes it
survive the machine. Records, by their key `record`:

- open: a session began (episode_id, policy_version, sampling, limits, model, context_window, time).
- call: an answered call (call, dialect, request, tokens, logprobs, policy_version, ...; see session.py). It is stored
  as what it adds to an earlier one (`deltas`), and `read` gives it whole.
- failure: a request that got no answer (refused upstream, hung up, or given up), with its reason.
- delivery: the answer's body went out whole (call, state `sent`).
- close: the session was sealed (harness_exited, budget_exhausted, policy_failed).
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from openforge.proxy.calls import REDACTED, Json
from openforge.proxy.deltas import Whole
from openforge.proxy.fastjson import dumps, loads


class JournalError(RuntimeError):
    """A journal that cannot be written or read; the message names the file and the line."""


class Journal:
    """One process's journal file. Not for use from several threads."""

    def __init__(self, folder: Path) -> None:
        """Raises `JournalError` where another process records in the same folder: their episodes would be mixed up."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = _claimed(folder)
        self.path = folder / f"{time.time_ns():020d}-{os.getpid()}.jsonl"
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._end = 0
        self._dirty = False

    def append(self, record: Json, more: Mapping[str, bytes] | None = None, hide: str = "") -> tuple[int, int]:
        """Write one record with one write(2); returns its (offset, length) in the file.

        Args:
            more: further fields, their values as JSON.
            hide: a secret of URL-safe characters, which the file shows as `REDACTED` instead.

        Raises:
            JournalError: it could not be written whole; the file then ends with the record before it.
        """
        line = dumps(record)
        if more:
            line = b",".join([line[:-1], *(b'"%b":%b' % (k.encode(), v) for k, v in more.items())]) + b"}"
        if hide:
            line = line.replace(hide.encode(), REDACTED.encode())
        line += b"\n"
        try:
            written = os.write(self._fd, line)
        except OSError as e:
            raise JournalError(f"{self.path} cannot be written: {e.strerror}") from e
        if written != len(line):
            # The half line would swallow the next record.
            os.ftruncate(self._fd, self._end)
            raise JournalError(f"{self.path} cannot be written: the disk took {written} of {len(line)} bytes")
        place = (self._end, len(line))
        self._end += len(line)
        self._dirty = True
        return place

    def line(self, place: tuple[int, int]) -> bytes:
        """The JSON of a record that `append` placed, without its line end."""
        offset, length = place
        return os.pread(self._fd, length - 1, offset)

    def sync(self) -> None:
        """fsync what was appended since the last call; may run beside `append` in another thread."""
        if self._dirty:
            self._dirty = False
            os.fsync(self._fd)

    def close(self) -> None:
        self.sync()
        os.close(self._fd)
        os.close(self._folder)


def _claimed(folder: Path) -> int:
    """A descriptor of the folder with a lock that the kernel drops when the process ends."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise JournalError(f"another proxy records in {folder}; give each a folder of its own") from None
    except OSError as e:
        # A network file system without locks: the files' names differ all the same.
        if e.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
            os.close(fd)
            raise
    return fd


def read(folder: Path) -> list[Json]:
    """All records of a folder's journals, oldest file first, calls whole; their prompt ids are array("i").

    A last line without an end is what a killed process was writing: its answer never left, so it is dropped.

    Raises:
        JournalError: any other line that is no record, with file and line.
    """
    return [r for path in sorted(folder.glob("*.jsonl")) for r in _whole(_lines(path), str(path))]


def stored(folder: Path) -> dict[str, list[Json]]:
    """The records by episode_id as they are stored, each group in the order written, for `whole`.

    Whole records of many episodes at once would fill the memory. The errors are those of `read`.
    """
    return by_episode(r for path in sorted(folder.glob("*.jsonl")) for r in _lines(path))


def opened(folder: Path) -> set[str]:
    """Episodes that a folder's journals hold, by their records `open` alone: most of a journal is calls.

    Raises:
        JournalError: such a line is no record, with file and line.
    """
    # `record` is the first key of every line (session.py).
    lines = (r for path in sorted(folder.glob("*.jsonl")) for r in _lines(path, b'{"record":"open"'))
    return {r["episode_id"] for r in lines}


def whole(records: Iterable[Json]) -> list[Json]:
    """Stored records of one episode in the form of `read`.

    Raises:
        JournalError: a call stands on another one that is not among them.
    """
    return _whole(records, "the journal")


def _whole(records: Iterable[Json], where: str) -> list[Json]:
    made, found = Whole(), []
    for i, r in enumerate(records, 1):
        try:
            found.append(made.add(r))
        except (ValueError, KeyError, TypeError, IndexError) as e:
            told = f"record {i} (call {r.get('call')} of episode {r['episode_id']})"
            raise JournalError(f"{where}, {told} cannot be made whole; the file was altered or damaged") from e
    return found


def _lines(path: Path, head: bytes = b"") -> Iterator[Json]:
    """The records of a file whose lines begin with `head`, one at a time."""
    with path.open("rb") as file:
        for i, line in enumerate(file, 1):
            if line.endswith(b"\n") and line.startswith(head):
                yield _record(path, i, line)


def _record(path: Path, number: int, line: bytes) -> Json:
    try:
        record: Any = loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict) or "record" not in record or "episode_id" not in record:
        raise JournalError(f"{path}, line {number}: not a journal record; the file was altered or damaged")
    return record


def by_episode(records: Iterable[Json]) -> dict[str, list[Json]]:
    """Records grouped by episode_id, each group in the order written."""
    out: dict[str, list[Json]] = {}
    for r in records:
        out.setdefault(r["episode_id"], []).append(r)
    return out
