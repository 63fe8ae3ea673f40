"""The way from sandboxes of another machine to a shard's proxy: where it listens, and whether it can be reached."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Any, Protocol

from openforge.config_sandbox import image_of
from openforge.harnesses.base import path_with_python, python_binds
from openforge.proxy import wire
from openforge.proxy.client import Proxy, ProxyError
from openforge.proxy.public import IP, PORT, Public, PublicError, candidates
from openforge.sandboxes import Backend
from openforge.sandboxes.join import BASE_ENV
from openforge.sandboxes.waiting import when_free

ASK_SECONDS = 60.0
# The proxy's own refusal of an episode that it does not know.
_ANSWER = "there is no session"
_ASK = """\
import sys, urllib.error, urllib.request
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
try:
    answer = opener.open(sys.argv[1] + "/api/hello", timeout=30)
except urllib.error.HTTPError as e:
    answer = e
print(answer.status, answer.read(4096).decode(errors="replace"))
"""


class Unreachable(RuntimeError):
    """Sandboxes cannot reach the proxy; one sentence that says what to set."""


class Start(Protocol):
    """Starts a proxy: on `public`, or else on 127.0.0.1:`port` (0 is a free one), or without any port."""

    def __call__(self, *, public: Public | None = None, port: int | None = None) -> Awaitable[Proxy]: ...


async def start(starter: Start, server: str | None, env: Mapping[str, str] = os.environ) -> Proxy:
    """A proxy that sandboxes can reach.

    Args:
        server: URL of the sandboxes' server; None for sandboxes of this machine, which need no address.

    Raises:
        Unreachable: the variables that say where are missing, wrong, or name ports that are all taken.
        ProxyError: it did not start.
    """
    if server is None:
        return await starter()
    try:
        found = candidates(env)
    except PublicError as e:
        raise Unreachable(str(e)) from None
    if not found:
        if not wire.is_loopback(server):
            raise Unreachable(
                f"the sandboxes of {server} are on another machine, and nothing says where they reach the proxy: set "
                f"{IP} and {PORT} (docs/remote-sandboxes.md)"
            )
        proxy = await starter(port=0)
        proxy.public = Public(f"http://127.0.0.1:{proxy.port}", "127.0.0.1", int(proxy.port or 0))
        return proxy
    for public in found:
        try:
            return await starter(public=public)
        except ProxyError:
            if not _taken(public):
                raise
    ports = ", ".join(str(p.port) for p in found)
    raise Unreachable(
        f"the proxy can listen on none of the ports {ports}, which are taken: each shard of this machine needs one of "
        f"its own, and {PORT} may be a range such as 8443-8450 (docs/remote-sandboxes.md)"
    )


def _taken(public: Public) -> bool:
    family = socket.AF_INET6 if ":" in public.host else socket.AF_INET
    try:
        socket.create_server((public.host, public.port), family=family).close()
    except OSError:
        return True
    return False


async def check(backend: Backend, proxy: Proxy, row: Mapping[str, Any], root: Path) -> None:
    """Ask the proxy from inside a sandbox like those of a rollout row, before any episode does.

    Raises:
        Unreachable: it does not answer there.
        SandboxError: the sandbox could not be made.
    """
    if row["network"] == "none":
        return
    name, image = f"reach-{secrets.token_hex(4)}", image_of(row, root)
    sandbox = await when_free(lambda: backend.create(name, network=row["network"], image=image, binds=python_binds()))
    try:
        url = await sandbox.route(proxy)
        env = {**BASE_ENV, "PATH": path_with_python()}
        done = await sandbox.exec(["python3", "-I", "-c", _ASK, url], timeout=ASK_SECONDS, cwd="/", env=env)
        if _ANSWER in done.stdout.decode(errors="replace"):
            return
        lines = (done.stdout + done.stderr).decode(errors="replace").strip().splitlines()
        told = lines[-1][-200:] if lines else f"no answer in {ASK_SECONDS:g} s"
        raise Unreachable(
            f"a sandbox cannot reach the recording proxy at {proxy.public_url(name)} ({told}): set {IP} and {PORT} to "
            "an address that sandboxes reach (docs/remote-sandboxes.md), or have the sandboxes' server allow it"
        )
    finally:
        await sandbox.delete()
