"""Sandboxes at an Orchard service: Microsoft's, on Kubernetes, or `openforge sandboxes serve`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from openforge.sandboxes.orchard import binds as copies
from openforge.sandboxes.orchard import ledger
from openforge.sandboxes.orchard.plain import Plain
from openforge.sandboxes.orchard.sandbox import OrchardSandbox
from openforge.sandboxes.orchard.service import PATIENCE, Again, Service, retry_after, said
from openforge.sandboxes.owner import Owner
from openforge.sandboxes.protocol import (
    Bind,
    Limits,
    Network,
    SandboxError,
    SandboxFull,
    SandboxUnsupported,
)

URL, KEY = "SANDBOX_BASE_URL", "SANDBOX_API_KEY"
_WAIT = 60.0  # seconds of one question whether a sandbox is ready
_BUSY_WAIT = 5.0  # seconds between tries for a place, where the service names none


@dataclass(frozen=True)
class Options:
    """How sandboxes are made.

    Attributes:
        image: container image where an episode names none; our own server needs none.
        cpu: processors a sandbox, "500m" or "4"; None is the service's default.
        memory: memory a sandbox, "16Gi"; None is the service's default.
        ttl_seconds: the service deletes sandboxes at this age (SANDBOX_TTL_HOURS); our own server renews it.
        episode_seconds: how long an episode may take; one beyond the time to live is refused.
        network_policy: the cluster has the NetworkPolicy of docs/connect-orchard.md, so network `proxy` can be had.
        create_seconds: from the request to a sandbox that runs commands.
        full_seconds: to go on asking a service that has no room.
        patience: to go on asking a service, or a sandbox, that does not answer.
    """

    image: str | None = None
    cpu: str | None = None
    memory: str | None = None
    ttl_seconds: float = 7200.0
    episode_seconds: float | None = None
    network_policy: bool = False
    create_seconds: float = 900.0
    full_seconds: float = 600.0
    patience: float = PATIENCE


class OrchardBackend:
    """Makes sandboxes at the service of `url` and `key`, which default to SANDBOX_BASE_URL and SANDBOX_API_KEY.

    Args:
        root: folder in which the ids of living sandboxes are written down.
        run: the run they belong to.
        owner: the process that they belong to.

    Raises:
        SandboxError: no address, or a bad one.
    """

    def __init__(
        self,
        root: Path,
        run: str,
        owner: Owner,
        *,
        url: str | None = None,
        key: str | None = None,
        options: Options | None = None,
    ) -> None:
        url = url or os.environ.get(URL)
        if not url:
            raise SandboxError(f"no sandbox service is named: set {URL} to its address")
        self.options = options or Options()
        self.run = run
        self.owner = owner
        self.service = Service(url, key or os.environ.get(KEY), self.options.patience)
        self.sandboxes: dict[str, OrchardSandbox] = {}
        self._ledger = ledger.Ledger(root, run, owner)
        self._packer = copies.Packer()
        self._capabilities: dict[str, Any] | None = None
        self._asked = asyncio.Lock()

    async def capabilities(self) -> dict[str, Any]:
        """What the service offers beyond Orchard's REST (`wire.Capabilities`); empty for Orchard itself.

        Raises:
            SandboxUnsupported: an episode may take longer than its sandbox lives.
            SandboxError: the service cannot be reached or refuses the key.
        """
        async with self._asked:
            if self._capabilities is None:
                response = await self.service.ask("GET", "/capabilities")
                found = response.json() if response.is_success else {}
                if not found:
                    await self.service.ask("GET", "/resources")  # the first path of Orchard's that asks for the key
                    self._check_life()
                self._capabilities = found
            return self._capabilities

    def _check_life(self) -> None:
        seconds, ttl = self.options.episode_seconds, self.options.ttl_seconds
        if seconds is not None and seconds > ttl:
            raise SandboxUnsupported(
                f"an episode may take {seconds:.0f} s, but {self.service.url} deletes a sandbox after {ttl:.0f} s: "
                "shorten the episode, or raise SANDBOX_TTL_HOURS there and the time to live here"
            )

    async def create(
        self,
        episode_id: str,
        *,
        network: Network = "proxy",
        image: str | None = None,
        binds: Sequence[Bind] = (),
        limits: Limits | None = None,
    ) -> OrchardSandbox:
        """Start a sandbox; see `Backend.create`. Where the service is full it is asked again for `full_seconds`.

        Raises:
            SandboxFull: there was no room all that time.
            SandboxUnsupported: the service does not offer this, as set up.
            SandboxError: it did not start; the message says why.
        """
        return await self.make(episode_id, network, image, binds, limits)

    async def make(
        self,
        episode_id: str,
        network: Network,
        image: str | None,
        binds: Sequence[Bind],
        limits: Limits | None,
        companion_of: str | None = None,
    ) -> OrchardSandbox:
        """`create`, also for companions."""
        await self.capabilities()
        image = image or self.options.image
        if image is None:
            raise SandboxUnsupported(f"{self.service.url} makes pods of a container image: name one in the config")
        if network == "proxy" and not self.options.network_policy:
            raise SandboxUnsupported(
                "network 'proxy' at an Orchard service takes the NetworkPolicy of docs/connect-orchard.md: install it "
                "and say so in the config (network_policy: true)"
            )
        archives = [(b, await asyncio.to_thread(self._packer.pack, b.host)) for b in binds]
        sandbox_id = ledger.name(self.run, episode_id)
        self._ledger.add(sandbox_id, episode_id)
        try:
            body = {
                "image": image,
                "sandbox_id": sandbox_id,
                "block_network": network != "open",
                "timeout": int(self.options.create_seconds),
                **{k: v for k, v in (("cpu", self.options.cpu), ("memory", self.options.memory)) if v is not None},
            }
            await self._post(sandbox_id, body)
            await self._ready(sandbox_id)
            inside = Plain(self.service, sandbox_id)
            found = await inside.start([copies.marker(b, a.digest) for b, a in archives])
            for bind, archive in archives:
                if copies.marker(bind, archive.digest) not in found["markers"]:
                    await inside.unpack(archive.data, copies.inside(bind))
        except BaseException:
            await asyncio.shield(self.forget(sandbox_id))
            raise
        how = "NetworkPolicy to the proxy" if self.options.network_policy else "no way out"
        isolation = (
            f"Orchard pod of {image}; {'egress open' if network == 'open' else how}; uid {found['uid']} inside; "
            f"Linux {found['kernel']}"
        )
        sandbox = OrchardSandbox(self, sandbox_id, episode_id, network, limits or Limits(), isolation, inside)
        self.sandboxes[sandbox_id] = sandbox
        return sandbox

    async def _post(self, sandbox_id: str, body: Mapping[str, Any]) -> None:
        """Have a sandbox made. Not by `ask`: on Orchard a second create of one id spoils the first, so after a lost
        answer it is looked whether there is one."""
        again = Again(self.options.full_seconds)
        while True:
            try:
                response = await self.service.once("POST", "/sandboxes", json=body)
            except httpx.TransportError:
                found = await self.service.ask("GET", f"/sandboxes/{sandbox_id}")
                if found.is_success:
                    return
                continue
            if self.service.refused(response).is_success:
                return
            if not _full(response):
                raise SandboxError(f"{self.service.url} makes no sandbox: {said(response)}")
            if not await again.wait(retry_after(response) or _BUSY_WAIT):
                raise SandboxFull(
                    f"{self.service.url} has had no room for another sandbox for {again.patience:.0f} s: "
                    f"{said(response)}",
                    retry_after(response) or _BUSY_WAIT,
                )

    async def _ready(self, sandbox_id: str) -> None:
        """Wait until a sandbox is ready. One that nothing can be scheduled for stays pending until our time is up."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self.options.create_seconds
        while (left := end - loop.time()) > 0:
            seconds = max(1, int(min(left, _WAIT)))
            response = await self.service.ask("GET", f"/sandboxes/{sandbox_id}/wait", params={"timeout": seconds})
            if response.status_code == 408:
                continue
            if not response.is_success:
                raise SandboxError(f"sandbox {sandbox_id} did not start: {said(response)}")
            state = response.json()
            if state["ready"] and state["status"] == "ready":
                return
            if state["status"] in ("failed", "not_found"):
                raise SandboxError(f"sandbox {sandbox_id} did not start: {state['status']} ({state['status_message']})")
            await asyncio.sleep(1)  # it should have waited
        state = (await self.service.ask("GET", f"/sandboxes/{sandbox_id}")).json()
        problem = f"{state.get('status')} ({state.get('status_message')})"
        if state.get("status") == "unschedulable":
            raise SandboxFull(f"sandbox {sandbox_id} found no place in {self.options.create_seconds:.0f} s: {problem}")
        raise SandboxError(f"sandbox {sandbox_id} was not ready in {self.options.create_seconds:.0f} s: {problem}")

    async def forget(self, sandbox_id: str) -> None:
        """Delete a sandbox at the service; its id stays written down while that fails."""
        await self.service.ask("DELETE", f"/sandboxes/{sandbox_id}")
        self._ledger.remove(sandbox_id)
        self.sandboxes.pop(sandbox_id, None)

    async def reap(self) -> list[str]:
        """Delete this run's sandboxes whose owner is dead; returns their ids."""
        return await ledger.reap(self._ledger.root, self.run, self.service)

    async def close(self) -> None:
        """Delete every sandbox that is left."""
        await asyncio.gather(*(s.delete() for s in list(self.sandboxes.values())))
        await self.service.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _full(response: httpx.Response) -> bool:
    """Whether there is no room now. Orchard hands on what Kubernetes says of a ResourceQuota as a 500."""
    return response.status_code in (429, 503) or "exceeded quota" in said(response)
