"""Names of sandboxes at an Orchard service, written down before they are made: it has no list to find them by."""

from __future__ import annotations

import contextlib
import re
import secrets
from pathlib import Path

from openforge.sandboxes.owner import Label, Owner

_SUFFIX = ".orchard"


def name(run: str, episode_id: str) -> str:
    """A new sandbox's id, RUN-EPISODE-RANDOM as a DNS label of at most 50 characters, as pods need it. It is never
    used twice: Orchard would answer 200, and the old pod would stay under the new name."""
    parts = [re.sub(r"[^a-z0-9]+", "-", text.lower())[:18].strip("-") or "x" for text in (run, episode_id)]
    return "-".join([*parts, secrets.token_hex(5)])


class Ledger:
    """A folder with one label a sandbox, below `root`."""

    def __init__(self, root: Path, run: str, owner: Owner) -> None:
        self.root = root.absolute()
        self._run, self._owner = run, owner

    def add(self, sandbox_id: str, episode_id: str) -> None:
        """Write a sandbox down. Renamed into place: a torn label would hide its sandbox."""
        self.root.mkdir(parents=True, exist_ok=True)
        beside = self.root / f"{sandbox_id}.tmp"
        beside.write_text(Label(self._run, episode_id, self._owner, None).text())
        beside.rename(self._path(sandbox_id))

    def remove(self, sandbox_id: str) -> None:
        """Forget a sandbox that is deleted."""
        self._path(sandbox_id).unlink(missing_ok=True)

    def orphans(self) -> list[str]:
        """Sandboxes of this run whose owner is dead."""
        found = []
        for path in sorted(self.root.glob(f"*{_SUFFIX}")):
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                label = Label.read(path)
                if label.run == self._run and not label.owner.alive():
                    found.append(path.name.removesuffix(_SUFFIX))
        return found

    def _path(self, sandbox_id: str) -> Path:
        return self.root / f"{sandbox_id}{_SUFFIX}"
