"""The mock services of an episode: processes in a companion sandbox, which the agent cannot reach.

What a service holds is evidence, so it is made where the agent is not: the agent's calls come through the gateway.
Readiness is honest: a port that answers before its service was started is an error, and a service must be alive when it
counts as ready. What befalls a service is infrastructure: an error, never a reward of 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

from openforge.environments.claw_eval import inside
from openforge.environments.claw_eval.setup import Service
from openforge.harnesses.base import path_with_python
from openforge.sandboxes.join import BASE_ENV
from openforge.sandboxes.protocol import ExecResult, Sandbox, SandboxError, SandboxFileError, SandboxLost

POLL_SECONDS = 0.02  # between two looks at a service that is starting; doubled each time, up to
POLL_MOST = 0.25
ASK_SECONDS = 30.0  # for a reset or an audit
# Published services take 1.5 to 3 s to start on an idle machine, and their tasks allow 10: a rollout keeps every core
# busy, and a slow start is no reason to lose an episode.
READY_LEAST = 60.0
TAIL = 300  # characters of a service's log in a message


class Services:
    """The services of one episode in their sandbox.

    Args:
        sandbox: the companion, which shows what they run on.
        cwd: folder inside that they start in.
        path: folder put before the others on PATH, the one with the Python that the services need; None for none.
    """

    def __init__(self, sandbox: Sandbox, services: Sequence[Service], cwd: str, path: str | None = None) -> None:
        self.sandbox = sandbox
        self._services = services
        self._cwd = cwd
        self._path = path
        self._running: dict[str, asyncio.Task[ExecResult]] = {}

    # ---- start -------------------------------------------------------------------------------------------------
    async def start(self) -> None:
        """Start every service, wait until all are ready, and reset those that can be.

        Raises:
            SandboxError: a port answers already, or a service ended or was not ready in time.
        """
        for service in self._services:
            await self._port_is_free(service)
        for service in self._services:
            self._running[service.name] = asyncio.create_task(self._run(service))
        try:
            async with asyncio.TaskGroup() as group:
                for service in self._services:
                    group.create_task(self._ready(service, max(service.ready_timeout, READY_LEAST)))
        except ExceptionGroup as e:
            raise e.exceptions[0] from None
        for service in self._services:
            # One that came too late for its port may only now have noticed: another answered in its place.
            await self._is_alive(service, "before it was ready")
            if service.reset_endpoint is not None:
                await self._reset(service, service.reset_endpoint)

    async def _port_is_free(self, service: Service) -> None:
        try:
            connection = await self.sandbox.connect(service.port)
        except ConnectionRefusedError:
            return
        connection.close()
        raise SandboxError(
            f"service {service.name!r}: port {service.port} answers before the service was started; "
            "no two services may have one port"
        )

    async def _run(self, service: Service) -> ExecResult:
        path = path_with_python() if self._path is None else f"{self._path}:{path_with_python()}"
        env = {**BASE_ENV, "PATH": path, "PORT": str(service.port), "PYTHONDONTWRITEBYTECODE": "1"}
        # To a file: what it printed is asked for while it runs, too.
        command = f"exec >{_log(service)} 2>&1\n{service.command}"
        return await self.sandbox.exec(command, cwd=self._cwd, env={**env, **service.env})

    async def _ready(self, service: Service, seconds: float) -> None:
        why, pause = "it was not asked", POLL_SECONDS
        try:
            async with asyncio.timeout(seconds):
                while True:
                    try:
                        method, url = service.health_check_method, service.health_check
                        body = b"{}" if method == "POST" else None
                        status, _ = await inside.request(self.sandbox, method, url, body, ASK_SECONDS)
                        why = f"its health check answers {status}"
                    except inside.Unreachable as e:
                        status, why = None, str(e)
                    await self._is_alive(service, "before it was ready")
                    # Any answer below 500 is one of a server that is up: some have no health check, and answer 404.
                    if status is not None and status < 500:
                        return
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, POLL_MOST)
        except TimeoutError:
            said = await self._said(service)
            raise SandboxError(f"service {service.name!r} was not ready in {seconds:g} s: {why}{said}") from None

    async def _reset(self, service: Service, url: str) -> None:
        try:
            status, body = await inside.request(self.sandbox, "POST", url, b"{}", ASK_SECONDS)
            problem = None if status < 400 else f"it answered {status}: {body[:TAIL].decode(errors='replace')}"
        except inside.Unreachable as e:
            problem = str(e)
        if problem is not None:
            raise SandboxError(f"service {service.name!r} could not be reset at {url}: {problem}")

    # ---- use ---------------------------------------------------------------------------------------------------
    async def call(self, method: str, url: str, arguments: Mapping[str, Any], seconds: float) -> tuple[int, bytes]:
        """Send a tool's arguments to an endpoint, as JSON or, by GET, as the query.

        Raises:
            Unreachable: no answer.
        """
        if method != "GET":
            return await inside.request(self.sandbox, method, url, json.dumps(arguments).encode(), seconds)
        parts = urllib.parse.urlsplit(url)
        pairs = [(k, v if isinstance(v, str) else json.dumps(v)) for k, v in arguments.items()]
        query = "&".join(filter(None, (parts.query, urllib.parse.urlencode(pairs))))
        return await inside.request(self.sandbox, method, parts._replace(query=query).geturl(), None, seconds)

    async def audit(self) -> dict[str, Any]:
        """What was done to each service that can be reset, as it says itself, by its name.

        Published runs ask the same services, so that graders see the same.

        Raises:
            SandboxLost: a service died under the episode, or gives no audit for want of an answer.
        """
        found = {}
        for service in self._services:
            await self._is_alive(service, "during the episode", SandboxLost)
            url = audit_url(service)
            if url is None:
                continue
            try:
                status, body = await inside.request(self.sandbox, "GET", url, None, ASK_SECONDS)
            except inside.Unreachable as e:
                said = await self._said(service)
                raise SandboxLost(f"service {service.name!r} gives no audit at {url}: {e}{said}") from None
            try:
                found[service.name] = json.loads(body) if status < 400 else None
            except ValueError:
                found[service.name] = None
            if not isinstance(found[service.name], dict):
                raise SandboxLost(f"service {service.name!r} gives no audit at {url}: {status}, {body[:TAIL]!r}")
        return found

    async def stop(self) -> None:
        """End the services and their sandbox."""
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        await self.sandbox.delete()

    # ---- state -------------------------------------------------------------------------------------------------
    async def _is_alive(self, service: Service, when: str, kind: type[SandboxError] = SandboxError) -> None:
        task = self._running[service.name]
        if not task.done():
            return
        code = task.result().exit_code
        said = await self._said(service)
        raise kind(f"service {service.name!r} ended with exit code {code} {when}{said}")

    async def _said(self, service: Service) -> str:
        """The end of what a service printed, for a message."""
        with contextlib.suppress(SandboxFileError):
            text = (await self.sandbox.download_content(_log(service))).decode(errors="replace").strip()
            if text:
                return f"; it said: {text[-TAIL:]}"
        return "; it printed nothing"


def audit_url(service: Service) -> str | None:
    """Where a service tells what was done to it: beside its reset; None for one without."""
    if service.reset_endpoint is None:
        return None
    return service.reset_endpoint.rsplit("/reset", 1)[0] + "/audit"


def _log(service: Service) -> str:
    return f"/tmp/service-{service.port}.log"
