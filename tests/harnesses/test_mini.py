"""mini-swe-agent for real: the forked process against the shipped command, and what either can reach."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from capture import Capture, bash_call, text

from openforge import harnesses
from openforge.harnesses import Ended, Harness
from openforge.harnesses.warm import WarmDied
from openforge.sandboxes import LocalBackend, LocalSandbox, Owner, SandboxLost

# One event loop and one warm process for all: it is what costs seconds here.
pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
DONE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
SHORT = """\
agent:
  system_template: "Commands only."
  instance_template: |-
    Task: {{task}}
    Command:
model:
  model_class: litellm_textbased
  action_regex: '\\A[ \\t]*([^\\n]+)'
  observation_template: |-
    Output: {{output.output[:200]}}
    Command:
  model_kwargs: {drop_params: true, temperature: 1.0, max_tokens: 24, stop: ["\\n"]}
environment:
  environment_class: bubblewrap
  timeout: 5
"""


@pytest_asyncio.fixture(loop_scope="module")
async def backend(tmp_path: Path) -> AsyncIterator[LocalBackend]:
    async with LocalBackend(tmp_path / "sandboxes", "test", Owner.current()) as one:
        yield one


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mini() -> AsyncIterator[Harness]:
    async with harnesses.get("mini_swe_agent").warm(options={"launch": "fork"}) as one:
        yield one


async def episode(
    backend: LocalBackend, harness: Harness, capture: Capture, context: Any, episode_id: str = "e1", **over: Any
) -> tuple[LocalSandbox, Ended]:
    sandbox = await backend.create(episode_id, binds=harness.binds())
    base_url = await sandbox.route(capture)
    assert base_url == f"http://127.0.0.1:8080/s/{episode_id}"
    ended = await harness.run(sandbox, context(base_url=base_url, **over))
    return sandbox, ended


@pytest.mark.parametrize(
    ("config", "script"),
    [
        (None, [bash_call("echo one > a.txt; ls -a / /home/agent /tmp; env | sort"), bash_call(DONE)]),
        ("short.yaml", [text("cat note.txt"), text(""), text(DONE)]),
    ],
)
async def test_forked_requests_equal_the_shipped_command_byte_for_byte(
    backend: LocalBackend, mini: Harness, context: Any, tmp_path: Path, config: str | None, script: list[Any]
) -> None:
    (tmp_path / "short.yaml").write_text(SHORT)
    bodies = {}
    for launch in ("fork", "command"):
        capture = Capture(script)
        sandbox = await backend.create("e1", binds=mini.binds())
        await sandbox.upload_content(b"hello from the note\n", "note.txt")
        ctx = context(base_url=await sandbox.route(capture), options={"config": config, "launch": launch})
        ended = await mini.run(sandbox, ctx)
        assert ended.exit_code == 0, ended.log.decode()
        await sandbox.end_processes()
        assert (await mini.output(sandbox, ctx, ended)).error is None
        assert capture.keys == {"Bearer secret-key"}
        bodies[launch] = capture.bodies["e1"]
        await sandbox.delete()
        await capture.close()
    assert bodies["fork"] == bodies["command"]
    assert len(bodies["fork"]) >= 2
    first = json.loads(bodies["fork"][0])
    assert first["model"] == "policy" and "Create the file a.txt." in first["messages"][-1]["content"]


async def test_a_fork_is_cheap_and_its_turn_limit_is_a_completed_end(
    backend: LocalBackend, mini: Harness, context: Any
) -> None:
    capture = Capture([bash_call("echo $PPID > ppid.txt; echo x >> a.txt")])
    sandbox, ended = await episode(backend, mini, capture, context, turns=2)
    output = await mini.output(sandbox, context(), ended)
    assert (ended.exit_code, output.error) == (0, None)
    assert len(capture.bodies["e1"]) == 2
    assert await sandbox.download_content("a.txt") == b"x\nx\n"
    assert ended.cpu_seconds is not None and 0 < ended.cpu_seconds < 0.5
    await capture.close()


async def test_episodes_run_side_by_side_in_their_own_sandboxes(
    backend: LocalBackend, mini: Harness, context: Any
) -> None:
    capture = Capture([bash_call("env > seen.txt"), bash_call(DONE)])
    names = [f"e{i}" for i in range(4)]
    runs = (
        episode(backend, mini, capture, context, n, api_key=f"key-of-{n}", instruction=f"Task of {n}.") for n in names
    )
    done = await asyncio.gather(*runs)
    for name, (sandbox, ended) in zip(names, done, strict=True):
        assert ended.exit_code == 0
        assert sorted(capture.bodies) == names
        assert f"OPENAI_API_KEY=key-of-{name}\n".encode() in await sandbox.download_content("seen.txt")
        assert f"Task of {name}." in json.loads(capture.bodies[name][0])["messages"][-1]["content"]
    # No fork carries another episode's key: the process that they were forked from never held one.
    memory = readable_memory(mini._warm.pid)  # type: ignore[attr-defined]
    assert b"LITELLM_LOCAL_MODEL_COST_MAP" in memory
    assert b"key-of-e" not in memory and b"Task of e" not in memory
    await capture.close()


def readable_memory(pid: int) -> bytes:
    """The process's writable memory."""
    found = []
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for line in maps:
            span, mode = line.split()[:2]
            if not mode.startswith("rw"):
                continue
            low, high = (int(x, 16) for x in span.split("-"))
            try:
                memory.seek(low)
                found.append(memory.read(high - low))
            except (OSError, OverflowError, ValueError):
                continue
    return b"".join(found)


