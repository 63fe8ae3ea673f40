"""What the suite's services share: an HTTP server of JSON operations on a state that fixtures begin.

    POST /NAME/OPERATION   a call: its body are the arguments, one JSON object
    GET  /NAME/health      {"status": "ok"}, by GET or POST
    GET  /NAME/audit       {"calls": [{operation, request, status}], "initial": {...}, "state": {...}}
    POST /NAME/reset       the state of the fixtures again, no calls, the same errors to come

Environment: PORT, NAME_FIXTURES (a JSON object: the state at the start; its `now` is the service's only clock) and
ERROR_RATE (share of calls that fail with 503 before they change anything; which ones is the same in every run).

Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import copy
import json
import os
import random
import socketserver
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

State = dict[str, Any]
_JSON_TYPES: dict[str, type | tuple[type, ...]] = {"string": str, "integer": int, "boolean": bool, "array": list}


class Refused(Exception):
    """A call that the service refuses: the HTTP status and a sentence."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Operation(NamedTuple):
    """One operation, and the tool that it is for the agent.

    Attributes:
        run: takes the state and the arguments, changes the state, returns the answer.
        properties: JSON schema of each argument.
        required: names of the arguments that must be given.
    """

    name: str
    description: str
    run: Callable[..., dict[str, Any]]
    properties: Mapping[str, Mapping[str, Any]]
    required: Sequence[str] = ()

    def schema(self) -> dict[str, Any]:
        """JSON schema of the arguments."""
        properties = {name: dict(p) for name, p in self.properties.items()}
        return {
            "type": "object",
            "properties": properties,
            "required": list(self.required),
            "additionalProperties": False,
        }

    def check(self, arguments: Any) -> None:
        """Raises `Refused` for arguments that the schema does not allow."""
        if not isinstance(arguments, dict):
            raise Refused(400, f"the body must be one JSON object, not {type(arguments).__name__}")
        for name in self.required:
            if name not in arguments:
                raise Refused(400, f"argument {name!r} is missing")
        for name, value in arguments.items():
            if name not in self.properties:
                raise Refused(400, f"unknown argument {name!r}; known: {', '.join(self.properties) or 'none'}")
            _check_value(name, value, self.properties[name])


def _check_value(name: str, value: Any, schema: Mapping[str, Any]) -> None:
    kind = schema["type"]
    # bool is an int for Python and none for JSON.
    if not isinstance(value, _JSON_TYPES[kind]) or (kind == "integer" and isinstance(value, bool)):
        raise Refused(400, f"argument {name!r} must be of type {kind}")
    if "enum" in schema and value not in schema["enum"]:
        raise Refused(400, f"argument {name!r} must be one of {', '.join(schema['enum'])}")
    if isinstance(value, list):
        for item in value:
            _check_value(f"{name}[]", item, schema["items"])


def text(description: str, *choices: str) -> dict[str, Any]:
    """Schema of a text argument."""
    return {"type": "string", "description": description, **({"enum": list(choices)} if choices else {})}


def texts(description: str) -> dict[str, Any]:
    """Schema of an argument that is a list of texts."""
    return {"type": "array", "items": {"type": "string"}, "description": description}


def find(items: list[dict[str, Any]], key: str, what: str) -> dict[str, Any]:
    """The item with this id; `Refused` with 404 if there is none."""
    for item in items:
        if item["id"] == key:
            return item
    raise Refused(404, f"there is no {what} {key!r}")


def new_id(items: list[dict[str, Any]], prefix: str) -> str:
    """An id that no item has: the next number after the highest."""
    numbers = [int(i["id"].rsplit("-", 1)[-1]) for i in items if i["id"].rsplit("-", 1)[-1].isdigit()]
    return f"{prefix}-{max(numbers, default=0) + 1}"


class Service:
    """The state, its operations and the record of all calls; calls are carried out one at a time."""

    def __init__(self, name: str, operations: Sequence[Operation], initial: State, error_rate: float = 0.0) -> None:
        self.name, self._initial, self._error_rate = name, initial, error_rate
        self._operations = {o.name: o for o in operations}
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> dict[str, Any]:
        with self._lock:
            self._state, self._calls = copy.deepcopy(self._initial), list[dict[str, Any]]()
            self._random = random.Random(self.name)
        return {"status": "ok"}

    def audit(self) -> dict[str, Any]:
        with self._lock:
            return copy.deepcopy({"calls": self._calls, "initial": self._initial, "state": self._state})

    def call(self, operation: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """Carry out one call: HTTP status and answer."""
        with self._lock:
            arguments: Any = None
            try:
                if operation not in self._operations:
                    raise Refused(404, f"unknown operation {operation!r}; known: {', '.join(self._operations)}")
                arguments = _parsed(body)
                self._operations[operation].check(arguments)
                if self._random.random() < self._error_rate:
                    raise Refused(503, "temporarily unavailable; nothing was changed")
                status, answer = 200, copy.deepcopy(self._operations[operation].run(self._state, **arguments))
            except Refused as e:
                status, answer = e.status, {"error": str(e)}
            self._calls.append({"operation": operation, "request": arguments, "status": status})
            return status, answer


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body or b"{}")
    except ValueError:
        raise Refused(400, "the body is not JSON") from None


def handler(service: Service) -> type[BaseHTTPRequestHandler]:
    """The HTTP side of a service."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer("GET", b"")

        def do_POST(self) -> None:
            self._answer("POST", self.rfile.read(int(self.headers.get("Content-Length") or 0)))

        def _answer(self, method: str, body: bytes) -> None:
            name, _, operation = self.path.split("?")[0].strip("/").partition("/")
            if name != service.name:
                status, answer = 404, {"error": f"this is the service {service.name!r}"}
            elif operation == "health":
                status, answer = 200, {"status": "ok"}
            elif (method, operation) == ("GET", "audit"):
                status, answer = 200, service.audit()
            elif (method, operation) == ("POST", "reset"):
                status, answer = 200, service.reset()
            elif method == "POST":
                status, answer = service.call(operation, body)
            else:
                status, answer = 405, {"error": "operations are called by POST"}
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            pass

    return Handler


class _Server(ThreadingHTTPServer):
    # Two services on one port must be an error of the second, not a mix of both.
    allow_reuse_port = False
    daemon_threads = True

    def server_bind(self) -> None:
        # HTTPServer's own looks the host's name up, which can wait for a name server that is not there.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "localhost", self.server_address[1]


def main(name: str, operations: Sequence[Operation]) -> None:
    """Serve on 127.0.0.1:PORT until killed; exits with one sentence if the environment is wrong."""
    key = f"{name.upper()}_FIXTURES"
    try:
        port, path = int(os.environ["PORT"]), os.environ[key]
        error_rate = float(os.environ.get("ERROR_RATE", "0"))
    except KeyError as e:
        sys.exit(f"{name}: the environment variable {e.args[0]} is missing")
    except ValueError as e:
        sys.exit(f"{name}: PORT must be a whole number and ERROR_RATE a number: {e}")
    try:
        with open(path, encoding="utf-8") as f:
            initial = json.load(f)
    except (OSError, ValueError) as e:
        sys.exit(f"{name}: {key}={path} cannot be read: {e}")
    try:
        server = _Server(("127.0.0.1", port), handler(Service(name, operations, initial, error_rate)))
    except OSError as e:
        sys.exit(f"{name}: port {port} cannot be used: {e.strerror}")
    server.serve_forever()
