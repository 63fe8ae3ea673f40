"""Sandboxes at an Orchard service: Microsoft's, on Kubernetes, or `openforge sandboxes serve`."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from openforge.sandboxes.orchard import binds as copies
from openforge.sandboxes.orchard import starting
from openforge.sandboxes.orchard.extended import Extended
from openforge.sandboxes.orchard.ledger import Ledger, name
from openforge.sandboxes.orchard.plain import Plain
from openforge.sandboxes.orchard.sandbox import OrchardSandbox
from openforge.sandboxes.orchard.service import Service
from openforge.sandboxes.orchard.starting import Options
from openforge.sandboxes.owner import Owner
from openforge.sandboxes.protocol import Bind, Limits, Network, SandboxError

URL, KEY = "SANDBOX_BASE_URL", "SANDBOX_API_KEY"


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
        self._ledger = Ledger(root, run, owner)
        self._packer = copies.Packer()
        self._packing = asyncio.Lock()
        self._offers: dict[str, Any] | None = None
        self._asking = asyncio.Lock()

    async def capabilities(self) -> dict[str, Any]:
        """What the service offers beyond Orchard's REST (`wire.Capabilities`); empty for Orchard itself.

        Raises:
            SandboxUnsupported: an episode may take longer than its sandbox lives.
            SandboxError: the service cannot be reached or refuses the key.
        """
        async with self._asking:
            if self._offers is None:
                response = await self.service.ask("GET", "/capabilities")
                found = response.json() if response.is_success else {}
                if not found:
                    starting.check_life(self.options, self.service.url)
                self._offers = found
            return self._offers

    async def create(
        self,
        episode_id: str,
        *,
        network: Network = "proxy",
        image: str | None = None,
        binds: Sequence[Bind] = (),
        limits: Limits | None = None,
    ) -> OrchardSandbox:
        """Start a sandbox; see `Backend.create`. A service that is full is asked again for `full_seconds`.

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
        offers, url = await self.capabilities(), self.service.url
        image, limits = image or self.options.image, limits or Limits()
        bound = [b for b in binds if starting.shared(b, offers.get("shares", ()))]
        if offers:
            body = starting.extended_body(offers, url, network, image, bound, limits)
            body |= {"labels": self._labels(episode_id), "companion_of": companion_of}
        else:
            body = starting.plain_body(self.options, url, network, image)
        body |= {"timeout": int(self.options.create_seconds)}
        body |= {k: v for k in ("cpu", "memory") if (v := getattr(self.options, k)) is not None}
        archives = [(b, await self._packed(b)) for b in binds if b not in bound]
        sandbox_id = name(self.run, episode_id)
        self._ledger.add(sandbox_id, episode_id)
        try:
            await starting.post(self.service, self.options, sandbox_id, body)
            state = await starting.ready(self.service, self.options, sandbox_id)
            inside = (Extended if offers else Plain)(self.service, sandbox_id)
            isolation = state.get("isolation", "")
            if archives or not offers:
                found = await inside.start([copies.marker(b, a.digest) for b, a in archives])
                for bind, archive in archives:
                    if copies.marker(bind, archive.digest) not in found["markers"]:
                        await inside.unpack(archive.data, copies.inside(bind))
                isolation = isolation or starting.plain_isolation(self.options, network, image, found)
        except BaseException:
            await asyncio.shield(self.forget(sandbox_id))
            raise
        sandbox = OrchardSandbox(self, sandbox_id, episode_id, network, limits, isolation, inside)
        self.sandboxes[sandbox_id] = sandbox
        return sandbox

    def _labels(self, episode_id: str) -> dict[str, str]:
        return {"run": self.run, "episode": episode_id, "owner": json.dumps(asdict(self.owner))}

    async def _packed(self, bind: Bind) -> copies.Archive:
        async with self._packing:
            return await asyncio.to_thread(self._packer.pack, bind.host)

    async def forget(self, sandbox_id: str) -> None:
        """Delete a sandbox at the service; its id stays written down while that fails."""
        await self.service.ask("DELETE", f"/sandboxes/{sandbox_id}")
        self._ledger.remove(sandbox_id)
        self.sandboxes.pop(sandbox_id, None)

    async def reap(self) -> list[str]:
        """Delete this run's sandboxes whose owner, on this machine, is dead; returns their ids.

        They are those written down here and, on our own server, also those that it lists under the run.
        """
        found = set(self._ledger.orphans())
        if await self.capabilities():
            response = await self.service.ask("GET", "/sandboxes", params={"label": f"run={self.run}"})
            for sandbox in response.json()["sandboxes"]:
                owner = sandbox["labels"].get("owner")  # of our backends, and not of others who use the same label
                if owner is not None and not Owner(**json.loads(owner)).alive():
                    found.add(sandbox["sandbox_id"])
        for sandbox_id in found:
            await self.forget(sandbox_id)
        return sorted(found)

    async def close(self) -> None:
        """Delete every sandbox that is left; whatever cannot be is tried, and then said."""
        sandboxes = list(self.sandboxes.values())
        ends = await asyncio.gather(*(s.delete() for s in sandboxes), return_exceptions=True)
        await self.service.close()
        for end in ends:
            if end is not None:
                raise end

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
