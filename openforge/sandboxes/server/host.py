"""The server's sandboxes: made, found again after a kill, given up when nobody names them any more, deleted."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from openforge.sandboxes.keeper import Keeper
from openforge.sandboxes.local import LocalBackend
from openforge.sandboxes.local_sandbox import LocalSandbox
from openforge.sandboxes.owner import Label, discard
from openforge.sandboxes.protocol import Bind, Limits, SandboxError
from openforge.sandboxes.server import problems, settings
from openforge.sandboxes.server.hosted import Hosted, Kept
from openforge.sandboxes.server.jobs import Jobs
from openforge.sandboxes.server.problems import Problem
from openforge.sandboxes.server.settings import Settings
from openforge.sandboxes.server.wire import NAME, CreateRequest

RUN = "server"  # of the labels of its sandboxes
_READY_SECONDS = 15.0  # that a call waits for a sandbox which still starts
_RETRY_SECONDS = 5  # told with a quota


class Host:
    """All sandboxes of a server. One event loop; the state folder is this process's alone (see `serve`)."""

    def __init__(self, given: Settings) -> None:
        self.settings = given
        self._records = given.state / "records"
        self._records.mkdir(parents=True, exist_ok=True)
        self.spawner = Keeper(given.state, given.grace)
        self.backend = LocalBackend(given.state / "sandboxes", RUN, self.spawner.ensure(), spawner=self.spawner)
        self.hosted: dict[str, Hosted] = {}
        self._keys: dict[str, Hosted] = {}
        self.jobs = Jobs(given.state / "jobs", self, given.job_ttl)

    # ---- create ------------------------------------------------------------------------------------------------
    def create(self, request: CreateRequest, key: str | None) -> Hosted:
        """Begin a sandbox, or find the one that was made under this key.

        Raises:
            Problem: exists, quota, invalid, forbidden.
        """
        asked = request.model_dump(mode="json")
        known = self._keys.get(key or "")
        if known is not None:
            if {**known.kept.request, "wait": None} != {**asked, "wait": None}:
                raise Problem(
                    "exists", f"Idempotency-Key {key!r} was used for another sandbox; a new one takes a new key"
                )
            return known
        sandbox_id = self._name(request.sandbox_id)
        cpu = settings.cores(request.cpu or self.settings.default_cpu)
        memory = settings.size(request.memory or self.settings.default_memory)
        ttl = request.ttl_seconds or self.settings.ttl
        hosted = Hosted(Kept(sandbox_id, asked, key, time.time(), ttl, cpu, memory))
        self._check(hosted)
        self._admit(cpu, memory)
        try:
            hosted.kept.write(self._records)
        except OSError as e:
            if e.errno in problems.FULL:
                raise Problem("disk_full", f"the server's disk is full: {self.settings.state}") from None
            raise
        self._know(hosted)
        self._begin(hosted)
        return hosted

    def _name(self, asked: str | None) -> str:
        if asked is None:
            return secrets.token_hex(4)
        if re.fullmatch(NAME, asked) is None:
            raise Problem(
                "invalid", f"sandbox_id {asked!r} is no DNS label: 1 to 63 of a-z, 0-9 and -, with no - at either end"
            )
        if asked in self.hosted:
            raise Problem("exists", f"sandbox {asked} exists already; delete it first, or take another sandbox_id")
        return asked

    def _check(self, hosted: Hosted) -> None:
        """What can be told of a request before anything is made; `Problem`."""
        request, network = hosted.request, hosted.network
        if network.mode not in self.settings.networks():
            raise Problem(
                "forbidden",
                "this server gives no sandbox the host's network: ask for block_network true, or network mode none or "
                "proxy (its operator may start it with --open-network)",
            )
        if network.allow and network.mode != "proxy":
            raise Problem("invalid", f"network.allow has no effect with mode {network.mode}; it takes mode proxy")
        for target in network.allow or ():
            if not settings.allowed(target, self.settings.allow):
                raise Problem("forbidden", f"this server lets no sandbox reach {target} (allowed: {self._offered()})")
        for name in request.labels:
            if not name or "=" in name:  # the list could not ask for it
                raise Problem("invalid", f"labels: the name {name!r} is empty or holds =")
        self.settings.image(request.image)
        self._limits(request)
        self._binds(request)
        if request.companion_of is not None:
            self.find(request.companion_of)

    def _offered(self) -> str:
        return ", ".join(self.settings.allow) or "nothing"

    def _limits(self, request: CreateRequest) -> Limits:
        names = {f.name for f in fields(Limits)}
        for name in request.limits:
            if name not in names:
                raise Problem("invalid", f"limits has no {name!r}; it has {', '.join(sorted(names))}")
        given: dict[str, Any] = dict(request.limits)
        if request.cpu is not None or request.memory is not None:
            # As in Orchard, what is asked for is what it gets; `isolation` says where this machine cannot hold it.
            given = {"best_effort": True, **given}
        if request.cpu is not None:
            given.setdefault("cpus", settings.cores(request.cpu))
        if request.memory is not None:
            given.setdefault("memory_bytes", settings.size(request.memory))
        try:
            return replace(self.settings.limits, **given)
        except SandboxError as e:
            raise Problem("invalid", str(e)) from None

    def _binds(self, request: CreateRequest) -> list[Bind]:
        # The path inside is the one that was asked for: links of the server's are not the caller's matter.
        return [Bind(self.settings.shared(b.host), b.inside or b.host) for b in request.binds]

    def _admit(self, cpu: float, memory: int) -> None:
        others = [h.kept for h in self.hosted.values() if h.kept.failure is None]
        limits = self.settings
        over = None
        if len(others) >= limits.max_sandboxes:
            over = f"sandboxes: {len(others)} of {limits.max_sandboxes}"
        elif limits.cpu is not None and sum(k.cpu for k in others) + cpu > limits.cpu:
            over = f"cores: {sum(k.cpu for k in others):g} of {limits.cpu:g}, {cpu:g} more asked for"
        elif limits.memory is not None and sum(k.memory for k in others) + memory > limits.memory:
            over = f"memory: {sum(k.memory for k in others)} bytes of {limits.memory}, {memory} more asked for"
        if over is not None:
            raise Problem("quota", f"the server is full ({over}); try again when a sandbox was deleted", _RETRY_SECONDS)

    def _know(self, hosted: Hosted) -> None:
        self.hosted[hosted.sandbox_id] = hosted
        if hosted.kept.key is not None:
            self._keys[hosted.kept.key] = hosted
        if (parent := hosted.request.companion_of) in self.hosted:
            self.hosted[parent].companions.add(hosted.sandbox_id)
        self._arm(hosted)

    def _begin(self, hosted: Hosted) -> None:
        hosted.creating = asyncio.get_running_loop().create_task(self._start(hosted))

    async def _start(self, hosted: Hosted) -> None:
        request = hosted.request
        try:
            self.backend.owner = self.spawner.ensure()
            image = self.settings.image(request.image)
            async with asyncio.timeout(request.timeout):
                local = await self.backend.create(
                    hosted.sandbox_id,
                    network=hosted.network.mode,
                    image=None if image is None else str(image),
                    binds=self._binds(request),
                    limits=self._limits(request),
                )
            hosted.kept.local_id, hosted.kept.isolation = local.sandbox_id, local.isolation
            hosted.kept.write(self._records)
            self._runs(hosted, local)
        except TimeoutError:
            hosted.failed(f"it was not ready within {request.timeout:g} s")
        except (SandboxError, Problem, OSError) as e:
            hosted.failed(str(e))
        finally:
            hosted.settled.set()

    def _runs(self, hosted: Hosted, local: LocalSandbox) -> None:
        hosted.local = local
        hosted.watched(local.holder_pid, self._died)
        hosted.settled.set()

    def _died(self, hosted: Hosted) -> None:
        hosted.unwatch()
        hosted.failed("its first process died, or was killed")

    # ---- find --------------------------------------------------------------------------------------------------
    def find(self, sandbox_id: str) -> Hosted:
        """A sandbox by its id, which counts as a call that names it; `Problem` if there is none."""
        hosted = self.hosted.get(sandbox_id)
        if hosted is None or hosted.deleting is not None:
            raise Problem("unknown", f"sandbox {sandbox_id} is unknown here: never created, deleted, or expired")
        hosted.used_at = time.time()
        if (parent := hosted.request.companion_of) in self.hosted:
            self.hosted[parent].used_at = hosted.used_at
        return hosted

    async def running(self, sandbox_id: str) -> LocalSandbox:
        """A sandbox that can be used; one that still starts is waited for. `Problem`."""
        hosted = self.find(sandbox_id)
        if not hosted.settled.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(hosted.settled.wait(), _READY_SECONDS)
        return hosted.ready()

    # ---- time to live ------------------------------------------------------------------------------------------
    def heartbeat(self, hosted: Hosted, ttl: float | None) -> None:
        """Renew the time to live, and set it if one is given."""
        changed = not hosted.kept.heartbeat or (ttl is not None and ttl != hosted.kept.ttl)
        hosted.kept.heartbeat = True
        if ttl is not None:
            hosted.kept.ttl = ttl
        if changed:
            hosted.kept.write(self._records)
            self._arm(hosted)

    def _arm(self, hosted: Hosted) -> None:
        if hosted.timer is not None:
            hosted.timer.cancel()
        left = max(0.05, hosted.used_at + hosted.kept.ttl - time.time())
        # A timer of libuv's holds some weeks at most.
        hosted.timer = asyncio.get_running_loop().call_later(min(left, 86400.0), self._expire, hosted)

    def _expire(self, hosted: Hosted) -> None:
        """Delete a sandbox whose time is over, with nobody left to name it."""
        if not hosted.kept.heartbeat and self.jobs.busy(hosted.sandbox_id):
            hosted.used_at = time.time()
        companions = [self.hosted[c] for c in hosted.companions if c in self.hosted]
        hosted.used_at = max([hosted.used_at, *(c.used_at for c in companions)])
        if hosted.request.companion_of in self.hosted or time.time() < hosted.used_at + hosted.kept.ttl:
            self._arm(hosted)
        else:
            self.deletion(hosted)

    def save(self, hosted: Hosted) -> None:
        """Write down what has changed of a sandbox."""
        hosted.kept.write(self._records)

    # ---- delete ------------------------------------------------------------------------------------------------
    async def delete(self, sandbox_id: str) -> None:
        """Delete a sandbox and its companions; return when nothing is left of them. An unknown one is none."""
        hosted = self.hosted.get(sandbox_id)
        if hosted is not None:
            await asyncio.shield(self.deletion(hosted))

    def deletion(self, hosted: Hosted) -> asyncio.Task[None]:
        """The task that deletes a sandbox; one, whoever asks."""
        if hosted.deleting is None:
            hosted.deleting = asyncio.get_running_loop().create_task(self._delete(hosted))
        return hosted.deleting

    async def _delete(self, hosted: Hosted) -> None:
        await asyncio.gather(*(self.delete(c) for c in hosted.companions))
        if hosted.creating is not None and not hosted.creating.done():
            hosted.creating.cancel()
            await asyncio.wait([hosted.creating])
        if hosted.timer is not None:
            hosted.timer.cancel()
        hosted.unwatch()
        for server in hosted.servers.values():
            server.close()
        local = None if hosted.kept.local_id is None else self.backend.sandboxes.get(hosted.kept.local_id)
        hosted.failed("it was deleted")
        if local is not None:
            await local.delete()
        await self.jobs.forget(hosted.sandbox_id)
        (self._records / f"{hosted.sandbox_id}.json").unlink(missing_ok=True)
        if hosted.kept.key is not None:
            self._keys.pop(hosted.kept.key, None)
        if (parent := hosted.request.companion_of) in self.hosted:
            self.hosted[parent].companions.discard(hosted.sandbox_id)
        self.hosted.pop(hosted.sandbox_id, None)

    # ---- restart and end ---------------------------------------------------------------------------------------
    async def recover(self) -> None:
        """Take in the sandboxes and jobs that an earlier server left, and remove what nobody knows."""
        found = []
        for path in self._records.glob("*.json"):
            try:
                hosted = Hosted(Kept.read(path))
            except (ValueError, TypeError):
                path.unlink()
                continue
            found.append(hosted)
        for hosted in sorted(found, key=lambda h: h.kept.created_at):  # a companion is younger
            self._know(hosted)
        await self._attach()
        self._reap()
        self.jobs.recover(self.hosted)
        for hosted in self.hosted.values():
            if not hosted.settled.is_set():  # it was being made: nobody has been told that it is ready
                self._begin(hosted)

    async def _attach(self) -> None:
        for hosted in self.hosted.values():
            kept = hosted.kept
            if kept.failure is not None:
                hosted.failed(kept.failure)
            elif kept.local_id is not None:
                try:
                    image = self.settings.image(hosted.request.image)
                    local = await self.backend.attach(
                        kept.local_id,
                        network=hosted.network.mode,
                        image=None if image is None else str(image),
                        limits=self._limits(hosted.request),
                        isolation=kept.isolation,
                    )
                    self._runs(hosted, local)
                except (SandboxError, Problem):
                    hosted.failed("it died while the server was away")

    def _reap(self) -> None:
        """Remove sandboxes of the backend that no record names: their server was killed while it made them."""
        for path in self.backend.root.glob("*.json"):
            if path.stem not in self.backend.sandboxes:
                with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                    discard(path, Label.read(path))
        for path in [*self.backend.root.glob("*.tmp"), *self._records.glob("*.tmp")]:
            path.unlink(missing_ok=True)

    async def close(self) -> None:
        """Delete everything and end the keeper."""
        await asyncio.gather(*(self.delete(i) for i in list(self.hosted)))
        self.jobs.close()
        await self.backend.close()
        for folder in (self._records, self.settings.state / "jobs", self.backend.root):
            with contextlib.suppress(OSError):
                Path.rmdir(folder)
