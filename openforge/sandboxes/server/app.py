"""The HTTP side: one handler a row of `wire`."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import json
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

import openforge
from openforge.sandboxes.job import OUTPUT_BYTES
from openforge.sandboxes.protocol import SandboxError
from openforge.sandboxes.server import bodies, machine, problems, pty, transfers, ways, wire
from openforge.sandboxes.server.host import Host
from openforge.sandboxes.server.problems import Problem
from openforge.sandboxes.server.record import Job

_BODY_BYTES = 2 * transfers.TRANSFER_BYTES  # base64 of the largest file, and some
_WAIT_SECONDS = 30.0  # beyond its own time limit, that an exec with wait is waited for
_OPEN = ("/", "/health")  # without a key
_log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def reply(data: Any, status: int = 200) -> web.Response:
    """A JSON answer."""
    return web.Response(body=json.dumps(data).encode(), status=status, content_type="application/json")


def said(problem: Problem) -> web.Response:
    """A problem as an answer."""
    response = reply({"detail": problem.detail, "code": problem.code}, problem.status)
    if problem.retry_after is not None:
        response.headers["Retry-After"] = str(problem.retry_after)
    return response


class Api:
    """The handlers over a host."""

    def __init__(self, host: Host) -> None:
        self.host = host

    def application(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(middlewares=[self._outermost], client_max_size=_BODY_BYTES)
        one, add = "/sandboxes/{id}", app.router.add_route
        for method, path, handler in (
            ("GET", "/", self.root),
            ("GET", "/health", self.health),
            ("GET", "/capabilities", self.capabilities),
            ("GET", "/resources", self.resources),
            ("POST", "/sandboxes", self.create),
            ("GET", "/sandboxes", self.listing),
            ("GET", one, self.get),
            ("DELETE", one, self.delete),
            ("GET", one + "/wait", self.wait),
            ("POST", one + "/heartbeat", self.heartbeat),
            ("POST", one + "/exec", self.execute),
            ("GET", one + "/exec/pty", self.pty),
            ("POST", one + "/end_processes", self.end_processes),
            ("POST", one + "/apply_patch", self.apply_patch),
            ("POST", one + "/files", self.upload),
            ("GET", one + "/files", self.download),
            ("PUT", one + "/files/raw", self.upload_raw),
            ("GET", one + "/files/raw", self.download_raw),
            ("GET", one + "/files/list", self.files),
            ("POST", one + "/routes", self.add_route),
            ("GET", one + "/routes", self.routes),
            ("DELETE", one + "/routes/{port}", self.delete_route),
            ("GET", one + "/ports/{port}", self.port),
            ("GET", "/jobs/{job}", self.job),
            ("GET", "/jobs/{job}/wait", self.wait_job),
            ("DELETE", "/jobs/{job}", self.cancel_job),
        ):
            add(method, path, handler)
        return app

    # ---- every request -----------------------------------------------------------------------------------------
    @web.middleware
    async def _outermost(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        request_id = str(uuid.uuid4())
        try:
            refused = self._refusal(request)
            if refused is not None and not request.path.endswith("/exec/pty"):
                raise refused
            request["refused"] = refused
            response = await handler(request)
        except Problem as e:
            response = said(e)
        except SandboxError as e:
            response = said(problems.of(e))
        except web.HTTPException as e:
            code = {404: "unknown", 413: "too_large"}.get(e.status, "invalid")
            response = reply({"detail": e.reason, "code": code}, e.status)
        except (ConnectionError, asyncio.CancelledError):
            raise
        except OSError as e:
            if e.errno not in problems.FULL:
                response = self._failed(request, request_id, e)
            else:
                response = said(Problem("disk_full", f"the server's disk is full: {self.host.settings.state}"))
        except Exception as e:
            response = self._failed(request, request_id, e)
        if not response.prepared:
            response.headers["X-Request-ID"] = request_id
        return response

    def _failed(self, request: web.Request, request_id: str, error: Exception) -> web.Response:
        _log.error("request %s failed: %s %s", request_id, request.method, request.path, exc_info=error)
        told = {"error": "Internal server error", "detail": str(error), "request_id": request_id, "code": "internal"}
        return reply(told, 500)

    def _refusal(self, request: web.Request) -> Problem | None:
        keys = self.host.settings.keys
        if not keys or request.path in _OPEN:
            return None
        given = request.headers.get(wire.KEY_HEADER)
        if given is None and request.headers.get("Upgrade", "").lower() == "websocket":
            given = request.query.get("api_key")
            for protocol in request.headers.get("Sec-WebSocket-Protocol", "").split(","):
                if protocol.strip().startswith("api_key."):
                    given = protocol.strip().removeprefix("api_key.")
        if not given:
            return Problem("unauthorized", f"no API key: send it as {wire.KEY_HEADER}")
        if not any(hmac.compare_digest(given.encode(), key.encode()) for key in keys):
            return Problem("forbidden", "this API key is not one of this server's")
        return None

    # ---- the server --------------------------------------------------------------------------------------------
    async def root(self, request: web.Request) -> web.Response:
        told = {"service": "openforge-sandboxes", "version": openforge.__version__, "status": "running"}
        return reply({**told, "capabilities": self._capabilities()})

    async def health(self, request: web.Request) -> web.Response:
        return reply({"status": "healthy"})

    async def capabilities(self, request: web.Request) -> web.Response:
        return reply(self._capabilities())

    def _capabilities(self) -> dict[str, Any]:
        given = self.host.settings
        return wire.Capabilities(
            api=wire.API,
            networks=given.networks(),
            allow=list(given.allow),
            images=["host", *sorted(given.images)],
            shares=list(map(str, given.shares)),
            limits=asdict(given.limits),
            quota={"max_sandboxes": given.max_sandboxes, "cpu": given.cpu, "memory_bytes": given.memory},
            ttl_seconds=given.ttl,
            output_bytes=OUTPUT_BYTES,
            transfer_bytes=transfers.TRANSFER_BYTES,
        ).model_dump()

    async def resources(self, request: web.Request) -> web.Response:
        return reply(machine.resources([h for h in self.host.hosted.values() if h.status != "failed"]))

    # ---- sandboxes ---------------------------------------------------------------------------------------------
    async def create(self, request: web.Request) -> web.Response:
        body = await bodies.body(request, wire.CreateRequest)
        hosted = self.host.create(body, bodies.key(request))
        if body.wait:
            await hosted.settled.wait()
            if hosted.kept.failure is not None:
                raise Problem("not_created", f"sandbox {hosted.sandbox_id} could not be made: {hosted.kept.failure}")
        return reply(hosted.wire())

    async def listing(self, request: web.Request) -> web.Response:
        wanted: dict[str, str] = {}
        for label in request.query.getall("label", []):
            name, equals, value = label.partition("=")
            if not equals:
                raise Problem("invalid", f"label {label!r} is not of the form NAME=VALUE")
            wanted[name] = value
        status = request.query.get("status")
        if status not in (None, *wire.STATUSES):
            raise Problem("invalid", f"status={status!r} in the query is none of {', '.join(wire.STATUSES)}")
        found = [h.wire() for h in self.host.hosted.values() if wanted.items() <= h.request.labels.items()]
        return reply({"sandboxes": [f for f in found if status in (None, f["status"])]})

    async def get(self, request: web.Request) -> web.Response:
        return reply(self.host.find(request.match_info["id"]).wire())

    async def wait(self, request: web.Request) -> web.Response:
        hosted = self.host.find(request.match_info["id"])
        seconds = bodies.number(request, "timeout", 3600.0)
        try:
            await asyncio.wait_for(hosted.settled.wait(), seconds)
        except TimeoutError:
            raise Problem("timeout", f"sandbox {hosted.sandbox_id} was not ready within {seconds:g} s") from None
        return reply(hosted.wire())

    async def delete(self, request: web.Request) -> web.Response:
        await self.host.delete(request.match_info["id"])
        return reply({"status": "deleted", "sandbox_id": request.match_info["id"]})

    async def heartbeat(self, request: web.Request) -> web.Response:
        hosted = self.host.find(request.match_info["id"])
        body = await bodies.body(request, wire.HeartbeatRequest) if request.can_read_body else wire.HeartbeatRequest()
        hosted.ready()  # of a dead sandbox a heartbeat tells
        self.host.heartbeat(hosted, body.ttl_seconds)
        return reply({"status": "ok", "sandbox_id": hosted.sandbox_id, "expires_at": hosted.used_at + hosted.kept.ttl})

    async def end_processes(self, request: web.Request) -> web.Response:
        local = await self.host.running(request.match_info["id"])
        await self.host.jobs.ended(request.match_info["id"], local)
        return reply({"status": "ok", "sandbox_id": request.match_info["id"]})

    # ---- commands ----------------------------------------------------------------------------------------------
    async def execute(self, request: web.Request) -> web.Response:
        body = await bodies.body(request, wire.ExecRequest)
        if body.job_id is not None and re.fullmatch(wire.JOB_NAME, body.job_id) is None:
            raise Problem("invalid", f"job_id {body.job_id!r} is no name: 1 to 128 letters, digits, _, . and -")
        if body.stdin is not None:
            bodies.decoded(body.stdin, "stdin")
        bodies.checked_command(body)
        job = await self._submit(request, body.model_dump(), body.job_id)
        if not body.wait:
            return reply({"job_id": job.job_id, "status": "queued"})
        await _within(job, (body.timeout_seconds or 300) + _WAIT_SECONDS)
        told = self._wire(job, body.encoding)
        if told["error"] is not None and told["code"] not in (None, "cancelled"):  # it never ran, or its end is lost
            raise Problem(told["code"], told["error"])
        return reply(told)

    async def _submit(self, request: web.Request, body: dict[str, Any], job_id: str | None) -> Job:
        sandbox_id = request.match_info["id"]
        hosted = self.host.find(sandbox_id)
        if hosted.settled.is_set():
            hosted.ready()
        return self.host.jobs.submit(sandbox_id, body, job_id, bodies.key(request))

    async def apply_patch(self, request: web.Request) -> web.Response:
        body = await bodies.body(request, wire.PatchRequest)
        command = wire.ExecRequest(
            command=["git", "apply", "-"],
            stdin=base64.b64encode(body.patch.encode(errors="surrogateescape")).decode(),
            timeout_seconds=body.timeout_seconds or 30,
        )
        job = await self._submit(request, command.model_dump(), None)
        await job.done.wait()
        told = self._wire(job, "utf-8")
        keep = {name: told[name] for name in ("stdout", "stderr", "exit_code", "error")}
        return reply({"success": told["exit_code"] == 0, **keep})

    async def job(self, request: web.Request) -> web.Response:
        return reply(self._wire(self.host.jobs.get(request.match_info["job"]), bodies.encoding(request)))

    async def wait_job(self, request: web.Request) -> web.Response:
        job = self.host.jobs.get(request.match_info["job"])
        await _within(job, bodies.number(request, "timeout", 300.0))
        return reply(self._wire(job, bodies.encoding(request)))

    async def cancel_job(self, request: web.Request) -> web.Response:
        job_id = request.match_info["job"]
        if job_id in self.host.jobs.jobs:
            await self.host.jobs.cancel(self.host.jobs.get(job_id))
        return reply({"status": "ended", "job_id": job_id})

    def _wire(self, job: Job, encoding: str) -> dict[str, Any]:
        """A job in answers (`wire.Job`)."""
        hosted = self.host.hosted.get(job.sandbox_id)
        if hosted is not None:
            hosted.used_at = time.time()
        end = job.end or {}
        texts = self.host.jobs.outputs(job) if job.started_at is not None else (b"", b"")
        decode = (lambda b: base64.b64encode(b).decode()) if encoding == "base64" else bodies.text
        error, code = end.get("error"), end.get("code")
        if error is not None and code is None:
            lost, number = end.get("lost"), end.get("errno")
            code = "sandbox_lost" if lost else "disk_full" if number in problems.FULL else "invalid"
        if end.get("cancelled"):
            error, code = "cancelled", "cancelled"
        elif end.get("timed_out"):
            error = f"timed out after {job.request['timeout_seconds'] or 300:g} s: killed with all that it had started"
        return {
            "job_id": job.job_id,
            "sandbox_id": job.sandbox_id,
            "command": job.request["command"],
            "status": job.status,
            "stdout": decode(texts[0]),
            "stderr": decode(texts[1]),
            "exit_code": end.get("exit"),
            "created_at": job.created_at,
            "started_at": job.started_at,
            "completed_at": end.get("ended"),
            "error": error,
            "timed_out": end.get("timed_out", False),
            "note": end.get("note"),
            "stdout_bytes": end.get("stdout", len(texts[0])),
            "stderr_bytes": end.get("stderr", len(texts[1])),
            "encoding": encoding,
            "code": code,
        }

    async def pty(self, request: web.Request) -> web.StreamResponse:
        return await pty.serve(self.host, request, request["refused"])

    # ---- files -------------------------------------------------------------------------------------------------
    async def upload(self, request: web.Request) -> web.Response:
        body = await bodies.body(request, wire.UploadRequest)
        data = bodies.decoded(body.content, "content")
        local = await self.host.running(request.match_info["id"])
        size = await transfers.upload(
            self.host.spawner,
            local,
            body.path,
            transfers.whole(data),
            len(data),
            int(body.mode or "644", 8),
            body.offset,
        )
        return reply({"success": True, "path": body.path, "size": size})

    async def upload_raw(self, request: web.Request) -> web.Response:
        path, size = bodies.query(request, "path"), request.content_length
        if size is None:
            raise Problem("invalid", "an upload needs the header Content-Length")
        if size > transfers.TRANSFER_BYTES:
            raise Problem(
                "too_large", f"{size} bytes; one call takes {transfers.TRANSFER_BYTES}: send pieces by offset"
            )
        mode = request.query.get("mode", "0644")
        if re.fullmatch(r"0?[0-7]{3}", mode) is None:
            raise Problem("invalid", f"mode {mode!r} is no octal mode, such as 0755")
        offset = int(bodies.number(request, "offset", 0))
        local = await self.host.running(request.match_info["id"])
        data = request.content.iter_any()
        written = await transfers.upload(self.host.spawner, local, path, data, size, int(mode, 8), offset)
        return reply({"success": True, "path": path, "size": written})

    async def download(self, request: web.Request) -> web.Response:
        path = bodies.query(request, "path")
        local = await self.host.running(request.match_info["id"])
        data, size = await transfers.download(self.host.spawner, local, path, 0, None)
        return reply({"path": path, "content": base64.b64encode(data).decode(), "size": size})

    async def download_raw(self, request: web.Request) -> web.Response:
        path, offset = bodies.query(request, "path"), int(bodies.number(request, "offset", 0))
        length = int(bodies.number(request, "length", 0)) if "length" in request.query else None
        local = await self.host.running(request.match_info["id"])
        data, size = await transfers.download(self.host.spawner, local, path, offset, length)
        return web.Response(body=data, content_type="application/octet-stream", headers={wire.SIZE_HEADER: str(size)})

    async def files(self, request: web.Request) -> web.Response:
        path = request.query.get("path", "/workspace")
        local = await self.host.running(request.match_info["id"])
        entries = [
            {
                "name": e.name,
                "type": e.type,
                "size": e.size,
                "modified": datetime.fromtimestamp(e.modified, UTC).strftime("%Y-%m-%dT%H:%M:%S"),
                "mtime": e.modified,
            }
            for e in await local.list_files(path)
        ]
        return reply({"path": path, "files": entries})

    # ---- ways in and out ---------------------------------------------------------------------------------------
    async def add_route(self, request: web.Request) -> web.Response:
        body = await bodies.body(request, wire.RouteRequest)
        await self.host.running(request.match_info["id"])
        hosted = self.host.find(request.match_info["id"])
        await ways.open_route(self.host, hosted, body.port, body.target)
        return reply({"sandbox_id": hosted.sandbox_id, "port": body.port, "target": body.target})

    async def routes(self, request: web.Request) -> web.Response:
        hosted = self.host.find(request.match_info["id"])
        return reply({"routes": [{"port": int(p), "target": t} for p, t in hosted.kept.routes.items()]})

    async def delete_route(self, request: web.Request) -> web.Response:
        port = request.match_info["port"]
        if port.isdecimal():
            ways.close_route(self.host, self.host.find(request.match_info["id"]), int(port))
        return reply({"status": "deleted", "port": port})

    async def port(self, request: web.Request) -> web.StreamResponse:
        return await ways.enter(self.host, request)


async def _within(job: Job, seconds: float) -> None:
    """Wait for a job's end, but no longer than this."""
    if not job.done.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(job.done.wait(), seconds)