# What the process that runs this can reach, written to the work folder as WHERE.json.
PROBE = """
import json, os, socket, stat
def reads(path):
    try:
        with open(path) as f:
            return f.read()
    except OSError as e:
        return type(e).__name__
def connects(port):
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            return "connected"
    except OSError as e:
        return type(e).__name__
def status(key):
    with open("/proc/self/status") as f:
        return next(line.split()[1] for line in f if line.startswith(key))
def files_open():
    found = []
    for fd in range(3, 1024):
        try:
            mode = os.fstat(fd).st_mode
        except OSError:
            continue
        if stat.S_ISDIR(mode) or stat.S_ISREG(mode):
            found.append(fd)
    return found
found = {
    "secret": reads(SECRET), "shadow": reads("/etc/shadow"), "host": connects(PORT), "proxy": connects(8080),
    "processes": len([p for p in os.listdir("/proc") if p.isdigit()]), "files_open": files_open(),
    "caps": status("CapEff"), "new_privs": status("NoNewPrivs"), "environment": dict(os.environ),
}
with open("/workspace/WHERE.json", "w") as f:
    json.dump(found, f)
"""
# jinja runs it in the harness process, which renders its templates before its first call.
IN_HARNESS = """{{ cycler.__init__.__globals__['__builtins__']['exec'](task, dict()) }}"""


