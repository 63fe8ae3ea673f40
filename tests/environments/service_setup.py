"""A set-up of the tests: two small services with their tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from openforge.environments.claw_eval.evidence import TREE
from openforge.environments.claw_eval.setup import Service, Setup, Tool, Tree, digest

_SOURCE = Path(__file__).with_name("mock_service.py")
MAIL, NOTES = 9100, 9105


def service(name: str, port: int, mode: str = "", **over: Any) -> Service:
    base = f"http://localhost:{port}/{name}"
    given: dict[str, Any] = {
        "name": name,
        "command": "python3 services/mock_service.py",
        "port": port,
        "health_check": f"{base}/health",
        "health_check_method": "POST",
        "ready_timeout": 10.0,
        "reset_endpoint": f"{base}/reset",
        "env": {"NAME": name, "MODE": mode, "START": '["first"]'},
    }
    return Service(**{**given, **over})


def tool(name: str, port: int, operation: str, method: str = "POST", **properties: str) -> Tool:
    """A tool whose properties, all required, have these types."""
    schema = {
        "type": "object",
        "properties": {k: {"type": v} for k, v in properties.items()},
        "required": list(properties),
        "additionalProperties": False,
    }
    path = f"{name.split('_')[0]}/{operation}"
    return Tool(name, f"{operation} of {name}", schema, f"http://localhost:{port}/{path}", method)


TOOLS = (
    tool("mail_list", MAIL, "list"),
    tool("mail_add", MAIL, "add", text="string"),
    tool("mail_find", MAIL, "find", "GET", text="string"),
    tool("mail_text", MAIL, "text"),
    tool("mail_crash", MAIL, "crash"),
    tool("notes_add", NOTES, "add", text="string"),
)


def setup(*services: Service, **over: Any) -> Setup:
    """Two services and their tools, or the services given."""
    tree = Tree(str(_SOURCE), f"services/{_SOURCE.name}", digest(_SOURCE))
    chosen = services or (service("mail", MAIL), service("notes", NOTES))
    ports = {s.port for s in chosen}
    tools = tuple(t for t in TOOLS if int(t.url.split(":")[2].split("/")[0]) in ports)
    return Setup(services=chosen, tree=(tree,), cwd=TREE, **{"tools": tools, **over})
