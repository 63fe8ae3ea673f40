"""Which episodes' artifacts a shard keeps: the harness's log, and the work folder where asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openforge import tables
from openforge.config_sandbox import Artifacts


class Keeper:
    """Keeps artifacts below `folder`, as the configuration's section `sandbox.artifacts` says.

    Args:
        rows: the shard's rollout rows, in table order.
    """

    def __init__(self, terms: Artifacts, folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
        self.work, self._terms, self._folder = terms.work, terms, folder
        self._first = {r["rollout_id"] for r in rows[: terms.most]}
        # An earlier process of the shard may have kept some.
        self._kept = {p.name.partition(".")[0] for p in folder.glob("[!.]*")}

    def wanted(self, row: Mapping[str, Any], episode: Mapping[str, Any]) -> bool:
        """Whether an attempt that ended as `episode` says is to be kept; it counts as kept then."""
        keep = self._terms.keep
        if keep == "first":
            return episode["attempt"] == 0 and row["rollout_id"] in self._first
        if keep == "none" or (keep == "failed" and episode["status"] == "completed"):
            return False
        if len(self._kept) >= self._terms.most:
            return False
        self._kept.add(episode["episode_id"])
        return True

    def keep(self, episode_id: str, log: bytes | None, work: bytes | None) -> str | None:
        """Write an attempt's artifacts, each None where there is none; the name of the first one."""
        files = {f"{episode_id}.{kind}": data for kind, data in (("log", log), ("tar", work)) if data is not None}
        for name, data in files.items():
            tables.write_beside(self._folder / name, data)
        return next(iter(files), None)
