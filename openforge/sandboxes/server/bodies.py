"""Bodies and queries of requests, as what they should be."""

from __future__ import annotations

import base64
import binascii
import re
from typing import TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from openforge.sandboxes.server import wire
from openforge.sandboxes.server.problems import Problem

Body = TypeVar("Body", bound=BaseModel)


async def body(request: web.Request, kind: type[Body]) -> Body:
    """The request's body as `kind`; 422 with a list as `detail`, as Orchard's framework has it."""
    try:
        return kind.model_validate_json(await request.read())
    except ValidationError as e:
        # Without the input: it may be large, or hold what is nobody's to see in a log.
        told = e.errors(include_url=False, include_input=False, include_context=False)
        detail = [{**problem, "loc": ["body", *problem["loc"]]} for problem in told]
        raise Problem("invalid", detail) from None


def query(request: web.Request, name: str) -> str:
    """A part of the query that must be there; `Problem`."""
    if not request.query.get(name):
        raise Problem("invalid", f"the query lacks {name}=")
    return request.query[name]


def number(request: web.Request, name: str, default: float) -> float:
    """A number of the query; `Problem`."""
    given = request.query.get(name)
    if given is None:
        return default
    if re.fullmatch(r"\d{1,15}(\.\d+)?", given) is None:
        raise Problem("invalid", f"{name}={given!r} in the query is no number of 0 or more")
    return float(given)


def key(request: web.Request) -> str | None:
    """The Idempotency-Key; `Problem` for an empty one, which would make one submission of all that carry it."""
    given = request.headers.get(wire.IDEMPOTENCY_HEADER)
    if given == "":
        raise Problem("invalid", f"the header {wire.IDEMPOTENCY_HEADER} is empty: give a key, or leave it out")
    return given


def encoding(request: web.Request) -> str:
    """How the query wants outputs; `Problem`."""
    wanted = request.query.get("encoding", "utf-8")
    if wanted not in ("utf-8", "base64"):
        raise Problem("invalid", f"encoding={wanted!r} in the query is neither utf-8 nor base64")
    return wanted


def decoded(given: str, name: str) -> bytes:
    """The bytes of strict base64; `Problem`."""
    try:
        return base64.b64decode(given, validate=True)
    except (binascii.Error, ValueError) as e:
        raise Problem("invalid", f"{name} is no base64: {e}") from None


def text(data: bytes) -> str:
    """An output as text; what does not decode is replaced."""
    return data.decode(errors="replace")


def checked_command(body: wire.ExecRequest) -> None:
    """What the kernel would not take; `Problem`."""
    words = [body.command] if isinstance(body.command, str) else body.command
    if not words[0]:
        raise Problem("invalid", "command is empty")
    if any("\0" in w for w in [*words, body.cwd or "", *(body.env or {}), *(body.env or {}).values()]):
        raise Problem("invalid", "command, cwd and env cannot hold a NUL character")
    if any(not name or "=" in name for name in body.env or {}):
        raise Problem("invalid", "a name in env is empty or holds =")
