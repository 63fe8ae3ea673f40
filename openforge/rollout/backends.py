"""The backend of a shard's sandboxes, as the rollout row and the configuration name it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openforge.config_paths import SANDBOX_URL
from openforge.config_sandbox import LOCAL
from openforge.config_sandbox import Sandbox as Terms
from openforge.rollout.pool import GIB
from openforge.sandboxes import Backend, LocalBackend, Owner, SandboxError, bwrap
from openforge.sandboxes import reap as reap_local
from openforge.sandboxes.orchard import Options, OrchardBackend


def url_of(terms: Terms) -> str:
    """Where the server of remote sandboxes is.

    Raises:
        SandboxError: nothing says it.
    """
    url = terms.url or os.environ.get(SANDBOX_URL, "").strip()
    if not url:
        raise SandboxError(f"neither sandbox.url nor {SANDBOX_URL} says where the server of the sandboxes is; set one")
    return url


def make(kind: str, terms: Terms, root: Path, run: str, seconds: float, keep: Path | None = None) -> Backend:
    """A backend of a kind (`orchestrator` of a rollout row).

    Args:
        root: folder of its sandboxes, or of what is noted of them.
        seconds: that an episode may take at most.
        keep: folder that a local sandbox's work folder is moved to at its end.

    Raises:
        SandboxError: it cannot be used; one sentence.
    """
    if kind in LOCAL:
        return LocalBackend(root, run, Owner.current(), keep)
    return _orchard(terms, root, run, seconds)


def _orchard(terms: Terms, root: Path, run: str, seconds: float) -> OrchardBackend:
    limits = terms.limits
    options = Options(
        cpu=None if limits.cpus is None else f"{round(limits.cpus * 1000)}m",
        memory=None if limits.memory_gb is None else str(int(limits.memory_gb * GIB)),
        ttl_seconds=terms.ttl_seconds,
        episode_seconds=seconds,
        network_policy=terms.network_policy,
        create_seconds=terms.create_seconds,
        # Room is waited for by the pool, which shows it.
        full_seconds=0.0,
    )
    key = os.environ.get(terms.api_key_env, "").strip() or None
    return OrchardBackend(root, run, Owner.current(), url=url_of(terms), key=key, options=options)


async def check(kind: str, terms: Terms, run: str, seconds: float) -> None:
    """Refuse what every episode would fail of.

    Raises:
        SandboxError: no sandbox can be made; one sentence.
    """
    if kind in LOCAL:
        why = bwrap.probe()["why"]
        if why is not None:
            raise SandboxError(why)
        return
    with tempfile.TemporaryDirectory() as folder:
        backend = _orchard(terms, Path(folder), run, seconds)
        try:
            await backend.capabilities()
        finally:
            await backend.close()


async def reap(folders: Sequence[Path], terms: Terms, run: str) -> None:
    """Remove what dead processes of the run have left of their sandboxes, whose folders these are.

    Raises:
        SandboxError: those of a server cannot be removed, because it cannot be asked.
    """
    for folder in folders:
        reap_local(folder, run)
        if any(folder.glob("*.orchard")):
            backend = _orchard(terms, folder, run, 0.0)
            try:
                await backend.reap()
            finally:
                await backend.close()


def episode_seconds(rows: Sequence[Mapping[str, Any]], terms: Terms) -> float:
    """Seconds that an episode of these rows may take, from its sandbox's creation to its verdict."""
    own = max(r["limits"]["seconds"] + r["verifier"]["seconds"] for r in rows)
    return float(own + terms.create_seconds + terms.setup_seconds + terms.verify_seconds)
