"""Every row of Orchard's REST protocol, and what ours adds to it. Expected values are the protocol's."""

from __future__ import annotations

import re
import uuid

import httpx
import pytest
from served import Served

ORCHARD_SANDBOX = (
    "sandbox_id",
    "namespace",
    "image",
    "pod_name",
    "block_network",
    "cpu",
    "memory",
    "created_at",
    "ready",
    "status",
    "status_message",
)


def test_the_open_rows_need_no_key(served: Served) -> None:
    with httpx.Client(base_url=served.url) as stranger:
        root = stranger.get("/").json()
        assert root["status"] == "running" and {"service", "version"} <= root.keys()
        assert stranger.get("/health").json() == {"status": "healthy"}


def test_keys(served: Served) -> None:
    with httpx.Client(base_url=served.url) as stranger:
        assert stranger.get("/sandboxes").status_code == 401
        assert stranger.get("/sandboxes", headers={"X-API-Key": "wrong-key-of-the-tests"}).status_code == 403
        assert stranger.get("/sandboxes", headers=[(b"X-API-Key", "schlüssel".encode())]).status_code == 403
        # The query is for WebSockets: URLs end up in logs.
        assert stranger.get("/sandboxes", params={"api_key": served.key}).status_code == 401


def test_every_answer_has_a_request_id(served: Served) -> None:
    ids = {served.api.get(path).headers["X-Request-ID"] for path in ("/health", "/sandboxes/none", "/no/such/path")}
    assert len({uuid.UUID(i) for i in ids}) == 3


def test_resources(served: Served, sandbox: str) -> None:
    told = served.api.get("/resources").json()
    assert told["status"] == "ok"
    (node,) = told["nodes"]
    assert {"name", "capacity", "allocatable"} <= node.keys() and node["capacity"]["cpu"] >= 1
    assert {p["name"] for p in told["sandbox_pods"]} >= {f"sandbox-{sandbox}"}
    for name in ("total_capacity", "total_allocatable", "total_requested", "available"):
        assert isinstance(told[name]["memory_bytes"], int) and told[name]["cpu"] >= 0


def test_create_wait_get_delete(served: Served) -> None:
    asked = {"image": "host", "block_network": True, "cpu": "500m", "memory": "256Mi", "timeout": 60}
    made = served.api.post("/sandboxes", json=asked).json()
    sandbox = made["sandbox_id"]
    assert re.fullmatch("[0-9a-f]{8}", sandbox)
    assert (made["status"], made["image"], made["block_network"], made["cpu"]) == ("pending", "host", True, "0.5")
    waited = served.api.get(f"/sandboxes/{sandbox}/wait", params={"timeout": 30}).json()
    assert set(ORCHARD_SANDBOX) <= waited.keys()
    assert (waited["ready"], waited["status"], waited["memory"]) == (True, "ready", "256Mi")
    assert waited["isolation"].startswith("bubblewrap")
    assert served.api.get(f"/sandboxes/{sandbox}").json()["ready"] is True
    for _ in range(2):
        gone = served.api.delete(f"/sandboxes/{sandbox}")
        assert (gone.status_code, gone.json()) == (200, {"status": "deleted", "sandbox_id": sandbox})
    for method, path in (("GET", ""), ("GET", "/wait"), ("POST", "/heartbeat"), ("GET", "/files?path=x")):
        answer = served.api.request(method, f"/sandboxes/{sandbox}{path}")
        assert (answer.status_code, answer.json()["code"]) == (404, "unknown"), path
    answer = served.api.post(f"/sandboxes/{sandbox}/exec", json={"command": "true"})
    assert answer.status_code == 404 and sandbox in answer.json()["detail"]


def test_the_list_by_labels(served: Served) -> None:
    one = served.create(labels={"run": "r1", "step": "a=b"})["sandbox_id"]
    two = served.create(labels={"run": "r1"})["sandbox_id"]

    def listed(*labels: str) -> set[str]:
        answer = served.api.get("/sandboxes", params=[("label", label) for label in labels]).json()
        return {s["sandbox_id"] for s in answer["sandboxes"]}

    assert listed("run=r1") == {one, two}
    assert listed("run=r1", "step=a=b") == {one}
    assert listed("run=r2") == set()
    assert served.api.get("/sandboxes", params={"label": "run"}).status_code == 422
    for sandbox in (one, two):
        served.api.delete(f"/sandboxes/{sandbox}")
    assert listed("run=r1") == set()


