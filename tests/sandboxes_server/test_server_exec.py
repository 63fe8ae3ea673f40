from __future__ import annotations

import base64
import concurrent.futures

from served import Served


def test_strings_lists_and_login_shells(served: Served, sandbox: str) -> None:
    assert served.exec(sandbox, "echo {a,b}")["stdout"] == "a b\n"
    # Orchard joins a list with spaces, and its quoting is lost.
    assert served.exec(sandbox, ["printf", "%s|", "a b", "$HOME", ";"])["stdout"] == "a b|$HOME|;|"
    served.exec(sandbox, "echo 'export FROM_RC=yes' > ~/.bashrc")
    assert served.exec(sandbox, "echo $FROM_RC")["stdout"] == "\n"
    assert served.exec(sandbox, ". ~/.bashrc; echo $FROM_RC")["stdout"] == "yes\n"
    served.exec(sandbox, "echo 'export FROM_PROFILE=yes' > ~/.profile")
    assert served.exec(sandbox, "echo $FROM_PROFILE", login_shell=True)["stdout"] == "yes\n"
    assert served.exec(sandbox, ["printf", "%s|", "a b"], login_shell=True)["stdout"] == "a b|"


def test_folder_environment_and_stdin(served: Served, sandbox: str) -> None:
    told = served.exec(sandbox, "echo $A $PWD; cat", env={"A": "x y"}, stdin=base64.b64encode(b"given").decode())
    assert told["stdout"] == "x y /workspace\ngiven"
    assert served.exec(sandbox, "pwd; cat", cwd="/tmp")["stdout"] == "/tmp\n", "without stdin it is empty"


def test_a_cwd_that_is_no_folder_is_told(served: Served, sandbox: str) -> None:
    served.exec(sandbox, "touch file")
    for cwd in ("/nope", "file"):
        asked = {"command": "touch ran", "cwd": cwd, "wait": True}
        answer = served.api.post(f"/sandboxes/{sandbox}/exec", json=asked)
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid")
        assert cwd in answer.json()["detail"]
    assert "ran" not in served.exec(sandbox, "ls")["stdout"]


def test_ends(served: Served, sandbox: str) -> None:
    assert served.exec(sandbox, "exit 3")["status"] == "failed"
    killed = served.exec(sandbox, "kill -9 $$")
    assert (killed["exit_code"], killed["error"]) == (-9, None)
    # A program's own 124 is no time-out.
    own = served.exec(sandbox, "exit 124")
    assert (own["exit_code"], own["timed_out"], own["error"]) == (124, False, None)
    assert served.exec(sandbox, ["no-such-program"])["exit_code"] == 127


