"""The suite's services: what each operation does, what it refuses, errors on purpose, audit and reset."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from typing import Any

import base
import pytest
from source.parts import load_service
from suite_rig import FOLDERS, SUITE

NAMES = ("mail", "calendar", "todo", "notes", "helpdesk")
STATES: dict[str, dict[str, Any]] = {
    "mail": {
        "now": "2031-05-07T09:00",
        "me": "kim@orchard.example",
        "messages": [
            {"id": "m-1", "folder": "inbox", "from": "a@b.example", "to": ["kim@orchard.example"], "subject": "Hi"}
            | {"date": "2031-05-01T08:00", "body": "Some Words", "read": False, "in_reply_to": ""}
        ],
    },
    "calendar": {
        "now": "2031-05-07T09:00",
        "events": [
            {"id": "e-7", "title": "Late", "start": "2031-05-08T11:00", "end": "2031-05-08T12:00"}
            | {"attendees": ["Ana"], "place": ""},
            {"id": "e-9", "title": "Early", "start": "2031-05-08T08:00", "end": "2031-05-08T09:00"}
            | {"attendees": ["Bo"], "place": ""},
        ],
    },
    "todo": {
        "now": "2031-05-07T09:00",
        "items": [{"id": "t-1", "title": "mow", "owner": "Ana", "due": "", "priority": "normal", "done": False}],
    },
    "notes": {
        "now": "2031-05-07T09:00",
        "notes": [{"id": "n-1", "title": "Old", "date": "2030-01-01", "body": "Key under the mat", "tags": ["house"]}],
    },
    "helpdesk": {
        "now": "2031-05-07T09:00",
        "tickets": [
            {"id": f"h-{n}", "customer": "Ann", "subject": "?", "body": "!", "created": "2031-05-01", "status": "open"}
            | {"priority": "normal", "assignee": "", "duplicate_of": "", "replies": []}
            for n in (1, 2)
        ],
    },
}


class Client:
    """One service over HTTP."""

    def __init__(self, name: str, port: int) -> None:
        self._base = f"http://127.0.0.1:{port}/{name}"

    def ask(self, path: str, body: bytes | None = None) -> tuple[int, dict[str, Any]]:
        try:
            with urllib.request.urlopen(urllib.request.Request(f"{self._base}/{path}", body)) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as e:
            return e.code, json.load(e)

    def __call__(self, operation: str, **arguments: Any) -> dict[str, Any]:
        status, answer = self.ask(operation, json.dumps(arguments).encode())
        assert status == 200, answer
        return answer

    def refused(self, operation: str, **arguments: Any) -> tuple[int, str]:
        status, answer = self.ask(operation, json.dumps(arguments).encode())
        assert status >= 400 and set(answer) == {"error"}
        return status, answer["error"]

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = self.ask("audit")[1]["state"]
        return found


def service(name: str, error_rate: float = 0.0) -> Any:
    return base.Service(name, load_service(name).OPERATIONS, STATES[name], error_rate)


@pytest.fixture
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    """A client of the service that the test's parameter names."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), base.handler(service(request.param)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield Client(request.param, server.server_port)
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("client", ["mail"], indirect=True)
def test_mail(client: Client) -> None:
    shown = {k: v for k, v in STATES["mail"]["messages"][0].items() if k not in ("body", "in_reply_to")}
    assert client("list", unread=True) == {"messages": [shown]}
    assert (
        client("search", query="some words") == {"messages": [shown]}
        and client("list", folder="sent")["messages"] == []
    )
    assert client("get", id="m-1")["body"] == "Some Words" and client("list", unread=True) == {"messages": []}
    assert client("send", to=["x@y.example"], subject="s", body="b", in_reply_to="m-1") == {
        "id": "m-2",
        "status": "sent",
    }
    assert client("move", id="m-1", folder="old") == {"id": "m-1", "folder": "old"}
    first, sent = client.state()["messages"]
    assert first["folder"] == "old"
    assert (sent["from"], sent["to"], sent["folder"]) == ("kim@orchard.example", ["x@y.example"], "sent")
    assert sent["date"] == "2031-05-07T09:00" and sent["in_reply_to"] == "m-1"
    assert client.refused("send", to=["nobody"], subject="s", body="b") == (400, "'nobody' is no mail address")
    assert client.refused("send", to=["x@y.example"], subject="s", body="b", in_reply_to="m-9")[0] == 404
    assert client.refused("move", id="m-2", folder="inbox")[0] == 409


