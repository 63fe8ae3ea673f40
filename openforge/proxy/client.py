"""Start a recording proxy for a rollout job and drive it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from openforge.proxy.calls import Json
from openforge.proxy.control import door_of
from openforge.proxy.journal import whole
from openforge.proxy.public import IP, PORT, Public
from openforge.proxy.wire import Api

START_SECONDS = 60.0
STOP_SECONDS = 10.0


class ProxyError(RuntimeError):
    """The proxy did not start, died, or refused what it was told; one sentence says which."""


@dataclass(frozen=True)
class Summary:
    """What a closed session amounts to.

    Attributes:
        calls: answered calls in the journal, undelivered ones included.
        turns: answers whose body went out whole.
        prompt_tokens, response_tokens: sums over `calls`; None where an answer came without usage.
        budget_exhausted: a limit of turns or tokens was refused or cut an answer.
        policy_failed: why the policy server gave no answer; None if it always did.
        stored: the session's journal records as they are stored; see `records`.
    """

    calls: int
    turns: int
    prompt_tokens: int | None
    response_tokens: int | None
    budget_exhausted: bool
    policy_failed: str | None
    stored: list[Json]

    @property
    def records(self) -> list[Json]:
        """The session's whole records, for `lineage.call_rows`. Made anew each time: of a long episode they are many
        times what is stored."""
        return whole(self.stored)

    def conversation(self) -> list[Json]:
        """The messages of the main thread in the chat format, its last answer included.

        That is the last call that was offered tools, if any was: titles and summaries are not, and sub-agents are done
        before the agent that asked them. What a harness compacted is in it as the summary.
        """
        calls = [r for r in self.records if r["record"] == "call"]
        asked = [r for r in calls if r["tools"]] or calls
        if not asked:
            return []
        last = max(asked, key=lambda r: int(r["call"]))
        return [*last["messages"], *([last["response"]] if last["response"] else [])]


class Proxy:
    """A running proxy process; made by `start_proxy`."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        control: Path,
        ready: Json,
        own: Path | None,
        log: Path,
        public: Public | None = None,
    ) -> None:
        self.process, self.control, self.log, self.public = process, control, log, public
        self.pid: int = ready["pid"]
        self.port: int | None = ready["port"]
        self.journal = Path(ready["journal"])
        self._own = own
        # A stale kept-alive connection would look like a dead proxy.
        connector = aiohttp.UnixConnector(path=str(control), force_close=True)
        self._http = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=60))

    async def open_session(
        self,
        episode_id: str,
        *,
        secret: str,
        sampling: Mapping[str, Any],
        limits: Mapping[str, Any],
        deadline_seconds: float,
        policy_version: str,
        context_window: int,
        model: str | None = None,
        seed: int | None = None,
    ) -> None:
        """Open the session of one episode.

        Args:
            sampling: fields of tables.SAMPLING.
            limits: `turns` and `tokens`, each a number or None.
            deadline_seconds: seconds from now within which the policy server may be asked.
            seed: of the episode's sampling; None sends none upstream.
        """
        given = {
            "episode_id": episode_id,
            "secret": secret,
            # A row of the rollout table has NULL where nothing is set.
            "sampling": {k: v for k, v in sampling.items() if v is not None},
            "limits": {"turns": limits.get("turns"), "tokens": limits.get("tokens")},
            "deadline_seconds": deadline_seconds,
            "policy_version": policy_version,
            "context_window": context_window,
            "model": model,
            "seed": seed,
        }
        await self._ask("POST", "/sessions", given)

    async def close_session(self, episode_id: str, harness_exited: bool) -> Summary:
        """Seal a session. `harness_exited`: by itself, whatever its exit code; not when we killed it."""
        got = await self._ask("POST", f"/sessions/{episode_id}/close", {"harness_exited": harness_exited})
        return Summary(stored=got.pop("records"), **{k: got[k] for k in Summary.__dataclass_fields__ if k in got})

    async def session(self, episode_id: str) -> Json:
        """Figures of a session so far: the keys of Summary without records, and `closed`."""
        return await self._ask("GET", f"/sessions/{episode_id}")

    async def adopt(self, episode_id: str, listener: socket.socket) -> None:
        """Hand a listening TCP or UNIX socket over: the proxy serves the session on it until that closes.

        The caller still owns its own copy of the socket, and should close it.
        """
        await asyncio.to_thread(self._hand_over, episode_id, listener.fileno())

    def _hand_over(self, episode_id: str, fd: int) -> None:
        line = json.dumps({"episode_id": episode_id}).encode() + b"\n"
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
                door.settimeout(30)
                door.connect(str(door_of(self.control)))
                socket.send_fds(door, [line], [fd])
                reply = door.recv(4096)
        except OSError as e:
            raise ProxyError(f"the listener of session {episode_id} could not be handed over: {e}") from e
        if reply != b"ok\n":
            told = reply.decode(errors="replace").strip() or "no reply"
            raise ProxyError(f"the listener of session {episode_id} was not taken over: {told}")

    def public_url(self, episode_id: str) -> str:
        """The base URL of a session for a sandbox off this host, which is all that its `route` needs.

        Raises:
            ProxyError: the proxy was not started for such sandboxes.
        """
        if self.public is None:
            raise ProxyError(f"sandboxes off this host reach the proxy at {IP}:{PORT}, which are not set")
        return f"{self.public.url}/s/{episode_id}"

    @property
    def dead(self) -> bool:
        """Whether its process has ended."""
        return self.process.returncode is not None

    async def died(self) -> None:
        """Return when its process has ended."""
        await self.process.wait()

    async def stop(self) -> None:
        """End the process; its journal stays. Safe to call twice."""
        await self._http.close()
        if self.process.returncode is None:
            self.process.terminate()
            try:
                await asyncio.wait_for(self.process.wait(), STOP_SECONDS)
            except TimeoutError:
                self.process.kill()
                await self.process.wait()
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)

    async def _ask(self, method: str, path: str, body: Json | None = None) -> Json:
        if self._http.closed:
            raise ProxyError(f"the recording proxy (pid {self.pid}) is dead; its log is {self.log}")
        try:
            async with self._http.request(method, f"http://proxy{path}", json=body) as r:
                raw = await r.read()
        except (aiohttp.ClientError, OSError) as e:
            code = self.process.returncode
            state = "does not answer" if code is None else f"exited with code {code}"
            told = f"the recording proxy (pid {self.pid}) {state}: {e}; its log is {self.log}"
            raise ProxyError(told) from e
        if r.status >= 400:
            try:
                told = json.loads(raw)["error"]
            except (ValueError, KeyError, TypeError):
                told = raw.decode(errors="replace")
            raise ProxyError(f"the recording proxy refused {method} {path}: {told}")
        got: Json = json.loads(raw)
        return got


