"""Answers of a judge by what was asked, a file each: a question asked again costs nothing and gets the same answer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openforge.tables import write_beside


def key(url: str, body: Mapping[str, Any]) -> str:
    """SHA-256 of all that an answer depends on: the endpoint and the request's body, the prompt in it."""
    return hashlib.sha256(json.dumps([url, body], sort_keys=True).encode(errors="surrogatepass")).hexdigest()


class Cache:
    """A folder of answers; several processes may share it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _file(self, name: str) -> Path:
        return self.folder / name[:2] / f"{name}.json"

    def get(self, name: str) -> dict[str, Any] | None:
        """The answer that is kept; None for none, or one that is damaged, which is asked for again."""
        try:
            found = json.loads(self._file(name).read_text())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) and isinstance(found.get("content"), str) else None

    def put(self, name: str, answer: Mapping[str, Any]) -> None:
        """Keep an answer that was understood; failures are never kept."""
        write_beside(self._file(name), json.dumps(dict(answer)) + "\n")
