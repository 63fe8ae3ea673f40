"""Requests to an Orchard service: what is repeated, for how long, and what its answers mean."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx

from openforge.sandboxes.protocol import SandboxError, SandboxLost

PATIENCE = 120.0  # seconds that a service may be away (a restart, a pod that does not answer) before it is given up
_FIRST_WAIT, _LONGEST_WAIT = 0.25, 8.0
_AGAIN = {429, 500, 502, 503, 504}  # Orchard answers 500 for an agent that it cannot reach
_LOST = ("failed", "not_found")


class Service:
    """An Orchard service at `url`. Only what may safely arrive twice goes through `ask`, which repeats it.

    Args:
        url: SANDBOX_BASE_URL.
        key: SANDBOX_API_KEY; None sends none.
        patience: seconds to go on asking a service that does not answer, or not well.
    """

    def __init__(self, url: str, key: str | None, patience: float = PATIENCE) -> None:
        if not url.startswith(("http://", "https://")):
            raise SandboxError(f"SANDBOX_BASE_URL is {url!r}; it must be an http:// or https:// address")
        self.url = url.rstrip("/")
        self.key = key
        self.patience = patience
        headers = {} if key is None else {"X-API-Key": key}
        # No limit of connections: a wait is one connection each. No proxy of the environment: it may be the policy's.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        timeout = httpx.Timeout(90.0, connect=10.0)
        self._http = httpx.AsyncClient(
            base_url=self.url, headers=headers, limits=limits, timeout=timeout, trust_env=False
        )

    async def once(self, method: str, path: str, **options: Any) -> httpx.Response:
        """One request, its answer as it is; httpx.TransportError where there is none."""
        return await self._http.request(method, path, **options)

    async def ask(
        self, method: str, path: str, *, sandbox: str | None = None, patience: float | None = None, **options: Any
    ) -> httpx.Response:
        """A request that is repeated, with back-off, until the service has an answer.

        Args:
            sandbox: the sandbox it is about, whose state is asked for between tries.
            patience: seconds in place of the service's own.

        Returns:
            An answer with status 2xx, or 4xx that `refused` leaves to the caller: 400, 404, 408, 409, 413, 422.

        Raises:
            SandboxLost: the sandbox is gone, or nobody can reach it for the whole time.
            SandboxError: the service cannot be reached, is full, or refuses us.
        """
        again = Again(self.patience if patience is None else patience)
        while True:
            try:
                response = await self.once(method, path, **options)
            except httpx.TransportError as e:
                problem, wait = f"no answer from {self.url} ({type(e).__name__}: {e})", None
            else:
                if not _not_yet(response):
                    return self.refused(response)
                problem, wait = f"{self.url} answers {said(response)}", retry_after(response)
            if not await again.wait(wait):
                raise self._given_up(problem, sandbox, again.patience)
            if sandbox is not None:
                await self.alive(sandbox)

    def refused(self, response: httpx.Response) -> httpx.Response:
        """The answer, unless no later request could fare better."""
        if response.status_code == 401:
            raise SandboxError(f"{self.url} asks for a key: set SANDBOX_API_KEY")
        if response.status_code == 403 and code(response) != "forbidden":
            raise SandboxError(f"{self.url} does not know the key in SANDBOX_API_KEY ({said(response)})")
        if response.status_code in (403, 405):
            raise SandboxError(f"{self.url} answers {said(response)} to {response.request.url.path}")
        return response

    def _given_up(self, problem: str, sandbox: str | None, seconds: float) -> SandboxError:
        text = f"{problem}, for {seconds:.0f} s"
        return SandboxError(text) if sandbox is None else SandboxLost(f"sandbox {sandbox} does not answer: {text}")

    async def alive(self, sandbox: str) -> None:
        """Raise SandboxLost if the service says that a sandbox is gone; it also makes its files readable again, which
        Orchard refuses after a start until somebody has asked for the sandbox."""
        try:
            response = await self.once("GET", f"/sandboxes/{sandbox}")
        except httpx.TransportError:
            return
        if response.status_code == 404:
            raise SandboxLost(f"sandbox {sandbox} is gone: {said(response)}")
        if response.is_success:
            found = response.json()
            if found["status"] in _LOST:  # `ready` stays true whatever became of the pod
                raise SandboxLost(f"sandbox {sandbox} is gone: {found['status']} ({found['status_message']})")

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()


class Again:
    """Waits between tries: twice as long each, with some randomness, until the patience is used up."""

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self._end = asyncio.get_running_loop().time() + patience
        self._next = _FIRST_WAIT

    async def wait(self, seconds: float | None = None) -> bool:
        """Wait `seconds` if the service named them; False if there is no time left for another try."""
        left = self._end - asyncio.get_running_loop().time()
        if left <= 0:
            return False
        wait = self._next * random.uniform(0.75, 1.25) if seconds is None else seconds
        self._next = min(2 * self._next, _LONGEST_WAIT)
        await asyncio.sleep(min(wait, left))
        return True


def _not_yet(response: httpx.Response) -> bool:
    """Whether the same request may fare better later."""
    if response.status_code == 400:
        return "not ready" in said(response)
    return response.status_code in _AGAIN


def retry_after(response: httpx.Response) -> float | None:
    """Seconds of Retry-After, None without one (or with a date, which nobody here sends)."""
    value = response.headers.get("Retry-After", "")
    return float(value) if value.replace(".", "", 1).isdigit() else None


def code(response: httpx.Response) -> str | None:
    """The machine-readable kind of an error, where the service has one."""
    body = _body(response)
    return body.get("code") if isinstance(body, dict) else None


def said(response: httpx.Response) -> str:
    """Status and detail of an answer, on one line."""
    body = _body(response)
    detail = body.get("detail", body) if isinstance(body, dict) else body
    return " ".join(f"{response.status_code} {detail}".split())[:500]


def _body(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return response.text
