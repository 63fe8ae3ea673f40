"""What is kept from one job of a sandbox for the next, and what an agent may do to it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path

import pytest
from served import Served


def supervisor(served: Served, sandbox: str) -> str:
    return str(served.exec(sandbox, "echo $PPID")["stdout"]).strip()


def outside(served: Served, sandbox: str, pid: str) -> int:
    """The pid here of a process of the sandbox."""
    label = next(served.state.glob(f"sandboxes/{sandbox}*.json"))
    namespace = os.readlink(f"/proc/{json.loads(label.read_text())['holder']['pid']}/ns/pid")
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{name}/status").read_text()
            inside = status.split("NSpid:")[1].split("\n")[0].split()[-1]
            if inside == pid and os.readlink(f"/proc/{name}/ns/pid") == namespace:
                return int(name)
    raise AssertionError(f"no process {pid} in {sandbox}")


def test_jobs_in_a_row_have_one_supervisor_and_nothing_else_in_common(served: Served, sandbox: str) -> None:
    first = supervisor(served, sandbox)
    served.exec(sandbox, "cd /; ulimit -n 10; umask 0; export LEFT=yes; exec 9<&0", cwd="/tmp", env={"A": "x"})
    told = served.exec(sandbox, "echo $A$LEFT $PWD $(umask) $(ulimit -n); ls /proc/self/fd | tr '\\n' ' '")
    fresh = served.exec(served.create()["sandbox_id"], "echo $A$LEFT $PWD $(umask) $(ulimit -n); echo")
    assert told["stdout"].splitlines()[0] == fresh["stdout"].splitlines()[0]
    assert told["stdout"].splitlines()[1].split() == ["0", "1", "2", "3"], "3 is the folder that ls reads"
    assert supervisor(served, sandbox) == first
    assert served.exec(sandbox, "kill -9 $PPID; sleep 60")["exit_code"] == -9
    assert supervisor(served, sandbox) != first


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_supervisor_that_is_hit_between_jobs_holds_nothing_up(
    served: Served, sandbox: str, number: signal.Signals
) -> None:
    """The signal comes from here, at a moment that is known; the agent can send the same."""
    os.kill(outside(served, sandbox, supervisor(served, sandbox)), number)
    assert served.exec(sandbox, "echo fine", timeout_seconds=20)["stdout"] == "fine\n"
    assert served.api.delete(f"/sandboxes/{sandbox}").status_code == 200


def test_a_daemon_is_not_the_next_jobs(served: Served, sandbox: str) -> None:
    served.exec(sandbox, "setsid sleep 961 >/dev/null 2>&1 &")
    assert served.exec(sandbox, "sleep 60", timeout_seconds=0.2)["exit_code"] is None
    listed = served.exec(sandbox, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")["stdout"]
    assert "sleep 961" in listed and "sleep 60" not in listed