def test_heartbeat_renews(served: Served) -> None:
    sandbox = served.create(ttl_seconds=100)["sandbox_id"]
    before = served.api.get(f"/sandboxes/{sandbox}").json()["expires_at"]
    answer = served.api.post(f"/sandboxes/{sandbox}/heartbeat")
    assert (answer.json()["status"], answer.json()["sandbox_id"]) == ("ok", sandbox)
    assert answer.json()["expires_at"] >= before
    later = served.api.post(f"/sandboxes/{sandbox}/heartbeat", json={"ttl_seconds": 1000}).json()
    assert later["expires_at"] > before + 800
    served.api.delete(f"/sandboxes/{sandbox}")


def test_jobs_without_wait(served: Served, sandbox: str) -> None:
    answer = served.api.post(f"/sandboxes/{sandbox}/exec", json={"command": "read x; echo late"}).json()
    assert answer["status"] == "queued" and set(answer) == {"job_id", "status"}
    job = served.api.get(f"/jobs/{answer['job_id']}/wait", params={"timeout": 30}).json()
    assert (job["status"], job["stdout"], job["exit_code"], job["sandbox_id"]) == ("succeeded", "late\n", 0, sandbox)
    assert job["created_at"] <= job["started_at"] <= job["completed_at"]
    assert served.api.get(f"/jobs/{answer['job_id']}").json() == job
    assert served.api.get("/jobs/none").status_code == 404


def test_an_expired_wait_is_no_error(served: Served, sandbox: str) -> None:
    made = served.api.post(f"/sandboxes/{sandbox}/exec", json={"command": "echo early; sleep 600"}).json()["job_id"]
    job = served.api.get(f"/jobs/{made}/wait", params={"timeout": "0.05"})
    assert (job.status_code, job.json()["exit_code"]) == (200, None)
    assert job.json()["status"] in ("queued", "running")
    assert served.api.delete(f"/jobs/{made}").status_code == 200
    ended = served.api.get(f"/jobs/{made}").json()
    assert (ended["status"], ended["error"], ended["timed_out"]) == ("failed", "cancelled", False)


def test_a_cancelled_job_in_the_queue_never_runs(served: Served, sandbox: str) -> None:
    first = served.api.post(f"/sandboxes/{sandbox}/exec", json={"command": "sleep 600"}).json()["job_id"]
    second = served.api.post(f"/sandboxes/{sandbox}/exec", json={"command": "touch ran"}).json()["job_id"]
    for job in (second, first):
        served.api.delete(f"/jobs/{job}")
    assert served.api.get(f"/jobs/{second}").json()["code"] == "cancelled"
    assert served.exec(sandbox, "ls")["stdout"] == ""


def test_apply_patch(served: Served, sandbox: str) -> None:
    patch = "--- a/f\n+++ b/f\n@@ -1 +1 @@\n-old\n+EOF\n"
    served.exec(sandbox, "echo old > f")
    done = served.api.post(f"/sandboxes/{sandbox}/apply_patch", json={"patch": patch}).json()
    assert (done["success"], done["exit_code"]) == (True, 0)
    assert served.exec(sandbox, "cat f")["stdout"] == "EOF\n"
    again = served.api.post(f"/sandboxes/{sandbox}/apply_patch", json={"patch": patch})
    assert again.status_code == 200 and again.json()["success"] is False and "f" in again.json()["stderr"]


def test_capabilities(served: Served) -> None:
    told = served.api.get("/capabilities").json()
    assert told == served.api.get("/").json()["capabilities"]
    assert (told["api"], told["networks"], told["allow"]) == (1, ["none", "proxy"], ["127.0.0.1:*", "localhost:9"])
    assert told["quota"]["max_sandboxes"] == 256 and told["limits"]["open_files"] > 0


@pytest.mark.parametrize("method", ["PUT", "PATCH"])
def test_other_methods(served: Served, method: str) -> None:
    assert served.api.request(method, "/sandboxes").status_code == 405
