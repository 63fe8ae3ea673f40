"""`openforge doctor`: one line a check, an exit code that says whether the demo would run, and never a traceback."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from openforge import cli, machine, software
from openforge.sandboxes import bwrap
from openforge.verbs import doctor, node

WORKS = {"bwrap": "/usr/bin/bwrap", "version": "0.8.0", "kernel": "6.1.0", "works": True, "why": None}


@pytest.fixture
def place(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine on which the demo would run, whatever this one has."""
    monkeypatch.setattr(bwrap, "probe", lambda: WORKS)
    monkeypatch.setattr(machine, "lacks", lambda root=".": "")
    for name in ("memory", "bubblewrap", "python", "system"):
        monkeypatch.setattr(machine, name, lambda: "")
    monkeypatch.setattr(machine, "disk", lambda root=".": "")
    monkeypatch.setattr(node, "memory", lambda: (32 << 30, 30 << 30, 1 << 62))
    monkeypatch.setattr(node, "disk_free", lambda path: 10**11)
    return project


def looked(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, dict[str, str]]]:
    """Exit code and checks by name, both of --json."""
    code = cli.main(["doctor", "--json"])
    out, err = capsys.readouterr()
    assert err == ""
    found = json.loads(out)
    assert found["would_run_demo"] == (code == 0)
    return code, {c["name"]: c for c in found["checks"]}


