"""One sandbox of the server: what was asked for, on disk, and what runs."""

from __future__ import annotations

import asyncio
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openforge.sandboxes.local_sandbox import LocalSandbox
from openforge.sandboxes.server.problems import Problem
from openforge.sandboxes.server.wire import CreateRequest, NetworkRequest

NAMESPACE = "openforge"


@dataclass
class Kept:
    """What STATE/records/<sandbox_id>.json holds.

    Attributes:
        request: the `CreateRequest` as it came.
        key: the caller's Idempotency-Key.
        local_id: of the backend's sandbox, once there is one.
        isolation: what was reached.
        routes: port inside -> target.
        heartbeat: whether its caller has ever sent one.
        failure: why it is no longer, or never was, usable.
    """

    sandbox_id: str
    request: dict[str, Any]
    key: str | None
    created_at: float
    ttl: float
    cpu: float
    memory: int
    local_id: str | None = None
    isolation: str = ""
    routes: dict[str, str] = field(default_factory=dict)
    heartbeat: bool = False
    failure: str | None = None

    def write(self, folder: Path) -> None:
        """Write it beside and rename it; not flushed, for it matters only as long as the machine is up."""
        beside = folder / f"{self.sandbox_id}.tmp"
        try:
            beside.write_text(json.dumps(vars(self)))
        except OSError:  # a full disk must not leave half a record behind
            beside.unlink(missing_ok=True)
            raise
        beside.rename(folder / f"{self.sandbox_id}.json")

    @classmethod
    def read(cls, path: Path) -> Kept:
        """Raises ValueError or TypeError for a file that is none."""
        return cls(**json.loads(path.read_bytes()))


class Hosted:
    """A sandbox of the server.

    Attributes:
        local: the backend's sandbox while it lives.
        settled: set once it is ready or has failed.
        used_at: time of the last call that named it.
        creating: the task that starts it.
        timer: of its time to live.
        companions: ids of those that are deleted with it.
    """

    def __init__(self, kept: Kept) -> None:
        self.kept = kept
        self.request = CreateRequest(**kept.request)
        self.local: LocalSandbox | None = None
        self.settled = asyncio.Event()
        self.used_at = time.time()
        self.creating: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.watch: int | None = None
        self.servers: dict[int, asyncio.Server] = {}
        self.companions: set[str] = set()
        self.deleting: asyncio.Task[None] | None = None

    @property
    def sandbox_id(self) -> str:
        return self.kept.sandbox_id

    @property
    def network(self) -> NetworkRequest:
        """The network asked for; Orchard's switch where nothing else is said."""
        return self.request.network or NetworkRequest(mode="none" if self.request.block_network else "open")

    @property
    def status(self) -> str:
        """As the wire says it."""
        if self.kept.failure is not None:
            return "failed"
        return "ready" if self.local is not None else "pending"

    def failed(self, why: str) -> None:
        """It cannot be used (any more)."""
        self.kept.failure = self.kept.failure or why
        self.local = None
        self.settled.set()

    def watched(self, holder_pid: int, gone: Any) -> None:
        """Have `gone` called when its first process dies."""
        self.watch = os.pidfd_open(holder_pid)
        asyncio.get_running_loop().add_reader(self.watch, gone, self)

    def unwatch(self) -> None:
        """End `watched`; again is harmless."""
        if self.watch is not None:
            asyncio.get_running_loop().remove_reader(self.watch)
            os.close(self.watch)
            self.watch = None

    def ready(self) -> LocalSandbox:
        """The sandbox; `Problem` if it is not usable now."""
        if self.kept.failure is not None:
            raise Problem("sandbox_lost", f"sandbox {self.sandbox_id} is lost: {self.kept.failure}")
        if self.local is None:
            raise Problem("not_ready", f"sandbox {self.sandbox_id} is still starting", retry_after=1)
        return self.local

    def wire(self) -> dict[str, Any]:
        """The sandbox in answers (`wire.Sandbox`)."""
        kept, status = self.kept, self.status
        return {
            "sandbox_id": kept.sandbox_id,
            "namespace": NAMESPACE,
            "image": self.request.image or "host",
            "pod_name": f"sandbox-{kept.sandbox_id}",
            "block_network": self.network.mode != "open",
            "cpu": f"{kept.cpu:g}",
            "memory": self.request.memory or str(kept.memory),
            "timeout": self.request.timeout or 3600,
            "created_at": kept.created_at,
            "ready": status == "ready",
            "status": status,
            "status_message": kept.failure,
            "network": self.network.model_dump(),
            "labels": self.request.labels,
            "ttl_seconds": kept.ttl,
            "expires_at": self.used_at + kept.ttl,
            "companion_of": self.request.companion_of,
            "isolation": kept.isolation,
        }
