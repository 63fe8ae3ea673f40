"""The gate before every attempt: none starts while the policy server does not answer."""

from __future__ import annotations

import asyncio
import time

import aiohttp

from openforge.policy.lease import Endpoint, ServerError
from openforge.proxy import wire
from openforge.rollout.progress import Progress

ASK_SECONDS = 20.0
PAUSE = 0.5
GONE = "the policy server is gone; waiting for it"


class Gate:
    """Open until something puts the server in doubt; then shut until it samples a token again.

    Args:
        seconds: how long to wait for the server (server.start_seconds).
        progress: says that the shard waits.
    """

    def __init__(self, endpoint: Endpoint, seconds: float, progress: Progress) -> None:
        self._endpoint, self._seconds, self._progress = endpoint, seconds, progress
        self._doubt = False
        self._one = asyncio.Lock()

    def doubt(self, why: str = "") -> None:
        """Have the next attempt ask first: an episode came to nothing for want of the policy, or the keeper says so."""
        self._doubt = True

    async def passed(self) -> None:
        """Return when the server answers.

        Raises:
            ServerError: it does not within `seconds`.
        """
        async with self._one:
            begun = time.monotonic()
            while self._doubt:
                self._doubt = False
                problem = await self._ask()
                if problem is None:
                    continue  # unless it was put in doubt meanwhile
                self._doubt, self._progress.note = True, GONE
                if time.monotonic() - begun > self._seconds:
                    raise ServerError(
                        f"the policy server at {self._endpoint.base_url} has not answered for {self._seconds:g} s "
                        f"(server.start_seconds): {problem}"
                    )
                await asyncio.sleep(PAUSE)
            self._progress.note = None

    async def watch(self) -> None:
        """Follow what the server's keeper says, for ever.

        Raises:
            ServerError: the lease is lost.
        """
        if self._endpoint.link is not None:
            raise ServerError(await self._endpoint.link.listen(self.doubt))

    def progress(self) -> None:
        """An episode came to its end: the server's restarts so far were worth it."""
        if self._endpoint.link is not None:
            self._endpoint.link.progress()

    async def _ask(self) -> str | None:
        """None if the server samples a token, or at least reads the request; else what it does instead."""
        body = {"model": self._endpoint.model, "messages": [{"role": "user", "content": "."}], "max_tokens": 1}
        key = self._endpoint.api_key
        headers = {"authorization": f"Bearer {key}"} if key else {}
        timeout = aiohttp.ClientTimeout(total=ASK_SECONDS)
        problem: str | None = None
        # One replica is enough.
        for url in (self._endpoint.base_url, *self._endpoint.replicas):
            try:
                async with (
                    aiohttp.ClientSession(
                        timeout=timeout, headers=headers, trust_env=not wire.is_loopback(url)
                    ) as http,
                    http.post(f"{url}/chat/completions", json=body) as r,
                ):
                    if r.status < 500:
                        return None
                    problem = problem or f"status {r.status}"
            except (aiohttp.ClientError, OSError) as e:
                problem = problem or str(e) or f"no answer in {ASK_SECONDS:g} s"
        return problem
