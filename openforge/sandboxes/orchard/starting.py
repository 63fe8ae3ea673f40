"""From the request for a sandbox to one that is ready: what each kind of service is asked and answers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from openforge.sandboxes.orchard.service import PATIENCE, Again, Service, retry_after, said
from openforge.sandboxes.protocol import (
    Bind,
    Limits,
    Network,
    SandboxError,
    SandboxFull,
    SandboxUnsupported,
)
from openforge.sandboxes.server.wire import IDEMPOTENCY_HEADER

_WAIT = 60.0  # seconds of one question whether a sandbox is ready
_BUSY_WAIT = 5.0  # seconds between tries for a place, where the service names none


@dataclass(frozen=True)
class Options:
    """How sandboxes are made.

    Attributes:
        image: container image where an episode names none; our own server needs none.
        cpu: processors a sandbox, "500m" or "4"; None is the service's default.
        memory: memory a sandbox, "16Gi"; None is the service's default.
        ttl_seconds: Orchard deletes sandboxes at this age (SANDBOX_TTL_HOURS); our own server renews it.
        episode_seconds: how long an episode may take; one beyond the time to live is refused.
        network_policy: the cluster has the NetworkPolicy of docs/connect-orchard.md, so network `proxy` can be had.
        create_seconds: from the request to a sandbox that is ready.
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


def check_life(options: Options, url: str) -> None:
    """Refuse episodes that outlive their sandbox at Orchard; `SandboxUnsupported`."""
    seconds, ttl = options.episode_seconds, options.ttl_seconds
    if seconds is not None and seconds > ttl:
        raise SandboxUnsupported(
            f"an episode may take {seconds:.0f} s, but {url} deletes a sandbox after {ttl:.0f} s: "
            "shorten the episode, or raise SANDBOX_TTL_HOURS there and the time to live here"
        )


def plain_body(options: Options, url: str, network: Network, image: str | None) -> dict[str, Any]:
    """What Orchard is asked.

    Both `none` and `proxy` are its blocked network: policies of Kubernetes add up, so that the one which lets all pods
    reach the proxy holds beside the one that denies the rest, and could take nothing from an open one.
    """
    if image is None:
        raise SandboxUnsupported(f"{url} makes pods of a container image: name one in the config")
    if network == "proxy" and not options.network_policy:
        raise SandboxUnsupported(
            "network 'proxy' at an Orchard service takes the NetworkPolicy of docs/connect-orchard.md: install it "
            "and say so in the config (network_policy: true)"
        )
    return {"image": image, "block_network": network != "open"}


def plain_isolation(options: Options, network: Network, image: str | None, found: Mapping[str, Any]) -> str:
    """What separates a pod, as far as it can be told from outside and inside."""
    egress = "egress open" if network == "open" else "egress denied"
    if network != "open" and options.network_policy:
        egress += " but to the proxy"
    return f"Orchard pod of {image}; {egress} by NetworkPolicy; uid {found['uid']} inside; Linux {found['kernel']}"


def extended_body(
    offers: Mapping[str, Any], url: str, network: Network, image: str | None, binds: Sequence[Bind], limits: Limits
) -> dict[str, Any]:
    """What our own server is asked; `binds` lie in its shares."""
    if network not in offers["networks"]:
        raise SandboxUnsupported(f"network {network!r} is not offered by {url}; it has {', '.join(offers['networks'])}")
    if image is not None and image != "host" and image not in offers["images"]:
        raise SandboxUnsupported(
            f"image {image!r} is not offered by {url}; it has {', '.join(['host', *offers['images']])}"
        )
    asked = {k: v for k, v in asdict(limits).items() if v is not None and v != getattr(Limits(), k)}
    return {
        "image": image,
        "network": {"mode": network},
        "binds": [{"host": str(b.host.absolute()), "inside": b.inside} for b in binds],
        "limits": asked,
    }


def shared(bind: Bind, shares: Sequence[str]) -> bool:
    """Whether a path lies in a folder that our own server shares, under the same name there."""
    host = bind.host.absolute()
    return any(host.is_relative_to(Path(share)) for share in shares)


async def post(service: Service, options: Options, sandbox_id: str, body: Mapping[str, Any]) -> None:
    """Have a sandbox made. Not by `ask`: on Orchard a second create of one id spoils the first, so after a lost answer
    it is looked whether there is one.

    Raises:
        SandboxFull: there was no room for `full_seconds`.
        SandboxError: it is refused.
    """
    again, headers = Again(options.full_seconds), {IDEMPOTENCY_HEADER: sandbox_id}
    while True:
        try:
            response = await service.once(
                "POST", "/sandboxes", json={**body, "sandbox_id": sandbox_id}, headers=headers
            )
        except httpx.TransportError:
            found = await service.ask("GET", f"/sandboxes/{sandbox_id}")
            if found.is_success:
                return
            continue
        if service.refused(response).is_success:
            return
        if not _full(response):
            raise SandboxError(f"{service.url} makes no sandbox: {said(response)}")
        if not await again.wait(retry_after(response) or _BUSY_WAIT):
            raise SandboxFull(
                f"{service.url} has had no room for another sandbox for {again.patience:.0f} s: {said(response)}",
                retry_after(response) or _BUSY_WAIT,
            )


def _full(response: httpx.Response) -> bool:
    """Whether there is no room now. Orchard hands on what Kubernetes says of a ResourceQuota as a 500."""
    return response.status_code in (429, 503) or "exceeded quota" in said(response)


async def ready(service: Service, options: Options, sandbox_id: str) -> dict[str, Any]:
    """The sandbox once it is ready. One that nothing can be scheduled for stays pending until our time is up.

    Raises:
        SandboxFull: no machine had room for it.
        SandboxError: it failed, or took too long.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + options.create_seconds
    state: dict[str, Any] = {}
    while (left := end - loop.time()) > 0:
        seconds = max(1, int(min(left, _WAIT)))
        response = await service.ask("GET", f"/sandboxes/{sandbox_id}/wait", params={"timeout": seconds})
        if response.status_code == 408:
            continue
        if not response.is_success:
            raise SandboxError(f"sandbox {sandbox_id} did not start: {said(response)}")
        state = response.json()
        if state["ready"] and state["status"] == "ready":
            return state
        if state["status"] in ("failed", "not_found"):
            raise SandboxError(f"sandbox {sandbox_id} did not start: {state['status']} ({state['status_message']})")
        await asyncio.sleep(1)  # it should have waited
    state = (await service.ask("GET", f"/sandboxes/{sandbox_id}")).json()
    problem = f"in {options.create_seconds:.0f} s: {state.get('status')} ({state.get('status_message')})"
    if state.get("status") == "unschedulable":
        raise SandboxFull(f"sandbox {sandbox_id} found no place {problem}", _BUSY_WAIT)
    raise SandboxError(f"sandbox {sandbox_id} was not ready {problem}")