@pytest.mark.parametrize("launch", ["fork", "command"])
async def test_neither_command_nor_harness_process_reaches_the_host(
    backend: LocalBackend, mini: Harness, context: Any, tmp_path: Path, launch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOST_SECRET", "in our environment")
    secret = tmp_path / "verify.py"
    secret.write_text("the expected answer")
    (tmp_path / "probe.yaml").write_text(SHORT.replace("Commands only.", IN_HARNESS))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        probe = PROBE.replace("SECRET", repr(str(secret))).replace("PORT", str(port))
        # The same from here succeeds, so a refusal inside is the sandbox's.
        assert secret.read_text() == "the expected answer"
        socket.create_connection(("127.0.0.1", port)).close()
        capture = Capture([text("python3 command.py"), text(DONE)])
        sandbox = await backend.create("e1", binds=mini.binds())
        await sandbox.upload_content(probe.replace("WHERE", "command").encode(), "command.py")
        base_url = await sandbox.route(capture)
        options = {"config": "probe.yaml", "launch": launch}
        ctx = context(base_url=base_url, options=options, instruction=probe.replace("WHERE", "harness"))
        ended = await mini.run(sandbox, ctx)
    assert ended.exit_code == 0, ended.log.decode()
    for where in ("harness", "command"):
        found = json.loads(await sandbox.download_content(f"{where}.json"))
        assert found["secret"] == "FileNotFoundError", where
        assert found["shadow"] in ("FileNotFoundError", "PermissionError"), where
        assert found["host"] == "ConnectionRefusedError", where
        assert found["proxy"] == "connected", where
        assert found["processes"] < 10 and found["files_open"] == [], where
        assert int(found["caps"], 16) == 0 and found["new_privs"] == "1", where
        assert "in our environment" not in found["environment"].values(), where
    await capture.close()


async def test_a_harness_that_runs_out_of_time_is_killed(backend: LocalBackend, mini: Harness, context: Any) -> None:
    capture = Capture([bash_call("echo started > a.txt; sleep 1000")])
    sandbox, ended = await episode(backend, mini, capture, context, seconds=3.0)
    assert ended.timed_out and ended.exit_code is None
    assert await sandbox.download_content("a.txt") == b"started\n"
    ps = await sandbox.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    assert b"/bin/mini" not in ps.stdout
    await capture.close()


async def test_a_crash_of_the_harness_is_its_own_error(
    backend: LocalBackend, mini: Harness, context: Any, tmp_path: Path
) -> None:
    (tmp_path / "broken.yaml").write_text("agent: {}\n")
    sandbox = await backend.create("e1", binds=mini.binds())
    ctx = context(options={"config": "broken.yaml", "launch": "fork"})
    ended = await mini.run(sandbox, ctx)
    output = await mini.output(sandbox, ctx, ended)
    assert ended.exit_code == 1
    assert output.error is not None and output.error.startswith("mini_swe_agent exited with code 1: ")


async def test_death_of_the_warm_process_fails_its_episodes_and_the_next_start_anew(
    backend: LocalBackend, mini: Harness, context: Any
) -> None:
    capture = Capture([bash_call("echo $$ > a.txt; sleep 1000")])
    sandbox = await backend.create("e1", binds=mini.binds())
    ctx = context(base_url=await sandbox.route(capture), turns=1)
    running = asyncio.create_task(mini.run(sandbox, ctx))
    while (await sandbox.exec(["test", "-s", "a.txt"])).exit_code != 0:
        assert not running.done(), running
    first = mini._warm.pid  # type: ignore[attr-defined]
    os.kill(first, signal.SIGKILL)
    with pytest.raises(WarmDied, match="the warm harness process died"):
        await running
    await capture.close()

    capture = Capture([bash_call("echo again > b.txt")])
    sandbox, ended = await episode(backend, mini, capture, context, "e2", turns=1)
    assert ended.exit_code == 0 and await sandbox.download_content("b.txt") == b"again\n"
    assert mini._warm.pid not in (None, first)  # type: ignore[attr-defined]
    await capture.close()


async def test_a_sandbox_that_is_gone_is_lost_and_no_episode(
    backend: LocalBackend, mini: Harness, context: Any
) -> None:
    sandbox = await backend.create("e1", binds=mini.binds())
    await sandbox.delete()
    with pytest.raises(SandboxLost):
        await mini.run(sandbox, context())


async def test_the_version_is_checked_inside(backend: LocalBackend, mini: Harness) -> None:
    sandbox = await backend.create("e1", binds=mini.binds())
    assert await mini.place(sandbox) == "2.4.6"
    other = type(mini)(mini.root)
    other.version = "9.9.9"  # type: ignore[misc]
    with pytest.raises(harnesses.HarnessError, match=r"mini_swe_agent 9\.9\.9 is expected .* printed '2\.4\.6'"):
        await other.place(sandbox)
