"""The Model Context Protocol's server side, as far as tools need it: one JSON-RPC 2.0 message in, at most one out.

Streamable HTTP without sessions and without streams (https://modelcontextprotocol.io/specification, Transports): a
request is answered by one JSON object, a notification by nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from openforge import __version__
from openforge.environments.claw_eval.setup import Tool
from openforge.harnesses.base import MCP_NAME

# Revisions whose initialize, ping and tools are the same for a server without sessions, newest first.
VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")


_PARSE, _INVALID, _NO_METHOD, _BAD_PARAMS = -32700, -32600, -32601, -32602

Json = dict[str, Any]
# A tool's name and arguments to its answer's text, and whether that is an error.
Call = Callable[[str, Any], Awaitable[tuple[str, bool]]]


async def answer(message: Any, tools: Sequence[Tool], call: Call) -> Json | None:
    """The answer to one message; None for a notification or an answer, which get none."""
    if not isinstance(message, dict) or message.get("jsonrpc") != "2.0":
        return error(None, _INVALID, "a JSON-RPC 2.0 message is expected")
    method, ident = message.get("method"), message.get("id")
    if method is None or "id" not in message:
        return None
    params = message.get("params") or {}
    if not isinstance(params, dict):
        return error(ident, _BAD_PARAMS, "params must be an object")
    if method == "initialize":
        return _result(ident, _initialized(params.get("protocolVersion")))
    if method == "ping":
        return _result(ident, {})
    if method == "tools/list":
        return _result(ident, {"tools": [_described(t) for t in tools]})
    if method == "tools/call":
        if not isinstance(params.get("name"), str):
            return error(ident, _BAD_PARAMS, "tools/call needs the name of a tool")
        # A wrong tool or argument is told as a tool's error, which the model sees, and not as the protocol's.
        text, is_error = await call(params["name"], params.get("arguments", {}))
        return _result(ident, {"content": [{"type": "text", "text": text}], "isError": is_error})
    return error(ident, _NO_METHOD, f"there is no method {method!r}")


def unreadable() -> Json:
    """The answer to what is no JSON."""
    return error(None, _PARSE, "the body is no JSON")


def error(ident: Any, code: int, text: str) -> Json:
    return {"jsonrpc": "2.0", "id": ident, "error": {"code": code, "message": text}}


def _result(ident: Any, value: Json) -> Json:
    return {"jsonrpc": "2.0", "id": ident, "result": value}


def _initialized(asked: Any) -> Json:
    return {
        "protocolVersion": asked if asked in VERSIONS else VERSIONS[0],
        "capabilities": {"tools": {}},
        "serverInfo": {"name": MCP_NAME, "version": __version__},
    }


def _described(tool: Tool) -> Json:
    # Clients refuse a schema that is no object's.
    return {
        "name": tool.name,
        "description": tool.description,
        "inputSchema": {"type": "object", **tool.input_schema},
    }