def test_a_machine_that_will_do(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "make demo would run here"
    assert all(re.match(r"(ok     |note   ) \S", line) for line in lines[:-1])
    names = {line[8:30].strip() for line in lines[:-1]}
    assert names >= {
        *("python", "snakemake", "isolation", "user namespaces", "cgroups", "memory", "disk of results", "cpu", "gpu"),
        *("ports", "scheduler", "results folder", "shared memory", "open files", "clock"),
    }
    assert not list((place / "results").glob(".doctor-*"))


def test_half_broken_place(place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """No bubblewrap, no software environments, read-only results: three kinds of line, exit code 1."""
    monkeypatch.undo()
    monkeypatch.chdir(place)
    shutil.copytree(Path(__file__).parents[2] / "envs", place / "envs")
    monkeypatch.setattr(shutil, "which", lambda name, *a, **k: None)

    def refuse(*args: object, **kwargs: object) -> str:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(place / "results"))

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    code, checks = looked(capsys)
    assert code == 1
    assert checks["isolation"]["state"] == "missing" and "bubblewrap is not installed" in checks["isolation"]["says"]
    assert checks["isolation"]["ask"] == "the package bubblewrap"
    results = checks["results folder"]
    assert results["state"] == "missing" and results["says"].endswith(
        "results cannot be written: Read-only file system"
    )
    assert "snakemake software_serve_cpu" in checks["serve-cpu"]["says"]
    assert checks["serve-cpu"]["state"] == "note"


def test_namespaces_refused(place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    why = bwrap.explain("bwrap: No permissions to create a new namespace")
    monkeypatch.setattr(bwrap, "probe", lambda: WORKS | {"works": False, "why": why})
    settings = {"user.max_user_namespaces": 0, "kernel.apparmor_restrict_unprivileged_userns": 1}
    monkeypatch.setattr(node, "user_namespaces", lambda: settings)
    code, checks = looked(capsys)
    assert code == 1 and "does not let bubblewrap make user namespaces" in checks["isolation"]["says"]
    assert checks["user namespaces"]["ask"] == (
        "sysctl -w user.max_user_namespaces=15000 kernel.apparmor_restrict_unprivileged_userns=0"
    )


def test_memory_of_a_container(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "memory", lambda: (32 << 30, 30 << 30, 4 << 30))
    code, checks = looked(capsys)
    assert (code, checks["memory"]["state"]) == (1, "missing")
    assert checks["memory"]["says"].endswith("this process's cgroup may use 4.0")


def test_too_little_disk(place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "disk_free", lambda path: 10**8)
    code, checks = looked(capsys)
    assert code == 1 and checks["disk of results"]["state"] == "missing"
    assert checks["disk of results"]["says"].startswith("The demo writes 8.0 GB, 100 MB are free in ")
    assert checks["disk of temporaries"]["state"] == "note"


def test_no_place_for_temporaries(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    code, checks = looked(capsys)
    assert code == 1 and checks["disk of results"]["state"] == "ok"
    assert checks["disk of temporaries"]["state"] == "missing"


def test_a_loopback_that_is_down(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: socket.socket, address: object) -> None:
        raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))

    monkeypatch.setattr(socket, "socket", type("Socket", (socket.socket,), {"bind": refuse}))
    code, checks = looked(capsys)
    assert (code, checks["ports"]["state"]) == (1, "missing")


def test_ports_that_are_taken_are_not_free() -> None:
    with socket.socket() as s:
        port = next(p for p in range(20000, 32768) if _binds(s, p))
        s.listen()
        sentence, taken = node.ports()
        assert sentence == "" and port < 32768
    # Others come and go meanwhile, but not thousands of them.
    assert 25000 < taken < 32768 - 1024


def _binds(s: socket.socket, port: int) -> bool:
    try:
        s.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True


def test_a_file_system_without_locks(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    code, checks = looked(capsys)
    assert code == 1 and "flock does not work (No locks available)" in checks["results folder"]["says"]
    monkeypatch.setattr(fcntl, "flock", lambda fd, operation: None)
    assert "does not keep a second process out" in looked(capsys)[1]["results folder"]["says"]


def test_a_clock_that_was_never_set(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "clock_skew", lambda folder: 0.0)
    monkeypatch.setattr(time, "time", lambda: 86400.0)
    code, checks = looked(capsys)
    assert code == 1 and checks["clock"]["state"] == "missing"


def test_gpus_and_scheduler(place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    tools = place / "tools"
    tools.mkdir()
    for name, line in (("nvidia-smi", "NVIDIA H100, 81559 MiB, 550.54"), ("sbatch", ""), ("squeue", "")):
        (tools / name).write_text(f"#!/bin/sh\necho '{line}'\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    code, checks = looked(capsys)
    assert code == 0
    assert checks["gpu"] == {"name": "gpu", "state": "ok", "says": "NVIDIA H100, 81559 MiB, driver 550.54", "ask": ""}
    assert checks["scheduler"]["says"] == "SLURM: sbatch and squeue found, this is SLURM job 17"


def test_software_environments(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "envs").mkdir()
    for name in ("serve-cpu", "train-cpu", "harness-pi", "harness-mini"):
        (place / "envs" / f"{name}.txt").write_text("x==1\n")
    digest = software.pins_digest("serve-cpu", place)
    for name, text in (
        ("serve-cpu", json.dumps({"pins": digest})),
        ("train-cpu", '{"pins": "old"}'),
        ("harness-pi", "{"),
    ):
        (place / ".software" / name).mkdir(parents=True)
        (place / ".software" / name / "ready.json").write_text(text)
    code, checks = looked(capsys)
    assert code == 0
    assert [checks[n]["state"] for n in ("serve-cpu", "train-cpu", "harness-pi", "harness-mini")] == [
        "ok",
        *["note"] * 3,
    ]
    assert "was built from other pins" in checks["train-cpu"]["says"]
    assert "cannot be read" in checks["harness-pi"]["says"]
    assert "is not built" in checks["harness-mini"]["says"]


def test_open_files(place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (1024, 524288))
    check = looked(capsys)[1]["open files"]
    assert (check["state"], check["ask"]) == ("note", "ulimit -n 4096 (type it yourself)")


def test_a_check_that_fails_in_a_way_of_its_own_is_a_line(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise RuntimeError("a kernel\nof another kind")

    for name in ("cpu", "scheduler", "shared_memory"):
        monkeypatch.setattr(node, name, broken)
    code, checks = looked(capsys)
    assert code == 0
    for name in ("cpu", "scheduler", "shared memory"):
        assert checks[name]["says"] == "could not be looked at (RuntimeError: a kernel of another kind)"


def test_limits_are_read_from_cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tightest limit of this process's cgroup and of those above it."""
    own = tmp_path / "job" / "step"
    own.mkdir(parents=True)
    (tmp_path / "cgroup.controllers").touch()
    (own / "memory.max").write_text("max\n")
    (own.parent / "memory.max").write_text("4294967296\n")
    (own / "cpu.max").write_text("150000 100000\n")
    monkeypatch.setattr(node, "CGROUPS", tmp_path)
    monkeypatch.setattr(node, "_own_cgroup", lambda controller: own)
    assert node.memory()[2] == 4 << 30
    assert node.cpu()[2] == 1.5


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the real thing, where the tests of the sandbox run as well."""
    monkeypatch.chdir(Path(__file__).parents[2])
    states = {c.name: c.state for c in doctor.look(Path.cwd())}
    assert {states[n] for n in ("python", "isolation", "user namespaces", "results folder", "ports", "clock")} == {"ok"}
    total = int(subprocess.run(["getconf", "_PHYS_PAGES"], capture_output=True, text=True, check=True).stdout)
    assert abs(node.memory()[0] / (total * os.sysconf("SC_PAGE_SIZE")) - 1) < 0.05
