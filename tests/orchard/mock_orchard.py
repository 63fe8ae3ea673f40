"""A MOCK of Microsoft's Orchard orchestrator and its in-pod agent, with the faults that were measured on them.

Kubernetes is what cannot run here. What a pod does is real: each is a bubblewrap sandbox of the local backend, in which
commands run and files lie. Its answers, and its faults, are those of Orchard 0.1.0:

- an exec runs again when it is submitted again, one at a time a sandbox and process of the orchestrator;
- a command's time-out kills the pod; exit code 124 is a time-out;
- `ready` stays true whatever becomes of the pod; files answer 400 after a start until somebody asked for the sandbox;
- a second create of an id answers 200 and spoils the record; DELETE answers 200 for anything; there is no list;
- after a restart with memory state everything is 404, with Redis a job that ran stays "running" for ever.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from openforge.sandboxes import LocalBackend, LocalSandbox, SandboxError, SandboxFileError

KEY = "test-key"
AGENT = "sleep 31536000"  # stands for the in-pod agent: whoever kills it has killed the pod


@dataclass
class Pod:
    """A record of the orchestrator and what runs behind it."""

    body: dict[str, Any]
    sandbox: LocalSandbox | None = None
    ready: bool = False
    status: str = "pending"
    message: str = ""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class MockOrchard:
    """The orchestrator. Faults are attributes that a test sets.

    Attributes:
        twice: every exec is carried out once more after its answer, as a late second submission is.
        at_once: every exec is carried out twice at the same time, as two replicas do.
        lose: how many of the next answers to execs are lost after the command ran.
        lose_creates: how many of the next answers to creates are lost.
        refusals: answers to the next creates, (status, headers, detail) each.
        start: what becomes of new pods: ready, pending, unschedulable or failed.
        requests: all that came, as (method, path).
        creates: bodies of the creates.
        heartbeats: ids that sent one.
        damage: how many of the next uploads lose their last byte.
    """

    def __init__(self, pods: LocalBackend) -> None:
        self._pods = pods
        self.records: dict[str, Pod] = {}
        self.jobs: dict[str, dict[str, Any]] = {}
        self.twice = self.at_once = False
        self.lose = self.lose_creates = self.damage = 0
        self.refusals: list[tuple[int, dict[str, str], str]] = []
        self.start = "ready"
        self.requests: list[tuple[str, str]] = []
        self.creates: list[dict[str, Any]] = []
        self.heartbeats: list[str] = []
        self._late: list[asyncio.Task[Any]] = []
        self._runner: web.AppRunner | None = None
        self._closing = asyncio.Event()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # ---- life ------------------------------------------------------------------------------------------------
    async def up(self) -> None:
        """Listen, at the same port as before if there was one."""
        app = web.Application(middlewares=[self._guard], client_max_size=1 << 30)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/resources", self._health),
                web.post("/sandboxes", self._create),
                web.get("/sandboxes/{id}", self._get),
                web.get("/sandboxes/{id}/wait", self._wait),
                web.delete("/sandboxes/{id}", self._delete),
                web.post("/sandboxes/{id}/heartbeat", self._heartbeat),
                web.post("/sandboxes/{id}/exec", self._exec),
                web.post("/sandboxes/{id}/files", self._upload),
                web.get("/sandboxes/{id}/files", self._download),
            ]
        )
        # No grace for connections: a restart breaks them all.
        self._runner = web.AppRunner(app, handler_cancellation=False, shutdown_timeout=0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def down(self) -> None:
        """Stop listening; pods live on."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def restart(self, *, redis: bool) -> None:
        """A new process of the orchestrator: what it held in memory is lost, and `ready` with it."""
        await self.down()
        if redis:
            for pod in self.records.values():
                pod.ready, pod.lock = False, asyncio.Lock()
        else:
            self.records, self.jobs = {}, {}
        await self.up()

    async def close(self) -> None:
        self._closing.set()
        await self.down()
        await self.late()

    async def late(self) -> None:
        """Until all late submissions have been carried out."""
        await asyncio.gather(*self._late, return_exceptions=True)

    async def kill_pod(self, sandbox_id: str) -> None:
        """The pod dies; its record says ready, and its status too."""
        pod = self.records[sandbox_id]
        assert pod.sandbox is not None
        await pod.sandbox.delete()

    # ---- the REST interface ------------------------------------------------------------------------------------
    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        self.requests.append((request.method, request.path))
        try:
            if request.path != "/health" and request.match_info.http_exception is None:
                key = request.headers.get("X-API-Key")
                if key != KEY:
                    return _error(401 if key is None else 403, "Invalid API key")
            return await handler(request)
        except web.HTTPException as e:
            return _error(e.status, e.reason)
        except (SandboxError, OSError) as e:
            return web.json_response({"error": "Internal server error", "detail": str(e)}, status=500)

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "healthy"})

    async def _create(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.creates.append(body)
        if self.refusals:
            status, headers, detail = self.refusals.pop(0)
            return web.json_response({"detail": detail}, status=status, headers=headers)
        pod = Pod(body, status=self.start, message="0/3 nodes are available" if self.start == "unschedulable" else "")
        old = self.records.get(body["sandbox_id"])
        self.records[body["sandbox_id"]] = pod
        if old is not None:
            pod.sandbox = old.sandbox
        elif self.start == "ready":
            pod.sandbox = await self._pods.create(body["sandbox_id"], network="none")
            await pod.sandbox.exec(f"setsid {AGENT} </dev/null >/dev/null 2>&1 &")
        if self.lose_creates:
            self.lose_creates -= 1
            _hang_up(request)
        return web.json_response({**body, "namespace": "sandbox-pods", "status": "pending"})

    def _pod(self, request: web.Request) -> Pod:
        found = self.records.get(request.match_info["id"])
        if found is None:
            raise web.HTTPNotFound(reason=f"Sandbox {request.match_info['id']} not found")
        return found

    def _state(self, request: web.Request, pod: Pod) -> web.Response:
        if pod.status == "ready":
            pod.ready = True
        state = {"sandbox_id": request.match_info["id"], "image": pod.body["image"], "ready": pod.ready}
        return web.json_response({**state, "status": pod.status, "status_message": pod.message})

    async def _get(self, request: web.Request) -> web.Response:
        return self._state(request, self._pod(request))

    async def _wait(self, request: web.Request) -> web.Response:
        pod = self._pod(request)
        if pod.status in ("pending", "unschedulable"):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), float(request.query["timeout"]))
            return _error(408, "Timeout waiting for pod")
        return self._state(request, pod)

    async def _delete(self, request: web.Request) -> web.Response:
        pod = self.records.pop(request.match_info["id"], None)
        if pod is not None and pod.sandbox is not None:
            await pod.sandbox.delete()
        return web.json_response({"status": "deleted", "sandbox_id": request.match_info["id"]})

    async def _heartbeat(self, request: web.Request) -> web.Response:
        self._pod(request)
        self.heartbeats.append(request.match_info["id"])
        return web.json_response({"status": "ok", "sandbox_id": request.match_info["id"]})

    async def _exec(self, request: web.Request) -> web.Response:
        pod, body = self._pod(request), await request.json()
        assert body["wait"], "the client asks for the result in one request"
        key = uuid.uuid4().hex[:8]
        job = {"job_id": key, "command": body["command"], "status": "running", "stdout": "", "stderr": ""}
        self.jobs[key] = {**job, "exit_code": None, "created_at": time.time(), "error": None}
        if self.at_once:
            other = Pod(pod.body, pod.sandbox)  # another process of the orchestrator has a lock of its own
            self._late.append(asyncio.create_task(self._carried_out(other, body)))
        self.jobs[key].update(await self._carried_out(pod, body))
        if self.twice:
            self._late.append(asyncio.create_task(self._carried_out(pod, body)))
        if self.lose:
            self.lose -= 1
            _hang_up(request)
        return web.json_response(self.jobs[key])

    async def _carried_out(self, pod: Pod, body: dict[str, Any]) -> dict[str, Any]:
        async with pod.lock:
            assert pod.sandbox is not None
            command = body["command"]
            if isinstance(command, list):
                command = " ".join(command)
            cwd = body.get("cwd") or "/workspace"
            env = {"AGENT_PORT": "9090", **(body.get("env") or {})}
            try:
                done = await pod.sandbox.exec(command, timeout=body["timeout_seconds"], cwd=cwd, env=env)
            except SandboxError:
                return {"status": "failed", "error": "int too large to convert to float"}
            if done.timed_out:
                await pod.sandbox.delete()
                pod.status = "failed"
                return {"status": "failed", "error": "int too large to convert to float"}
        texts = {"stdout": done.stdout.decode(errors="replace"), "stderr": done.stderr.decode(errors="replace")}
        error = "Command timed out" if done.exit_code == 124 else None
        status = "failed" if done.exit_code else "succeeded"
        return {**texts, "status": status, "exit_code": done.exit_code, "error": error}

    async def _upload(self, request: web.Request) -> web.Response:
        pod, body = self._pod(request), await request.json()
        if not pod.ready:
            return _error(400, "Sandbox is not ready")
        data = base64.b64decode(body["content"])  # without validation: what is wrong is dropped
        if self.damage:
            self.damage -= 1
            data = data[:-1]
        assert pod.sandbox is not None
        command = 'mkdir -p "$(dirname "$0")" && cat > "$0"'
        done = await pod.sandbox.exec(["bash", "-c", command, body["path"]], stdin=data)
        if done.exit_code != 0:
            return _error(500, done.stderr.decode())
        return web.json_response({"success": True, "path": body["path"], "size": len(data)})

    async def _download(self, request: web.Request) -> web.Response:
        pod = self._pod(request)
        if not pod.ready:
            return _error(400, "Sandbox is not ready")
        assert pod.sandbox is not None
        try:
            data = await pod.sandbox.download_content(request.query["path"])
        except SandboxFileError as e:
            return _error(404 if e.errno == errno.ENOENT else 500, str(e))
        content = base64.b64encode(data).decode()
        return web.json_response({"path": request.query["path"], "content": content, "size": len(data)})


def _hang_up(request: web.Request) -> None:
    """The answer is lost, and not what it is the answer to."""
    assert request.transport is not None
    request.transport.close()


def _error(status: int, detail: str) -> web.Response:
    return web.json_response({"detail": detail}, status=status)


@contextlib.asynccontextmanager
async def serving(pods: LocalBackend) -> AsyncIterator[MockOrchard]:
    mock = MockOrchard(pods)
    await mock.up()
    try:
        yield mock
    finally:
        await mock.close()
