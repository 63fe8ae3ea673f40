"""What Orchard does wrong, against its mock: each fault must cost time only, or be the sandbox's loss."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from mock_orchard import AGENT, MockOrchard

from openforge.sandboxes import Bind, SandboxError, SandboxFileError, SandboxLost
from openforge.sandboxes.orchard import OrchardBackend, OrchardSandbox, inside, plain


def execs(mock: MockOrchard) -> int:
    return sum(path.endswith("/exec") for _, path in mock.requests)


async def until_up(sandbox: OrchardSandbox) -> None:
    await sandbox.exec("until [ -e up ]; do sleep 0.02; done", timeout=30)


async def test_a_lost_answer_does_not_run_the_command_twice(mock: MockOrchard, sandbox: OrchardSandbox) -> None:
    before = execs(mock)
    mock.lose = 3
    result = await sandbox.exec("echo ran >> runs; cat runs; echo done >&2; exit 4")
    assert (result.exit_code, result.stdout, result.stderr) == (4, b"ran\n", b"done\n")
    assert execs(mock) - before == 4, "it was submitted again each time"
    assert (await sandbox.exec("wc -l < runs")).stdout == b"1\n"


@pytest.mark.parametrize("fault", ["twice", "at_once"])
async def test_a_second_submission_finds_the_first(mock: MockOrchard, sandbox: OrchardSandbox, fault: str) -> None:
    setattr(mock, fault, True)
    for i in range(3):
        assert (await sandbox.exec(f"echo {i} >> runs; sleep 0.1; cat runs")).exit_code == 0
    await sandbox.upload_content(b"first", "f")
    await mock.late()
    await sandbox.upload_content(b"second", "f")
    await mock.late()
    mock.twice = mock.at_once = False
    assert (await sandbox.exec("cat runs")).stdout == b"0\n1\n2\n"
    assert await sandbox.download_content("f") == b"second"


async def test_a_late_upload_does_not_undo_what_the_agent_wrote(mock: MockOrchard, sandbox: OrchardSandbox) -> None:
    mock.twice = True
    mock.records[sandbox.sandbox_id].lock = lock = asyncio.Lock()
    await sandbox.upload_content(b"ours", "f")
    async with lock:
        pod = mock.records[sandbox.sandbox_id].sandbox
        assert pod is not None
        await pod.exec("echo agent > f")
    await mock.late()
    assert await sandbox.download_content("f") == b"agent\n"


async def test_our_time_limit_ends_the_command_and_leaves_the_sandbox(sandbox: OrchardSandbox) -> None:
    command = (
        "trap '' TERM; (setsid bash -c '(setsid sleep 921 &)'; setsid sleep 922 & sleep 923) & echo begun; sleep 924"
    )
    result = await sandbox.exec(command, timeout=0.5)
    assert (result.exit_code, result.timed_out, result.stdout) == (None, True, b"begun\n")
    assert b"sleep\x0092" not in (await sandbox.exec("cat /proc/[0-9]*/cmdline")).stdout


async def test_124_is_an_exit_code_like_any_other(sandbox: OrchardSandbox) -> None:
    result = await sandbox.exec("exit 124")
    assert (result.exit_code, result.timed_out) == (124, False)


async def test_calls_are_short_whatever_the_command_takes(mock: MockOrchard, sandbox: OrchardSandbox) -> None:
    """The service's own time-out would kill the pod, and its lock would keep all other commands waiting."""
    task = asyncio.create_task(sandbox.exec("touch up; until [ -e go ]; do sleep 0.02; done; echo done", timeout=60))
    await until_up(sandbox)
    assert (await sandbox.exec("echo meanwhile")).stdout == b"meanwhile\n"
    assert not mock.records[sandbox.sandbox_id].lock.locked()
    await sandbox.upload_content(b"", "go")
    assert (await task).stdout == b"done\n"


async def test_the_supervisor_holds_no_pipe_of_the_service(sandbox: OrchardSandbox) -> None:
    """The in-pod agent waits until nobody holds the outputs of the call."""
    result = await sandbox.exec("readlink /proc/$PPID/fd/0 /proc/$PPID/fd/1 /proc/$PPID/fd/2")
    assert result.stdout == b"/dev/null\n" * 3


async def test_what_we_run_shows_as_one_word(sandbox: OrchardSandbox) -> None:
    shown = (await sandbox.exec("tr '\\0' ' ' < /proc/$PPID/cmdline")).stdout
    assert shown.split() == [b"openforge"]


@pytest.mark.parametrize("redis", [True, False])
async def test_a_restart_of_the_orchestrator(mock: MockOrchard, sandbox: OrchardSandbox, redis: bool) -> None:
    """With Redis the command's result arrives; with memory state nobody knows the sandbox any more."""
    task = asyncio.create_task(sandbox.exec("echo x >> runs; touch up; until [ -e go ]; do sleep 0.02; done; cat runs"))
    await until_up(sandbox)
    pod = mock.records[sandbox.sandbox_id].sandbox
    assert pod is not None
    await mock.restart(redis=redis)
    await pod.exec("touch go")
    if redis:
        assert (await task).stdout == b"x\n"
        assert (await sandbox.exec("cat runs")).stdout == b"x\n"
    else:
        with pytest.raises(SandboxLost, match=r"404 Sandbox .* not found"):
            await task