@pytest.mark.parametrize("client", ["calendar"], indirect=True)
def test_calendar(client: Client) -> None:
    assert [e["id"] for e in client("list", date="2031-05-08")["events"]] == ["e-9", "e-7"]
    assert [e["id"] for e in client("list", attendee="Ana")["events"]] == ["e-7"]
    made = client("create", title="New", start="2031-05-09T10:00", end="2031-05-09T10:30")
    assert made == {"id": "e-10", "title": "New", "start": "2031-05-09T10:00", "end": "2031-05-09T10:30"} | {
        "attendees": [],
        "place": "",
    }
    assert client("update", id="e-7", end="2031-05-08T13:00")["end"] == "2031-05-08T13:00"
    assert client.refused("update", id="e-7", end="2031-05-08T10:00") == (400, "the event ends before it starts")
    assert client.refused("create", title="x", start="tomorrow", end="2031-05-09T10:30")[0] == 400
    client("delete", id="e-9")
    assert [e["id"] for e in client.state()["events"]] == ["e-7", "e-10"]
    assert client.refused("delete", id="e-9") == (404, "there is no event 'e-9'")


@pytest.mark.parametrize("client", ["todo"], indirect=True)
def test_todo(client: Client) -> None:
    made = client("create", title="sow", owner="Bo", due="2031-06-01", priority="high")
    assert made == {"id": "t-2", "title": "sow", "owner": "Bo", "due": "2031-06-01", "priority": "high", "done": False}
    assert client("update", id="t-1", done=True)["done"] is True
    assert [i["id"] for i in client("list", done=False)["items"]] == ["t-2"]
    assert [i["id"] for i in client("list", owner="Ana")["items"]] == ["t-1"]
    assert client.refused("create", title="x", priority="hot") == (
        400,
        "argument 'priority' must be one of low, normal, high",
    )
    client("delete", id="t-1")
    assert [i["id"] for i in client.state()["items"]] == ["t-2"]


@pytest.mark.parametrize("client", ["notes"], indirect=True)
def test_notes(client: Client) -> None:
    listed = {"id": "n-1", "title": "Old", "date": "2030-01-01", "tags": ["house"]}
    assert client("list", tag="house") == {"notes": [listed]} and client("list", tag="x") == {"notes": []}
    assert client("search", query="THE MAT") == {"notes": [listed]}
    assert client("get", id="n-1")["body"] == "Key under the mat"
    assert client("create", title="New", body="text")["id"] == "n-2"
    client("update", id="n-1", tags=["a", "b"])
    client("delete", id="n-2")
    assert client.state()["notes"] == [{**STATES["notes"]["notes"][0], "tags": ["a", "b"]}]
    assert client.refused("update", id="n-1", tags="a") == (400, "argument 'tags' must be of type array")


@pytest.mark.parametrize("client", ["helpdesk"], indirect=True)
def test_helpdesk(client: Client) -> None:
    assert client("update", id="h-2", status="closed", duplicate_of="h-1")["duplicate_of"] == "h-1"
    assert [t["id"] for t in client("list", status="open")["tickets"]] == ["h-1"]
    assert client("reply", id="h-1", text="Soon.") == {"id": "h-1", "replies": 1}
    assert client("get", id="h-1")["replies"] == [{"date": "2031-05-07T09:00", "text": "Soon."}]
    assert client.refused("reply", id="h-2", text="Too late.")[0] == 409
    assert client.refused("update", id="h-1", duplicate_of="h-1")[0] == 409
    assert client.refused("update", id="h-1", duplicate_of="h-9") == (404, "there is no ticket 'h-9'")