def test_a_time_out_ends_the_command_and_all_it_started_and_nothing_else(served: Served, sandbox: str) -> None:
    command = "echo first; trap '' TERM; (setsid sleep 951 &) ; sleep 952"
    told = served.exec(sandbox, command, timeout_seconds=0.3)
    assert (told["status"], told["exit_code"], told["timed_out"], told["stdout"]) == ("failed", None, True, "first\n")
    assert "timed out after 0.3 s" in told["error"]
    alive = served.exec(sandbox, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    assert alive["status"] == "succeeded" and "sleep 95" not in alive["stdout"]


def test_a_daemon_that_keeps_the_output_open_is_not_waited_for(served: Served, sandbox: str) -> None:
    told = served.exec(sandbox, "sleep 953 & echo up")
    assert told["stdout"] == "up\n"
    assert "sleep 953" in served.exec(sandbox, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")["stdout"]
    assert served.api.post(f"/sandboxes/{sandbox}/end_processes").json()["status"] == "ok"
    assert "sleep 953" not in served.exec(sandbox, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")["stdout"]


def test_long_outputs_keep_their_start_and_their_end(served: Served, sandbox: str) -> None:
    half = 1 << 19
    told = served.exec(sandbox, f"echo start; head -c {4 * half} /dev/zero; echo end; echo e >&2")
    written = len("start\n") + 4 * half + len("end\n")
    left_out = written - 2 * half
    assert told["stdout_bytes"] == written and told["stderr"] == "e\n"
    assert told["stdout"].startswith("start\n") and told["stdout"].endswith("end\n")
    assert f"\n[... {left_out} bytes left out ...]\n" in told["stdout"]
    assert len(told["stdout"]) == 2 * half + len(f"\n[... {left_out} bytes left out ...]\n")


def test_bytes_that_are_no_text(served: Served, sandbox: str) -> None:
    assert served.exec(sandbox, r"printf 'a\377\033[2J'")["stdout"] == "a\ufffd\033[2J"
    told = served.exec(sandbox, r"printf 'a\377'; printf '\376' >&2", encoding="base64")
    assert (base64.b64decode(told["stdout"]), base64.b64decode(told["stderr"])) == (b"a\xff", b"\xfe")
    again = served.api.get(f"/jobs/{told['job_id']}", params={"encoding": "base64"}).json()
    assert again["stdout"] == told["stdout"]


def test_commands_of_a_sandbox_take_turns_in_their_order(served: Served, sandbox: str) -> None:
    command = "mkdir busy && echo {} >> order && sleep 0.01 && rmdir busy"
    jobs = [
        served.api.post(f"/sandboxes/{sandbox}/exec", json={"command": command.format(i)}).json()["job_id"]
        for i in range(8)
    ]
    assert {served.api.get(f"/jobs/{j}/wait").json()["exit_code"] for j in jobs} == {0}
    assert served.exec(sandbox, "cat order")["stdout"].split() == [str(i) for i in range(8)]


def test_a_parallel_command_waits_for_no_other(served: Served, sandbox: str) -> None:
    first = served.api.post(
        f"/sandboxes/{sandbox}/exec", json={"command": "until [ -e go ]; do sleep 0.01; done"}
    ).json()
    assert served.exec(sandbox, "touch go", parallel=True)["exit_code"] == 0
    assert served.api.get(f"/jobs/{first['job_id']}/wait").json()["exit_code"] == 0


def test_time_in_the_queue_does_not_count(served: Served, sandbox: str) -> None:
    first = served.api.post(f"/sandboxes/{sandbox}/exec", json={"command": "sleep 0.7"}).json()
    told = served.exec(sandbox, "echo ran", timeout_seconds=0.5)
    assert served.api.get(f"/jobs/{first['job_id']}").json()["completed_at"] <= told["started_at"]
    assert (told["stdout"], told["timed_out"]) == ("ran\n", False)


def test_a_submission_that_is_repeated_runs_once(served: Served, sandbox: str) -> None:
    asked = {"command": "echo x >> count; wc -l < count", "wait": True, "job_id": "job.of-mine_1"}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: served.api.post(f"/sandboxes/{sandbox}/exec", json=asked), range(8)))
    assert {(a.status_code, a.json()["job_id"], a.json()["stdout"]) for a in answers} == {(200, "job.of-mine_1", "1\n")}
    other = served.api.post(f"/sandboxes/{sandbox}/exec", json={**asked, "command": "true"})
    assert (other.status_code, other.json()["code"]) == (409, "exists")
    header = {"Idempotency-Key": "k1"}
    unnamed = {"command": "echo x >> count; wc -l < count", "wait": True}
    for _ in range(2):
        answer = served.api.post(f"/sandboxes/{sandbox}/exec", json=unnamed, headers=header)
        assert answer.json()["stdout"] == "2\n"
    assert (
        served.api.post(f"/sandboxes/{sandbox}/exec", json=asked | {"job_id": None}, headers=header).status_code == 200
    )
    other = served.api.post(f"/sandboxes/{sandbox}/exec", json={"command": "true"}, headers=header)
    assert other.status_code == 409