async def test_files_right_after_a_restart(mock: MockOrchard, sandbox: OrchardSandbox) -> None:
    """Orchard answers 400 until somebody has asked for the sandbox."""
    await sandbox.upload_content(b"x" * 200_000, "f")
    await mock.restart(redis=True)
    assert await sandbox.download_content("f") == b"x" * 200_000


async def test_an_orchestrator_that_is_away_for_a_while(mock: MockOrchard, sandbox: OrchardSandbox) -> None:
    await mock.down()
    task = asyncio.create_task(sandbox.exec("echo back"))
    await asyncio.sleep(0)
    await mock.up()
    assert (await task).stdout == b"back\n"


async def test_one_that_stays_away_is_a_lost_sandbox(mock: MockOrchard, sandbox: OrchardSandbox) -> None:
    await mock.down()
    with pytest.raises(SandboxLost, match=r"does not answer: no answer from http://127.0.0.1:\d+ .*for 3 s"):
        await sandbox.exec("true")
    await mock.up()


@pytest.mark.slow
async def test_a_pod_that_is_gone_although_it_is_called_ready(mock: MockOrchard, sandbox: OrchardSandbox) -> None:
    await mock.kill_pod(sandbox.sandbox_id)
    with pytest.raises(SandboxLost, match="does not answer for 3 s: int too large"):
        await sandbox.exec("true")
    with pytest.raises(SandboxLost):
        await sandbox.download_content("f")


async def test_a_pod_that_failed_is_lost_at_once(mock: MockOrchard, sandbox: OrchardSandbox) -> None:
    task = asyncio.create_task(sandbox.exec("touch up; sleep 60"))
    await until_up(sandbox)
    await mock.kill_pod(sandbox.sandbox_id)
    mock.records[sandbox.sandbox_id].status = "failed"
    mock.records[sandbox.sandbox_id].message = "OOMKilled"
    with pytest.raises(SandboxLost, match=r"is gone: failed \(OOMKilled\)"):
        await task


async def test_a_killed_supervisor_is_signal_9_and_not_a_wait_for_ever(
    sandbox: OrchardSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain, "LOOK", 0.2)
    result = await asyncio.wait_for(sandbox.exec("kill -9 $PPID; sleep 60"), 30)
    assert (result.exit_code, result.timed_out) == (-9, False)


@pytest.mark.slow
async def test_a_stopped_supervisor_does_not_hold_up_the_time_limit(
    sandbox: OrchardSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain, "GRACE", 0.2)
    result = await asyncio.wait_for(sandbox.exec("kill -STOP $PPID; sleep 925", timeout=0.2), 60)
    assert result.timed_out and result.exit_code is None
    assert b"sleep\x00925" not in (await sandbox.exec("cat /proc/[0-9]*/cmdline")).stdout


async def test_an_agent_that_empties_tmp_ends_as_it_ends(
    sandbox: OrchardSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain, "LOOK", 0.2)
    monkeypatch.setattr(plain, "QUICK", 0.0)
    result = await sandbox.exec("rm -rf /tmp/.o* /tmp/*; echo emptied; sleep 0.5; exit 3")
    assert (result.exit_code, result.stdout) == (3, b"emptied\n")


