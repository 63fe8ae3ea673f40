from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from openforge.sandboxes import LocalSandbox, SandboxFileError, local_sandbox


async def test_strings_go_through_bash_and_lists_do_not(sandbox: LocalSandbox) -> None:
    assert (await sandbox.exec("echo {a,b} $0")).stdout == b"a b /bin/bash\n"
    assert (await sandbox.exec(["printf", "%s|", "a b", "$HOME", "é"])).stdout == "a b|$HOME|é|".encode()


async def test_the_streams_are_bytes_and_apart(sandbox: LocalSandbox) -> None:
    data = bytes(range(256)) * 1000
    result = await sandbox.exec("cat; echo problem >&2; exit 3", stdin=data)
    assert (result.exit_code, result.stdout, result.stderr) == (3, data, b"problem\n")
    assert not result.timed_out
    assert (await sandbox.exec("cat")).stdout == b"", "without stdin it is empty"


async def test_environment_and_folder(sandbox: LocalSandbox) -> None:
    result = await sandbox.exec("echo $A $HOME $PWD", env={"A": "x y"})
    assert result.stdout == b"x y /home/agent /workspace\n"
    await sandbox.exec("mkdir 'a b'")
    assert (await sandbox.exec("pwd", cwd="a b")).stdout == b"/workspace/a b\n"
    assert (await sandbox.exec("pwd", cwd="/tmp")).stdout == b"/tmp\n"
    with pytest.raises(SandboxFileError, match="/workspace/nowhere inside the sandbox: No such file"):
        await sandbox.exec("pwd", cwd="nowhere")


async def test_exit_codes(sandbox: LocalSandbox) -> None:
    assert (await sandbox.exec("kill -9 $$")).exit_code == -9
    assert (await sandbox.exec("exit 124")).exit_code == 124
    missing = await sandbox.exec(["no-such-program"])
    assert missing.exit_code == 127 and b"no-such-program: No such file" in missing.stderr
    assert (await sandbox.exec(["/etc/passwd"])).exit_code == 126


async def test_long_output_keeps_its_start_and_end(sandbox: LocalSandbox, tmp_path: Path) -> None:
    log = tmp_path / "log"
    result = await sandbox.exec("echo first; head -c 5000000 /dev/zero | tr '\\0' x; echo last", log=log)
    assert len(result.stdout) < (1 << 20) + 100
    assert result.stdout.startswith(b"first\nxxx") and result.stdout.endswith(b"xxxlast\n")
    left_out = 6 + 5_000_000 + 5 - (1 << 20)
    assert f"\n[... {left_out} bytes left out ...]\n".encode() in result.stdout
    assert log.read_bytes() == b"first\n" + b"x" * 5_000_000 + b"last\n"


async def test_a_log_is_appended_to_as_output_comes(sandbox: LocalSandbox, tmp_path: Path) -> None:
    log = tmp_path / "log"
    await sandbox.exec("echo one; echo two >&2", log=log)
    task = asyncio.create_task(sandbox.exec("echo three; until [ -e go ]; do sleep 0.02; done", log=log))
    while b"three" not in log.read_bytes():
        await asyncio.sleep(0.01)
    assert not task.done()
    await sandbox.exec("touch go")
    assert (await task).stdout == b"three\n"
    assert sorted(log.read_text().split()) == ["one", "three", "two"]


async def test_a_timeout_kills_all_descendants_whatever_session_they_made(sandbox: LocalSandbox) -> None:
    command = (
        "trap '' TERM; (setsid bash -c '(setsid sleep 901 &)'; setsid sleep 902 & sleep 903 & wait) & "
        "echo begun; sleep 904"
    )
    result = await sandbox.exec(command, timeout=1)
    assert (result.exit_code, result.timed_out, result.stdout) == (None, True, b"begun\n")
    assert b"sleep\x0090" not in (await sandbox.exec("cat /proc/[0-9]*/cmdline")).stdout


async def test_a_timeout_leaves_other_commands_alone(sandbox: LocalSandbox) -> None:
    other = asyncio.create_task(sandbox.exec("echo up > up; until [ -e go ]; do sleep 0.02; done; echo done"))
    await sandbox.exec("until [ -e up ]; do sleep 0.02; done")
    assert (await sandbox.exec("sleep 60", timeout=0.1)).timed_out
    await sandbox.exec("touch go")
    assert (await other).stdout == b"done\n"


async def test_a_daemon_outlives_its_command_and_does_not_hold_it_up(sandbox: LocalSandbox) -> None:
    result = await asyncio.wait_for(sandbox.exec("sleep 905 & echo started"), 20)  # it keeps stdout open
    assert result.stdout == b"started\n" and result.exit_code == 0
    assert b"sleep\x00905" in (await sandbox.exec("cat /proc/[0-9]*/cmdline")).stdout


async def test_orphans_are_reaped(sandbox: LocalSandbox) -> None:
    await sandbox.exec("for i in 1 2 3 4 5; do (sleep 0.01 &) ; done; echo")
    for _ in range(500):
        names = (await sandbox.exec("cat /proc/[0-9]*/stat")).stdout
        if b"(sleep)" not in names.replace(b"1 (sleep)", b"", 1):
            return
    pytest.fail(f"zombies: {names!r}")


async def test_a_cancelled_exec_leaves_nothing(sandbox: LocalSandbox) -> None:
    task = asyncio.create_task(sandbox.exec("setsid sleep 906 & touch up; sleep 907"))
    await sandbox.exec("until [ -e up ]; do sleep 0.02; done")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert b"sleep\x0090" not in (await sandbox.exec("cat /proc/[0-9]*/cmdline")).stdout


async def test_commands_run_side_by_side(sandbox: LocalSandbox) -> None:
    """Each waits for the other's file: one after the other they would never end."""
    wait = "touch {0}; until [ -e {1} ]; do sleep 0.02; done; echo {0}"
    both = await asyncio.gather(
        sandbox.exec(wait.format("a", "b"), timeout=20), sandbox.exec(wait.format("b", "a"), timeout=20)
    )
    assert [r.stdout for r in both] == [b"a\n", b"b\n"]


async def test_stopping_the_supervisor_does_not_hold_up_the_timeout(
    sandbox: LocalSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_sandbox, "_GRACE", 0.5)
    result = await asyncio.wait_for(sandbox.exec("kill -STOP $PPID; sleep 60", timeout=0.2), 30)
    assert result.timed_out
    await sandbox.end_processes()


async def test_no_descriptor_leaks(sandbox: LocalSandbox) -> None:
    await sandbox.exec("true")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        await sandbox.exec("echo x", stdin=b"y")
        await sandbox.exec("sleep 60", timeout=0.01)
        await sandbox.upload_content(b"x", "f")
    await asyncio.sleep(0)  # closed transports are gone after the loop's next turn
    assert len(os.listdir("/proc/self/fd")) <= before


async def test_patches(sandbox: LocalSandbox) -> None:
    await sandbox.upload_content(b"one\ntwo\n", "f.txt")
    patch = "--- a/f.txt\n+++ b/f.txt\n@@ -1,2 +1,2 @@\n one\n-two\n+three\n"
    assert (await sandbox.apply_patch(patch)).exit_code == 0
    assert await sandbox.download_content("f.txt") == b"one\nthree\n"
    assert (await sandbox.apply_patch(patch)).exit_code == 1
