"""What is refused, and how it is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from served import Served

from openforge import cli


def refused(answer: Any, status: int, *words: str) -> None:
    assert answer.status_code == status, answer.text
    detail = str(answer.json()["detail"])
    for word in words:
        assert word in detail, detail


@pytest.mark.parametrize("name", ["Upper", "under_score", "-a", "a-", "", "a" * 64, "a.b", "../x", "ä"])
def test_ids_that_are_no_labels(served: Served, name: str) -> None:
    refused(served.api.post("/sandboxes", json={"image": "host", "sandbox_id": name}), 422, "DNS label")


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"image": "ubuntu:22.04"}, 422, ["ubuntu:22.04", "images here: host"]),
        ({"cpu": "many"}, 422, ["cpu 'many'", "500m"]),
        ({"cpu": "0"}, 422, ["cpu '0'"]),
        ({"memory": "16GB"}, 422, ["memory '16GB'", "16Gi"]),
        ({"timeout": -1}, 422, ["timeout"]),
        ({"ttl_second": 5}, 422, ["ttl_second", "Extra inputs"]),
        ({"block_network": False}, 403, ["host's network", "--open-network"]),
        ({"network": {"mode": "proxy", "allow": ["example.com:443"]}}, 403, ["example.com:443", "127.0.0.1:*"]),
        ({"network": {"mode": "none", "allow": ["127.0.0.1:1"]}}, 422, ["no effect"]),
        ({"network": {"mode": "proxy", "allow": ["127.0.0.1"]}}, 422, ["HOST:PORT"]),
        ({"binds": [{"host": "/etc"}]}, 403, ["/etc", "shares"]),
        ({"limits": {"open_file": 1}}, 422, ["open_file", "open_files"]),
        ({"companion_of": "nobody"}, 404, ["nobody"]),
        ({"labels": {"a": 1}}, 422, ["labels"]),
        ({"labels": {"a=b": "1"}}, 422, ["labels", "a=b"]),
    ],
)
def test_what_a_create_may_not_ask_for(served: Served, fields: Any, status: int, words: list[str]) -> None:
    refused(served.api.post("/sandboxes", json=fields), status, *words)


def test_bodies_that_are_no_json(served: Served, sandbox: str) -> None:
    for body in (b"", b"{", b"[]", b'"x"', b"\xff"):
        refused(served.api.post("/sandboxes", content=body), 422)
        refused(served.api.post(f"/sandboxes/{sandbox}/exec", content=body), 422)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, ["command"]),
        ({"command": ""}, ["empty"]),
        ({"command": []}, ["command"]),
        ({"command": [""]}, ["empty"]),
        ({"command": "a\0b"}, ["NUL"]),
        ({"command": "true", "env": {"A=B": "x"}}, ["env"]),
        ({"command": "true", "env": {"A": 1}}, ["env"]),
        ({"command": "true", "timeout_seconds": 0}, ["timeout_seconds"]),
        ({"command": "true", "timeout_seconds": "soon"}, ["timeout_seconds"]),
        ({"command": "true", "timeout_seconds": 1e18}, ["timeout_seconds", "less than or equal to 1000000"]),
        ({"command": "true", "stdin": "*"}, ["stdin", "base64"]),
        ({"command": "true", "job_id": "a/b"}, ["job_id", "a/b"]),
        ({"command": "true", "job_id": "../../x"}, ["job_id"]),
        ({"command": "true", "timeout": 5}, ["timeout", "Extra inputs"]),
    ],
)
def test_commands_that_make_no_sense(served: Served, sandbox: str, fields: Any, words: list[str]) -> None:
    refused(served.api.post(f"/sandboxes/{sandbox}/exec", json={**fields, "wait": True}), 422, *words)


def test_an_id_twice_and_a_key_twice(served: Served) -> None:
    asked = {"image": "host", "sandbox_id": "twice", "wait": True}
    assert served.api.post("/sandboxes", json=asked).status_code == 200
    refused(served.api.post("/sandboxes", json=asked), 409, "twice", "exists already")
    header = {"Idempotency-Key": "the-key"}
    first = served.api.post("/sandboxes", json={"wait": True, "labels": {"n": "1"}}, headers=header).json()
    again = served.api.post("/sandboxes", json={"labels": {"n": "1"}}, headers=header)
    assert (again.status_code, again.json()["sandbox_id"]) == (200, first["sandbox_id"])
    refused(served.api.post("/sandboxes", json={"labels": {"n": "2"}}, headers=header), 409, "the-key")
    for sandbox in ("twice", first["sandbox_id"]):
        served.api.delete(f"/sandboxes/{sandbox}")
    assert served.api.post("/sandboxes", json=asked).status_code == 200, "a deleted id is free"
    served.api.delete("/sandboxes/twice")


def test_an_empty_key_names_nothing(served: Served, sandbox: str) -> None:
    empty = {"Idempotency-Key": ""}
    refused(served.api.post("/sandboxes", json={}, headers=empty), 422, "Idempotency-Key", "empty")
    refused(served.api.post(f"/sandboxes/{sandbox}/exec", json={"command": "true"}, headers=empty), 422, "empty")
    # What comes without a key afterwards is not held against it.
    assert served.exec(sandbox, "echo other")["stdout"] == "other\n"
    served.api.delete(f"/sandboxes/{served.create(labels={'other': '1'})['sandbox_id']}")


def test_a_status_that_is_none(served: Served) -> None:
    refused(served.api.get("/sandboxes", params={"status": "alive"}), 422, "'alive'", "pending, ready, failed")


def test_quotas(own: Any) -> None:
    server: Served = own("--max-sandboxes", "2", "--cpu", "3", "--memory", "4Gi")
    first = server.create(cpu="2", memory="1Gi")["sandbox_id"]
    full = server.api.post("/sandboxes", json={"cpu": "1500m"})
    refused(full, 429, "cores: 2 of 3, 1.5 more")
    assert int(full.headers["Retry-After"]) > 0
    refused(server.api.post("/sandboxes", json={"cpu": "1", "memory": "3.5Gi"}), 429, "memory")
    server.create(cpu="1", memory="3Gi")
    refused(server.api.post("/sandboxes", json={"cpu": "10m", "memory": "8Mi"}), 429, "sandboxes: 2 of 2")
    server.api.delete(f"/sandboxes/{first}")
    server.create(cpu="2", memory="1Gi")


def test_what_the_command_line_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.delenv("API_KEYS", raising=False)
    monkeypatch.delenv("SANDBOX_BASE_URL", raising=False)
    serve = ["sandboxes", "serve", "--state", str(tmp_path / "s"), "--port", "0"]
    for options, words in (
        (["--no-key", "--host", "0.0.0.0"], "only this machine may reach"),
        (["--allow", "nowhere"], "HOST:PORT"),
        (["--share", str(tmp_path / "none")], "no folder"),
        (["--image", "x"], "NAME=FILE"),
        (["--max-sandboxes", "0"], "--max-sandboxes is 0"),
        (["--ttl", "nan"], "--ttl is nan"),
        (["--port", "70000"], "--port is 70000"),
        (["--memory", "much"], "memory 'much'"),
        (["--host", "256.0.0.1"], "cannot listen on 256.0.0.1"),
    ):
        assert cli.main([*serve, *options]) == 2, options
        assert words in capsys.readouterr().err, options
    monkeypatch.setenv("API_KEYS", "short")
    assert cli.main(serve) == 2
    assert "16 characters" in capsys.readouterr().err
    assert cli.main(["sandboxes", "list"]) == 2
    assert "SANDBOX_BASE_URL is not set" in capsys.readouterr().err
    monkeypatch.setenv("SANDBOX_BASE_URL", "http://127.0.0.1:1")
    assert cli.main(["sandboxes", "reap"]) == 2
    assert "--label" in capsys.readouterr().err
    assert cli.main(["sandboxes", "list"]) == 2
    assert "does not answer" in capsys.readouterr().err


def test_list_and_reap(served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("SANDBOX_BASE_URL", served.url)
    monkeypatch.setenv("SANDBOX_API_KEY", served.key)
    one = served.create(labels={"run": "reap-me"})["sandbox_id"]
    other = served.create(labels={"run": "not-me"})["sandbox_id"]
    assert cli.main(["sandboxes", "list", "--label", "run=reap-me"]) == 0
    assert capsys.readouterr().out.split()[:3] == [one, "ready", "host"]
    assert cli.main(["sandboxes", "reap", "--label", "run=reap-me"]) == 0
    assert capsys.readouterr().out == f"deleted {one}\n"
    assert served.api.get(f"/sandboxes/{one}").status_code == 404
    assert served.api.get(f"/sandboxes/{other}").json()["ready"]
    served.api.delete(f"/sandboxes/{other}")
