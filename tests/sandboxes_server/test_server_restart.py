"""A server that is killed, started again, ended: what is kept, what is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from typing import Any

import pytest
from served import Served, ends

from openforge import cli


def keeper(server: Served) -> int:
    """The pid of the keeper of a server that has a sandbox, as the sandbox's label names it."""
    label = next(server.state.glob("sandboxes/*.json"))
    return int(json.loads(label.read_text())["owner"]["pid"])


def settled(server: Served, sandbox: str) -> dict[str, Any]:
    """A sandbox whose first process is being killed, once the server knows."""
    deadline = time.monotonic() + 30
    while (found := server.api.get(f"/sandboxes/{sandbox}").json())["ready"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found  # type: ignore[no-any-return]


def test_jobs_outlive_a_killed_server_and_run_once(own: Any) -> None:
    server: Served = own()
    sandboxes = [server.create(sandbox_id=f"box-{i}")["sandbox_id"] for i in range(3)]
    jobs = {}
    for i in range(9):  # three of each: one runs, two wait
        command = (
            f"echo begun-{i} >> log; until [ -e go ]; do sleep 0.01; done; echo out-{i}; echo err-{i} >&2; exit {i}"
        )
        asked = {"command": command, "job_id": f"job-{i}"}
        assert server.api.post(f"/sandboxes/{sandboxes[i % 3]}/exec", json=asked).status_code == 200
        jobs[f"job-{i}"] = i
    for sandbox in sandboxes:
        server.exec(sandbox, "until [ -e log ]; do sleep 0.01; done", parallel=True)
    server.kill()
    server.start()
    statuses = [server.api.get(f"/jobs/{j}").json()["status"] for j in jobs]
    assert statuses == ["running"] * 3 + ["queued"] * 6
    # A client that lost the answer asks again.
    again = server.api.post("/sandboxes/box-0/exec", json={"command": "true", "job_id": "job-0"})
    assert again.status_code == 409
    for sandbox in sandboxes:
        server.exec(sandbox, "touch go", parallel=True)
    for job, i in jobs.items():
        told = server.api.get(f"/jobs/{job}/wait").json()
        assert (told["stdout"], told["stderr"], told["exit_code"]) == (f"out-{i}\n", f"err-{i}\n", i)
    for n, sandbox in enumerate(sandboxes):
        assert server.exec(sandbox, "cat log")["stdout"].split() == [f"begun-{n + 3 * k}" for k in range(3)]


def test_a_start_on_a_port_in_use_costs_no_sandbox(own: Any, capsys: pytest.CaptureFixture[str]) -> None:
    server: Served = own()
    server.create(sandbox_id="kept")
    server.exec("kept", "echo here > file")
    server.kill()
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert cli.main(["sandboxes", "serve", "--state", str(server.state), "--no-key", "--port", port]) == 2
    assert f"cannot listen on 127.0.0.1, port {port}" in capsys.readouterr().err
    server.start()
    assert server.exec("kept", "cat file")["stdout"] == "here\n"


def test_a_job_that_ends_while_no_server_is_there(own: Any) -> None:
    server: Served = own()
    sandbox = server.create()["sandbox_id"]
    asked = {"command": "touch up; until [ -e go ]; do sleep 0.01; done; echo done", "job_id": "alone"}
    server.api.post(f"/sandboxes/{sandbox}/exec", json=asked)
    server.exec(sandbox, "until [ -e up ]; do sleep 0.01; done", parallel=True)
    server.kill()
    (work,) = server.state.glob("sandboxes/*/disk/work")
    (work / "go").touch()
    record = server.state / "jobs" / "alone.job"
    deadline = time.monotonic() + 30
    while b'"ended"' not in record.read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    server.start()
    told = server.api.get("/jobs/alone").json()
    assert (told["status"], told["stdout"]) == ("succeeded", "done\n")
    assert server.exec(sandbox, "ls")["stdout"] == "go\nup\n"


def test_a_running_job_is_cancelled_after_a_restart(own: Any) -> None:
    server: Served = own()
    sandbox = server.create()["sandbox_id"]
    server.api.post(f"/sandboxes/{sandbox}/exec", json={"command": "touch up; sleep 954", "job_id": "long"})
    server.exec(sandbox, "until [ -e up ]; do sleep 0.01; done", parallel=True)
    server.kill()
    server.start()
    assert server.api.delete("/jobs/long").status_code == 200
    assert server.api.get("/jobs/long").json()["error"] == "cancelled"
    assert "sleep 954" not in server.exec(sandbox, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")["stdout"]


def test_what_a_sandbox_is_survives(own: Any) -> None:
    server: Served = own("--allow", "127.0.0.1:*")
    asked = {"network": {"mode": "proxy"}, "labels": {"a": "b"}, "ttl_seconds": 1000, "sandbox_id": "kept"}
    made = server.create(**asked)
    server.create(sandbox_id="friend", companion_of="kept")
    route = {"port": 8080, "target": server.url.removeprefix("http://")}
    assert server.api.post("/sandboxes/kept/routes", json=route).status_code == 200
    port = server.url.rpartition(":")[2]
    server.options = (*server.options, "--port", port)  # the target of the route is the server itself
    server.kill()
    server.start()
    found = server.api.get("/sandboxes/kept").json()
    same = ("status", "labels", "network", "ttl_seconds", "created_at", "isolation")
    assert {k: found[k] for k in same} == {k: made[k] for k in same}
    command = "exec 3<>/dev/tcp/127.0.0.1/8080; printf 'GET /health HTTP/1.0\\r\\n\\r\\n' >&3; cat <&3"
    assert '"healthy"' in server.exec("kept", command)["stdout"]
    assert server.api.post("/sandboxes", json={"image": "host", "sandbox_id": "kept"}).status_code == 409
    server.api.delete("/sandboxes/kept")
    assert server.api.get("/sandboxes/friend").status_code == 404, "a companion goes along"


def test_a_sandbox_that_died_is_told_and_its_repeated_key_too(own: Any) -> None:
    server: Served = own()
    header = {"Idempotency-Key": "create-1"}
    made = server.api.post("/sandboxes", json={"wait": True}, headers=header).json()
    (label,) = server.state.glob("sandboxes/*.json")
    holder = json.loads(label.read_text())["holder"]["pid"]
    server.exec(made["sandbox_id"], "true")
    os.kill(holder, signal.SIGKILL)
    found = settled(server, made["sandbox_id"])
    assert found["status"] == "failed" and "died" in found["status_message"]
    answer = server.api.post(f"/sandboxes/{made['sandbox_id']}/exec", json={"command": "true"})
    assert (answer.status_code, answer.json()["code"]) == (404, "sandbox_lost")
    server.kill()
    server.start()
    again = server.api.post("/sandboxes", json={}, headers=header).json()
    assert (again["sandbox_id"], again["status"]) == (made["sandbox_id"], "failed")
    assert server.api.delete(f"/sandboxes/{made['sandbox_id']}").status_code == 200
    fresh = server.api.post("/sandboxes", json={"wait": True}, headers=header).json()
    assert fresh["status"] == "ready" and fresh["sandbox_id"] != made["sandbox_id"]


def test_a_killed_keeper_is_a_lost_sandbox_and_the_next_one_has_a_new_keeper(own: Any) -> None:
    server: Served = own()
    sandbox = server.create()["sandbox_id"]
    job = server.api.post(f"/sandboxes/{sandbox}/exec", json={"command": "sleep 955"}).json()["job_id"]
    os.kill(keeper(server), signal.SIGKILL)
    told = server.api.get(f"/jobs/{job}/wait", params={"timeout": 30}).json()
    assert (told["status"], told["code"]) == ("failed", "sandbox_lost")
    other = server.create()["sandbox_id"]
    assert server.exec(other, "echo new")["stdout"] == "new\n"
    assert settled(server, sandbox)["status"] == "failed"


def test_sigterm_leaves_nothing(own: Any) -> None:
    server: Served = own()
    for i in range(3):
        server.create(sandbox_id=f"s{i}")
        server.api.post(f"/sandboxes/s{i}/exec", json={"command": "trap '' TERM; setsid sleep 956 & sleep 957"})
    pidfds = [os.pidfd_open(keeper(server))]
    assert "every sandbox is deleted" in server.end()
    assert all(map(ends, pidfds))
    for pidfd in pidfds:
        os.close(pidfd)
    assert sorted(p.name for p in server.state.rglob("*")) == ["server.lock"]


def test_the_keeper_ends_when_no_server_comes_back(own: Any) -> None:
    server: Served = own("--grace", "0.2")
    server.create()
    pidfd = os.pidfd_open(keeper(server))
    server.kill()
    assert ends(pidfd)
    os.close(pidfd)
    server.start()
    (found,) = server.api.get("/sandboxes").json()["sandboxes"]
    assert (found["status"], found["ready"]) == ("failed", False)


def test_one_server_a_state_folder(own: Any) -> None:
    server: Served = own()
    with pytest.raises(AssertionError):
        Served(server.state)
    assert server.api.get("/health").status_code == 200


def test_a_sandbox_nobody_names_expires_and_one_with_a_job_does_not(own: Any) -> None:
    server: Served = own("--ttl", "0.4")
    forgotten, busy = server.create()["sandbox_id"], server.create()["sandbox_id"]
    job = server.api.post(f"/sandboxes/{busy}/exec", json={"command": "sleep 1.5; echo done"}).json()["job_id"]
    told = server.api.get(f"/jobs/{job}/wait", params={"timeout": 30}).json()
    assert told["stdout"] == "done\n"
    assert server.api.get(f"/sandboxes/{forgotten}").status_code == 404
