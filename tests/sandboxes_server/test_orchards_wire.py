"""The requests that Orchard's client (orchard_env 0.1.0) makes, field by field, and what it reads of the answers."""

from __future__ import annotations

import base64
from typing import Any

from served import Served

RESULT = {"job_id", "sandbox_id", "command", "status", "stdout", "stderr", "exit_code", "error"}
TIMES = {"created_at", "started_at", "completed_at"}


def run(served: Served, sandbox: str, command: Any, **given: Any) -> Any:
    """`SandboxInstance.exec`: every field is always there, null where the caller said nothing."""
    body = {"command": command, "timeout_seconds": None, "cwd": None, "env": None, "login_shell": False, **given}
    answer = served.api.post(f"/sandboxes/{sandbox}/exec", json=body | {"wait": True})
    if answer.is_success and answer.json()["status"] in ("succeeded", "failed"):
        return answer.json()
    # Whatever went wrong, it submits once more without waiting, and polls.
    job = served.api.post(f"/sandboxes/{sandbox}/exec", json=body).json()["job_id"]
    while (told := served.api.get(f"/jobs/{job}").json())["status"] not in ("succeeded", "failed"):
        pass
    return told


def test_a_session_of_the_client(served: Served) -> None:
    made = served.api.post("/sandboxes", json={"image": "host", "block_network": True, "sandbox_id": "p-0123abcd"})
    assert made.status_code == 200 and made.json()["timeout"] == 3600
    waited = served.api.get("/sandboxes/p-0123abcd/wait", params={"timeout": made.json()["timeout"]}).json()
    assert waited["ready"] and waited["status"] == "ready"
    for name in ("namespace", "image", "block_network"):
        assert waited[name] == made.json()[name]
    told = run(served, "p-0123abcd", "echo out; echo err >&2; exit 2")
    assert told.keys() >= RESULT | TIMES
    assert [told[k] for k in ("status", "stdout", "stderr", "exit_code")] == ["failed", "out\n", "err\n", 2]
    assert run(served, "p-0123abcd", "sleep 600", timeout_seconds=1)["status"] == "failed"
    lost = run(served, "p-0123abcd", "touch ran", cwd="/none")
    assert lost["status"] == "failed" and "/none" in lost["error"] and lost["exit_code"] is None
    content = base64.b64encode(b"\0\xff").decode()
    files = "/sandboxes/p-0123abcd/files"
    assert served.api.post(files, json={"path": "/tmp/d/f", "content": content}).json()["success"]
    assert served.api.get(files, params={"path": "/tmp/d/f"}).json()["content"] == content
    names = {f["name"] for f in served.api.get(f"{files}/list", params={"path": "/"}).json()["files"]}
    assert {"tmp", "workspace", "usr"} <= names
    assert served.api.post("/sandboxes/p-0123abcd/heartbeat").json()["status"] == "ok"
    patch = {"patch": "no patch", "timeout_seconds": 30}
    assert served.api.post("/sandboxes/p-0123abcd/apply_patch", json=patch).json()["success"] is False
    assert run(served, "p-0123abcd", "ls")["stdout"] == "", "what was refused twice ran never"
    assert served.api.delete("/sandboxes/p-0123abcd").json()["status"] == "deleted"


def test_an_image_that_is_not_there_fails_the_create(served: Served) -> None:
    """The client raises on every status but 503, which it would try again."""
    answer = served.api.post("/sandboxes", json={"image": "ubuntu:22.04", "block_network": True})
    assert answer.status_code == 422 and "images here: host" in answer.json()["detail"]


def test_services_of_later_releases_are_off(served: Served, sandbox: str) -> None:
    answer = served.api.post(f"/sandboxes/{sandbox}/services", json={"port": 8000})
    assert answer.status_code == 404
