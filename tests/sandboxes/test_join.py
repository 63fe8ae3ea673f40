"""join.py alone, loaded by path in a bare interpreter, as a harness's environment does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from openforge.sandboxes import LocalSandbox, join

LOAD = f"""
import functools, importlib.util, os, signal, sys
print = functools.partial(print, flush=True)  # a fork would copy the buffer
spec = importlib.util.spec_from_file_location("join", {join.__file__!r})
join = importlib.util.module_from_spec(spec); spec.loader.exec_module(join)
holder = int(sys.argv[1])
def inside(fn, **kw):
    pid = os.fork()
    if pid == 0:
        os._exit(join.exit_status(join.run_in(holder, fn, **kw)))
    return pid
def status(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


def bare(code: str, holder: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", "-S", "-c", LOAD + code, str(holder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_run_in(sandbox: LocalSandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    done = bare(
        f"""
folder = os.open({str(tmp_path)!r}, os.O_RDONLY)
def fn():
    print(os.getcwd(), os.getuid(), os.getsid(0) == os.getpid(), os.listdir("/home"), os.path.exists({str(secret)!r}))
    try: os.open("secret", os.O_RDONLY, dir_fd=folder)
    except OSError as e: print(e.strerror)
    open("made", "w").write("x")
    return 7
print(status(inside(fn)))
def fail(): raise RuntimeError("boom")
print(status(inside(fail)), status(inside(lambda: sys.exit(5))), status(inside(lambda: os.kill(os.getpid(), 9))))
print(status(inside(lambda: print(os.getcwd()), cwd="/tmp")), status(inside(lambda: None, cwd="/nowhere")))
""",
        sandbox.holder_pid,
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "/workspace 1000 True ['agent'] False"
    assert lines[1:] == ["Bad file descriptor", "7", "1 5 137", "/tmp", "0 1"]
    assert "RuntimeError: boom" in done.stderr


async def test_it_dies_with_its_caller_and_gets_its_signals(sandbox: LocalSandbox) -> None:
    code = """
r, w = os.pipe()
def fn():
    signal.signal(signal.SIGTERM, lambda *a: sys.exit(9))
    os.write(w, b"up")
    while True: signal.pause()
pid = inside(fn, keep=(0, 1, 2, w)); os.read(r, 2)
os.kill(pid, signal.SIGTERM); print(status(pid))
pid = inside(fn, keep=(0, 1, 2, w)); os.read(r, 2)
os.close(w); os.kill(pid, signal.SIGKILL); print(status(pid)); print(os.read(r, 1))
"""
    done = bare(code, sandbox.holder_pid)
    # The last read ends only when the inner process, the other holder of the pipe, is dead.
    assert done.stdout.splitlines() == ["9", "-9", "b''"], done.stderr


async def test_a_forked_harness_has_the_sandboxs_privileges_only(sandbox: LocalSandbox) -> None:
    code = """
def fn():
    for line in open("/proc/self/status"):
        if line.startswith(("Cap", "NoNewPrivs")): print(line.split()[1])
    os.system("head -c 1 /proc/$PPID/mem; cat /proc/$PPID/environ >/dev/null; true")
inside(fn); os.wait()
"""
    done = bare(code, sandbox.holder_pid)
    assert done.stdout.split() == ["0" * 16] * 5 + ["1"]
    assert done.stderr.count("Permission denied") == 2


async def test_listen_inside_and_a_sandbox_that_is_gone(sandbox: LocalSandbox) -> None:
    with join.listen_inside(sandbox.holder_pid, 8123) as listener:
        assert listener.getsockname() == ("127.0.0.1", 8123)
        assert (await sandbox.exec("exec 3<>/dev/tcp/127.0.0.1/8123")).exit_code == 0
    await sandbox.delete()
    done = bare("print(status(inside(lambda: 0)))", sandbox.holder_pid)
    assert "is gone" in done.stderr