async def test_ending_processes_spares_what_the_service_runs(mock: MockOrchard, sandbox: OrchardSandbox) -> None:
    await sandbox.exec("for i in 1 2 3; do setsid sleep 926 >/dev/null 2>&1 & done; echo x > file")
    running = asyncio.create_task(sandbox.exec("touch up; sleep 927"))
    await until_up(sandbox)
    await sandbox.end_processes()
    assert (await running).exit_code == -9
    lines = (await sandbox.exec("cat file; cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).stdout
    assert b"x\n" in lines and b"sleep 92" not in lines
    assert AGENT.encode() in lines, "the in-pod agent lives"


async def test_a_fork_bomb_is_ended(sandbox: OrchardSandbox) -> None:
    bomb = "f() { (f & f &) ; sleep 0.01; f; }; touch up; (while :; do (sleep 0.01 &) ; done) & sleep 60"
    running = asyncio.create_task(sandbox.exec(bomb))
    await until_up(sandbox)
    await sandbox.end_processes()
    assert (await running).exit_code == -9
    assert b"sleep" not in (await sandbox.exec("cat /proc/[0-9]*/comm")).stdout.replace(b"sleep\n", b"", 2)


async def test_a_large_file_goes_in_pieces_and_one_that_is_damaged_goes_again(
    mock: MockOrchard, sandbox: OrchardSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inside, "PIECE", 100_000)  # of what goes in; inside the pod the file says 4 MiB
    data = bytes(range(256)) * 2000
    mock.damage = 1
    before = len(mock.requests)
    await sandbox.upload_content(data, "f", 0o751)
    assert sum(path.endswith("/files") for _, path in mock.requests[before:]) == 12, "two times six pieces"
    assert await sandbox.download_content("f") == data
    assert (await sandbox.exec("stat -c %a f; ls -A")).stdout == b"751\nf\n"
    mock.damage = 12
    with pytest.raises(SandboxError, match=r"an upload to sandbox .* arrives damaged: \d+ bytes .* another digest"):
        await sandbox.upload_content(data, "g")
    assert (await sandbox.exec("ls -A")).stdout == b"f\n", "nothing of it is left"


async def test_long_commands_and_inputs_go_in_files(sandbox: OrchardSandbox) -> None:
    """One word of a command line holds 128 KiB at most, and the service's command is one word."""
    assert (await sandbox.exec(["bash", "-c", "echo $#", "-", *["x" * 1000] * 200])).stdout == b"200\n"
    assert (await sandbox.exec("wc -c", stdin=b"y" * 3_000_000)).stdout == b"3000000\n"


async def test_nothing_piles_up_in_the_sandbox(sandbox: OrchardSandbox, tmp_path: Path) -> None:
    for i in range(3):
        await sandbox.exec("head -c 200000 /dev/zero; echo", stdin=b"x" * 200_000, log=tmp_path / "log")
        await sandbox.upload_content(b"z" * 200_000, f"f{i}")
        await sandbox.download_content(f"f{i}")
    await sandbox.exec("true")
    kilobytes = (await sandbox.exec("du -sk /tmp/.openforge | cut -f1")).stdout
    assert int(kilobytes) < 100


async def test_an_image_without_what_we_need(mock: MockOrchard, backend: OrchardBackend) -> None:
    """Said once and at the start, not at the first command of an episode."""
    real = plain._LAUNCH
    for launch, message in [
        (real.replace("command -v python3", "command -v no-such-python"), "the image has no Python"),
        (
            "exec no-such-program # %(agent)s %(mark)s %(loader)s %(message)s",
            "cannot run our side of a call: exit code 127",
        ),
    ]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plain, "_LAUNCH", launch)
            with pytest.raises(SandboxError, match=message):
                await backend.create("e", network="none")
    assert not mock.records, "what did not start is deleted"


async def test_the_python_of_the_services_own_agent_comes_first(
    mock: MockOrchard, backend: OrchardBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Laid out as Orchard's agent image does it: interpreter, standard library and dynamic linker in one folder."""
    ask = "import sys, sysconfig; print(sysconfig.get_path('stdlib'), sys.executable)"
    done = subprocess.run(["/usr/bin/python3", "-I", "-c", ask], capture_output=True, text=True, check=True)
    library, program = done.stdout.split()
    agent = tmp_path / "agent"
    (agent / "bin").mkdir(parents=True)
    (agent / "lib").mkdir()
    shutil.copy(os.path.realpath(program), agent / "bin" / "python3")
    (agent / "lib" / Path(library).name).symlink_to(library)
    linker = next(Path("/lib64").glob("ld-linux-*"))
    (agent / "lib" / linker.name).symlink_to(linker)
    mock.binds = [Bind(agent, "/opt/sandbox-agent")]
    monkeypatch.setattr(plain, "_LAUNCH", plain._LAUNCH.replace("command -v python3", "false"))
    sandbox = await backend.create("e", network="none")
    result = await sandbox.exec("cat /proc/$PPID/maps; env")
    assert b"/opt/sandbox-agent/bin/python3" in result.stdout
    assert b"PYTHONHOME" not in result.stdout and b"LD_LIBRARY_PATH" not in result.stdout
    await sandbox.upload_content(b"x", "f")
    assert [e.name for e in await sandbox.list_files("/workspace")] == ["f"]


async def test_a_deleted_sandbox_refuses_at_once(mock: MockOrchard, sandbox: OrchardSandbox) -> None:
    await sandbox.delete()
    await sandbox.delete()
    before = len(mock.requests)
    with pytest.raises(SandboxLost, match="is deleted"):
        await sandbox.exec("true")
    with pytest.raises(SandboxLost, match="is deleted"):
        await sandbox.upload_content(b"", "f")
    assert len(mock.requests) == before


async def test_a_file_that_is_no_path(sandbox: OrchardSandbox) -> None:
    for remote in ("../x", "/etc/x", "/", "", "a\0b"):
        with pytest.raises(SandboxError):
            await sandbox.upload_content(b"x", remote)
    with pytest.raises(SandboxFileError):
        await sandbox.download_content("")


async def test_heartbeats_go_out_until_they_are_stopped(mock: MockOrchard, sandbox: OrchardSandbox) -> None:
    await sandbox.start_heartbeat(0.02)
    while len(mock.heartbeats) < 4:
        await asyncio.sleep(0.01)
    await sandbox.stop_heartbeat()
    seen = len(mock.heartbeats)
    assert set(mock.heartbeats) == {sandbox.sandbox_id}
    await sandbox.exec("sleep 0.1")
    assert len(mock.heartbeats) == seen
    await sandbox.start_heartbeat(0.02)
    mock.records.clear()
    with pytest.raises(SandboxLost):
        while True:
            await asyncio.sleep(0.01)
            await sandbox.exec("true")