@pytest.mark.parametrize("client", ["todo"], indirect=True)
def test_a_wrong_call_is_refused_changes_nothing_and_is_audited(client: Client) -> None:
    assert client.refused("update", done=True) == (400, "argument 'id' is missing")
    assert client.refused("update", id="t-1", done=1) == (400, "argument 'done' must be of type boolean")
    assert client.refused("delete", id="t-1", really=True) == (400, "unknown argument 'really'; known: id")
    assert client.refused("explode")[0] == 404
    assert client.ask("list", b"[1]") == (400, {"error": "the body must be one JSON object, not list"})
    assert client.ask("list", b"{") == (400, {"error": "the body is not JSON"})
    assert client.ask("list") == (405, {"error": "operations are called by POST"})
    audit = client.ask("audit")[1]
    assert audit["initial"] == audit["state"] == STATES["todo"]
    assert [(c["operation"], c["status"]) for c in audit["calls"]] == [
        ("update", 400),
        ("update", 400),
        ("delete", 400),
        ("explode", 404),
        ("list", 400),
        ("list", 400),
    ]
    assert audit["calls"][2]["request"] == {"id": "t-1", "really": True}


@pytest.mark.parametrize("client", NAMES, indirect=True)
def test_a_reset_gives_the_state_of_the_fixtures_and_no_calls(client: Client) -> None:
    client("list")
    assert client.ask("health") == client.ask("health", b"") == (200, {"status": "ok"})
    assert client.ask("reset", b"{}") == (200, {"status": "ok"})
    state = client.state()
    audit = client.ask("audit")[1]
    assert audit == {"calls": [], "initial": state, "state": state}


def test_errors_on_purpose_come_at_their_rate_change_nothing_and_repeat_after_a_reset() -> None:
    todo = service("todo", error_rate=0.3)
    body = json.dumps({"title": "x"}).encode()
    first = [todo.call("create", body)[0] for _ in range(400)]
    made = len(todo.audit()["state"]["items"]) - 1
    todo.reset()
    assert first == [todo.call("create", body)[0] for _ in range(400)]
    assert set(first) == {200, 503} and made == first.count(200)
    assert 80 < first.count(503) < 160  # 120 expected; 4 standard deviations are 37


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ({"TODO_FIXTURES": "x.json"}, "todo: the environment variable PORT is missing"),
        ({"PORT": "1"}, "todo: the environment variable TODO_FIXTURES is missing"),
        ({"PORT": "none", "TODO_FIXTURES": "x.json"}, "todo: PORT must be a whole number and ERROR_RATE a number"),
        ({"PORT": "1", "TODO_FIXTURES": "x.json"}, "todo: TODO_FIXTURES=x.json cannot be read"),
    ],
)
def test_a_service_that_cannot_start_says_why(env: dict[str, str], told: str) -> None:
    done = _start(env)
    assert done.returncode == 1 and done.stderr.startswith(told) and done.stderr.count("\n") == 1


def test_a_port_that_is_taken_is_an_error() -> None:
    fixtures = next(f for f in FOLDERS if f.name == "todo-complete-train") / "fixtures" / "todo.json"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = _start({"PORT": str(port), "TODO_FIXTURES": str(fixtures)})
    assert (done.returncode, done.stderr) == (1, f"todo: port {port} cannot be used: Address already in use\n")


def _start(env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    program = SUITE / "services" / "todo" / "server.py"
    env = {"PATH": os.environ["PATH"], **env}
    return subprocess.run([sys.executable, str(program)], env=env, capture_output=True, text=True, timeout=60)
