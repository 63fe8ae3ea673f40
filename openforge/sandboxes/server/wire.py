"""The wire of `openforge sandboxes serve`: Orchard's REST protocol, and what ours adds to it.

Every addition is optional, so Orchard's client works unchanged. Auth: header `X-API-Key`; WebSockets also take the
query `api_key` or the subprotocol `api_key.KEY`. Every answer has `X-Request-ID`. Errors: {"detail", "code"}, where
`code` is one of `CODES`; 422 for a body of the wrong shape has a list as `detail`.

    GET    /                                service, version, status, capabilities
    GET    /health                          status
    GET    /capabilities                    `Capabilities`
    GET    /resources                       Orchard's shape, this host as its one node
    POST   /sandboxes                       `CreateRequest` -> sandbox (status pending; with wait: ready)
    GET    /sandboxes?label=K=V&status=S    {"sandboxes": [sandbox]}; labels may repeat and must all hold
    GET    /sandboxes/{id}                  sandbox
    GET    /sandboxes/{id}/wait?timeout=S   sandbox once it is ready or failed; 408
    DELETE /sandboxes/{id}                  always 200; companions go along; returns when all is gone
    POST   /sandboxes/{id}/heartbeat        renews the time to live (any call does); {"ttl_seconds"?: new value}
    POST   /sandboxes/{id}/exec             `ExecRequest` -> job, or {job_id, status} without wait
    POST   /sandboxes/{id}/end_processes    kills everything inside but the first process, returns when it is dead
    POST   /sandboxes/{id}/apply_patch      {patch, timeout_seconds}
    POST   /sandboxes/{id}/files            {path, content (base64), mode?, offset?}
    GET    /sandboxes/{id}/files?path=P     {path, content (base64), size}
    PUT    /sandboxes/{id}/files/raw?path=P&mode=0755&offset=N   raw body with Content-Length -> {success, path, size}
    GET    /sandboxes/{id}/files/raw?path=P&offset=N&length=N    raw body; header X-File-Size: the file's whole size
    GET    /sandboxes/{id}/files/list?path=P   {path, files: [{name, type, size, modified, mtime (epoch seconds)}]}
    POST   /sandboxes/{id}/routes           {port, target: "HOST:PORT"} -> the same: 127.0.0.1:port inside leads there
    GET    /sandboxes/{id}/routes           {"routes": [{port, target}]}
    DELETE /sandboxes/{id}/routes/{port}    always 200
    WS     /sandboxes/{id}/ports/{port}     raw bytes (binary frames) to and from 127.0.0.1:port inside; 502 with code
                                            `refused` instead of the upgrade while nobody listens
    WS     /sandboxes/{id}/exec/pty         Orchard's frames
    GET    /jobs/{job_id}                   job; ?encoding=base64 as in `ExecRequest`
    GET    /jobs/{job_id}/wait?timeout=S    job, whatever its status is then
    DELETE /jobs/{job_id}                   ends a job with all it started; always 200

`offset` of an upload: without it the file is replaced whole; 0 begins a file anew and N > 0 writes at N of a file that
has at least N bytes, in its place. An upload that is repeated after a lost answer is thus harmless.

A submission cannot run twice where its caller names it: `job_id` of an exec, or the header `Idempotency-Key` of a
create or an exec. The same name with the same body is 200 and the first result; with another body 409. `sandbox_id`
alone does not make a create repeatable: a second one is 409.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

SandboxStatus = Literal["pending", "ready", "failed", "not_found"]
STATUSES = get_args(SandboxStatus)
API = 1
KEY_HEADER = "X-API-Key"
IDEMPOTENCY_HEADER = "Idempotency-Key"
SIZE_HEADER = "X-File-Size"
NAME = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"  # of a sandbox: a DNS label, as Orchard's pods need it
SECONDS_MOST = 1e6  # of a command: poll(2) holds its time in milliseconds, as an int
JOB_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}"

CODES = {
    "unauthorized": 401,
    "forbidden": 403,  # wrong key; a target, share or network that the operator does not offer
    "unknown": 404,  # never there, or deleted
    "sandbox_lost": 404,  # it was there and died
    "wrong_kind": 400,  # a path of the wrong kind
    "timeout": 408,
    "exists": 409,  # sandbox_id is taken; the key or job_id was used for something else
    "cancelled": 409,  # of a job
    "too_large": 413,
    "invalid": 422,
    "quota": 429,  # with Retry-After
    "not_created": 422,  # with wait: its image or a bind cannot be used, or the machine cannot make sandboxes
    "internal": 500,
    "refused": 502,  # nobody listens on the port inside
    "not_ready": 503,  # with Retry-After: the sandbox still starts
    "disk_full": 507,
}


class _Body(BaseModel):
    """A field that is not known is an error: what nobody reads must not look as if it held."""

    model_config = ConfigDict(extra="forbid")


class NetworkRequest(_Body):
    """What a sandbox reaches.

    Attributes:
        mode: none; proxy: what its routes lead to; open: the host's network, where the operator offers it.
        allow: "HOST:PORT" that routes may lead to; None is all that the operator allows.
    """

    mode: Literal["none", "proxy", "open"]
    allow: list[str] | None = None


class BindRequest(_Body):
    """A file or folder of the server's machine, below one of the operator's shares, read-only inside."""

    host: str
    inside: str | None = None


class CreateRequest(_Body):
    """POST /sandboxes.

    Attributes:
        image: name of one of the operator's images; None or "host" is the host's own system, read-only.
        block_network: Orchard's switch, used where `network` is not given: true is none, false is open.
        cpu: cores, "500m" or "4": its limit, and counts against the server's quota.
        memory: bytes, "16Gi" or "512M": likewise.
        timeout: seconds to become ready.
        labels: for the list.
        ttl_seconds: it is deleted when no call named it for so long; None is the server's default. A job that runs
            counts as a call, unless its caller once sent a heartbeat.
        companion_of: id of the sandbox it belongs to: deleted with it, and kept alive by it.
        limits: fields of `openforge.sandboxes.Limits`, over the server's defaults.
        wait: answer when it is ready or has failed (an error then), not before.
    """

    image: str | None = None
    block_network: bool = True
    sandbox_id: str | None = None
    cpu: str | None = None
    memory: str | None = None
    timeout: float | None = Field(default=3600, gt=0, allow_inf_nan=False)
    network: NetworkRequest | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    ttl_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    companion_of: str | None = None
    binds: list[BindRequest] = Field(default_factory=list)
    limits: dict[str, int | float | bool | None] = Field(default_factory=dict)
    wait: bool = False


class ExecRequest(_Body):
    """POST /sandboxes/{id}/exec.

    Attributes:
        command: a string goes to bash -c; a list is run as it stands (Orchard joins it and loses the quoting).
        timeout_seconds: of its run, without the time in the queue; None is the server's default (300).
        cwd: folder inside, else /workspace; 422 if it is none.
        login_shell: bash --login -i -c.
        wait: answer with the job when it has ended, or with status running after timeout_seconds + 30.
        job_id: the caller's name of this submission.
        stdin: base64; None is empty.
        parallel: do not wait for the sandbox's other commands.
        encoding: of stdout and stderr in the answer: utf-8 (what does not decode is replaced) or base64 (exact).
    """

    command: str | Annotated[list[str], Field(min_length=1)]
    timeout_seconds: float | None = Field(default=300, gt=0, le=SECONDS_MOST)
    cwd: str | None = None
    env: dict[str, str] | None = None
    login_shell: bool = False
    wait: bool = False
    job_id: str | None = None
    stdin: str | None = None
    parallel: bool = False
    encoding: Literal["utf-8", "base64"] = "utf-8"


class PatchRequest(_Body):
    """POST /sandboxes/{id}/apply_patch."""

    patch: str
    timeout_seconds: float | None = Field(default=30, gt=0, le=SECONDS_MOST)


class UploadRequest(_Body):
    """POST /sandboxes/{id}/files; `content` is base64, `mode` octal as in "0755"."""

    path: str
    content: str
    mode: str | None = Field(default=None, pattern=r"^0?[0-7]{3}$")
    offset: int | None = Field(default=None, ge=0)


class RouteRequest(_Body):
    """POST /sandboxes/{id}/routes."""

    port: int = Field(ge=1, le=65535)
    target: str


class HeartbeatRequest(_Body):
    """POST /sandboxes/{id}/heartbeat; the body may be absent."""

    ttl_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)


class Sandbox(BaseModel):
    """A sandbox in answers: Orchard's fields, then ours.

    `status` is pending, ready, failed (it could not start, or died: `status_message` says why) or not_found.
    """

    sandbox_id: str
    namespace: str
    image: str
    pod_name: str
    block_network: bool
    cpu: str
    memory: str
    timeout: float
    created_at: float
    ready: bool
    status: SandboxStatus
    status_message: str | None
    network: NetworkRequest
    labels: dict[str, str]
    ttl_seconds: float
    expires_at: float
    companion_of: str | None
    isolation: str


class Job(BaseModel):
    """A job in answers: Orchard's fields, then ours.

    Attributes:
        status: queued, running, succeeded (exit code 0) or failed.
        exit_code: -n if signal n ended it; None if it used up its time (`timed_out`) or never started (`error`).
        stdout: at most 1 MiB each: beyond, the middle is replaced by a line that says how much is left out.
        note: why it ended, where that is not the command's own doing (a limit of memory).
        stdout_bytes: what the command wrote, whole.
        code: of `error`, one of `CODES`.
    """

    job_id: str
    sandbox_id: str
    command: str | list[str]
    status: Literal["queued", "running", "succeeded", "failed"]
    stdout: str
    stderr: str
    exit_code: int | None
    created_at: float
    started_at: float | None
    completed_at: float | None
    error: str | None
    timed_out: bool
    note: str | None
    stdout_bytes: int
    stderr_bytes: int
    encoding: Literal["utf-8", "base64"]
    code: str | None


class Capabilities(BaseModel):
    """GET /capabilities.

    Attributes:
        api: version of what ours adds.
        networks: modes that `network.mode` may name.
        allow: "HOST:PORT" patterns that routes may lead to ("*" stands for any host or port).
        images: names that `image` may give.
        shares: folders that `binds` may name paths below.
        limits: fields of `limits` with their defaults.
        quota: max_sandboxes, cpu, memory_bytes; None is no limit.
        ttl_seconds: default time to live.
        output_bytes: of each output kept.
        transfer_bytes: of one file in one call.
    """

    api: int
    networks: list[str]
    allow: list[str]
    images: list[str]
    shares: list[str]
    limits: dict[str, int | float | bool | None]
    quota: dict[str, float | None]
    ttl_seconds: float
    output_bytes: int
    transfer_bytes: int