class KeptProxy:
    """The proxy of a rollout job, started again by whoever asks for it when it is dead."""

    def __init__(self, start: Callable[[], Awaitable[Proxy]]) -> None:
        self._start = start
        self._proxy: Proxy | None = None
        self._starting = asyncio.Lock()

    async def get(self) -> Proxy:
        """A living proxy.

        Raises:
            ProxyError: none can be started.
        """
        async with self._starting:
            if self._proxy is not None and self._proxy.dead:
                await self.stop()
            if self._proxy is None:
                self._proxy = await self._start()
            return self._proxy

    async def stop(self) -> None:
        if self._proxy is not None:
            await self._proxy.stop()
            self._proxy = None


async def start_proxy(
    upstream: str | Sequence[str],
    journal: Path,
    *,
    upstream_key: str | None = None,
    api: Api = "vllm",
    model: str = "policy",
    control: Path | None = None,
    port: int | None = None,
    public: Public | None = None,
    fsync_seconds: float | None = None,
    status_seconds: float | None = None,
    alive_seconds: float | None = None,
    patience_seconds: float | None = None,
    probe_seconds: float | None = None,
) -> Proxy:
    """Start `python -m openforge.proxy` and wait until it listens. It ends with this process.

    Args:
        upstream: OpenAI base URL of the policy server, or of each of its replicas.
        api: which fields it takes; see `wire`.
        journal: folder of the journal and of proxy.log.
        control: path of the control socket; a private folder of its own without one.
        port: also serve on 127.0.0.1:port (0: a free one, see `Proxy.port`).
        public: also serve where sandboxes off this host arrive (see `public.from_environment`), instead of `port`.

    Raises:
        ProxyError: it ended, or did not listen, within `START_SECONDS`; the sentence holds its last words.
    """
    own = Path(tempfile.mkdtemp(prefix="openforge-proxy-")) if control is None else None
    at = own / "control" if control is None and own is not None else control
    assert at is not None
    options = {
        "--api": api,
        "--model": model,
        "--journal": journal,
        "--control": at,
        "--port": port if public is None else public.port,
        "--host": None if public is None else public.host,
        "--tls-cert": public.tls[0] if public is not None and public.tls is not None else None,
        "--tls-key": public.tls[1] if public is not None and public.tls is not None else None,
        "--fsync": fsync_seconds,
        "--status-seconds": status_seconds,
        "--alive-seconds": alive_seconds,
        "--patience-seconds": patience_seconds,
        "--probe-seconds": probe_seconds,
        "--parent": os.getpid(),
    }
    command = [sys.executable, "-m", "openforge.proxy"]
    command += [w for url in ([upstream] if isinstance(upstream, str) else upstream) for w in ("--upstream", url)]
    command += [str(w) for k, v in options.items() if v is not None for w in (k, v)]
    # The key goes by the environment: a command line can be read by every process of the machine.
    env = os.environ | ({"OPENFORGE_UPSTREAM_KEY": upstream_key} if upstream_key else {})
    journal.mkdir(parents=True, exist_ok=True)
    log = journal / "proxy.log"
    with open(log, "ab") as err:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=err, env=env
        )
    assert process.stdout is not None
    try:
        # The line comes, or the pipe ends with the process: no guess at how long a start takes.
        line = await asyncio.wait_for(process.stdout.readline(), START_SECONDS)
        return Proxy(process, at, json.loads(line), own, log, public)
    except (TimeoutError, ValueError) as e:
        # Not where the pipe has ended: to kill a process that has just exited by itself loses its exit code, which
        # Popen then takes before asyncio's watcher does.
        if isinstance(e, TimeoutError):
            process.kill()
        code = await process.wait()
        if own is not None:
            shutil.rmtree(own, ignore_errors=True)
        words = log.read_text(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        raise ProxyError(f"the recording proxy did not start (exit code {code}): {words[0]}") from None
