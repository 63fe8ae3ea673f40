"""mini-swe-agent imported once, forked per episode into the episode's sandbox, by the harness's own Python:

    python -I warm_mini.py JOIN_PY

JOIN_PY is openforge/sandboxes/join.py. Standard library and minisweagent only: this package is not importable
here.

Lines of JSON on stdin: {"id", "holder", "job", "log", "limits", "groups"} starts an episode in the sandbox of holder
process `holder`, {"id", "kill": true} ends it. Lines on stdout: {"ready", "version"} once, then {"id", "exit", "cpu"}
for each that ended, after {"id", "error"} for one that never started; exit is -n after signal n, cpu is in
seconds. `log` is a file out here that takes its output.

`job` is a file inside the sandbox: {"argv", "env", "cwd"}. The child reads it there after it has joined, so
that this process never holds a key or an instruction that a later fork would carry into another sandbox, and
removes it, so that the agent sees what it sees beside the shipped command. The child then does what that does:
`sys.exit(app())` with that argv.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.util
import json
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from typing import Any


def load(path: str) -> Any:
    """A module by the path of its file."""
    spec = importlib.util.spec_from_file_location("join", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cli() -> Callable[[], object]:
    """The entry point of the shipped `mini` command, with the classes it loads by name."""
    for name in ("agents.interactive", "environments.local", "models.litellm_textbased_model"):
        importlib.import_module(f"minisweagent.{name}")
    from minisweagent.run.mini import app

    app_: Callable[[], object] = app
    return app_


def episode(job_path: str, app: Callable[[], object], join: Any, log: int, started: int) -> int:
    """Runs inside the sandbox: redirect output, set argv, environment and folder, run the command.

    A byte goes to `started` when nothing of ours is left to do: what fails from there on is the harness's.
    """
    with open(job_path) as f:
        job = json.load(f)
    os.unlink(job_path)
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.clear()
    os.environ.update(job["env"])
    # What the import settled by the environment outside: the folder for temporary files, and its own settings folder,
    # which it makes.
    tempfile.tempdir = None
    os.makedirs(importlib.import_module("platformdirs").user_config_dir("mini-swe-agent"), exist_ok=True)
    os.chdir(job["cwd"])
    sys.argv = list(job["argv"])
    os.write(started, b"+")
    join.close_others((0, 1, 2))
    try:
        app()
    except SystemExit as e:
        # As the interpreter ends a program: None is 0, a number itself, anything else is printed and 1.
        if e.code is None or isinstance(e.code, int):
            return e.code or 0
        print(e.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def lazy_imports() -> list[str]:
    """Modules that a first episode imports on its way, found by an episode in a child against a closed port.

    A child and not this process: what an episode leaves behind besides imports (clients, caches, threads)
    must not be inherited by others.
    """
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with tempfile.TemporaryDirectory() as home, socket.socket() as closed:
                closed.bind(("127.0.0.1", 0))  # bound and not listening: every connection is refused
                os.environ.update(
                    HOME=home,
                    OPENAI_API_KEY="none",
                    OPENAI_API_BASE=f"http://127.0.0.1:{closed.getsockname()[1]}/v1",
                    MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT="1",
                )
                null = os.open(os.devnull, os.O_RDWR)
                for fd in (0, 1, 2):
                    os.dup2(null, fd)
                for config in ("mini.yaml", "mini_textbased.yaml"):
                    sys.argv = [
                        "mini",
                        "-m",
                        "openai/policy",
                        "-y",
                        "--exit-immediately",
                        "-o",
                        f"{home}/t.json",
                    ]
                    sys.argv += ["-c", config, "-c", "model.model_kwargs.max_retries=0", "-t", "none"]
                    with contextlib.suppress(BaseException):
                        cli()()
            os.write(theirs, json.dumps(sorted(sys.modules)).encode())
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as f:
        text = f.read()
    os.waitpid(pid, 0)
    return json.loads(text) if text else []


class Warm:
    """The process's loop."""

    def __init__(self, join: Any, app: Callable[[], object], out: int) -> None:
        self._join, self._app, self._out = join, app, out
        self._live: dict[int, int] = {}  # pid of the waiting child -> id

    def say(self, **line: object) -> None:
        # Short enough to be written whole: children write here too.
        os.write(self._out, json.dumps(line).encode() + b"\n")

    def start(self, ident: int, order: dict[str, Any]) -> None:
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                code = self._join_and_run(ident, order, log)
            finally:
                # A signal's number must survive, and exit codes above 128 are the harness's own.
                if code < 0:
                    signal.signal(-code, signal.SIG_DFL)
                    os.kill(os.getpid(), -code)
                os._exit(code & 0xFF)
        os.close(log)
        self._live[pid] = ident

    def _join_and_run(self, ident: int, order: dict[str, Any], log: int) -> int:
        """In the child that waits outside: the exit code of the process inside."""
        read, started = os.pipe()
        os.set_blocking(read, False)
        keep = (0, 1, 2, self._out, log, read, started)
        code, error = 1, "the harness process did not get as far as its command"
        try:
            run = functools.partial(episode, order["job"], self._app, self._join, log, started)
            limits, groups = order["limits"], order["groups"]
            code = self._join.run_in(order["holder"], run, limits=limits, keep=keep, groups=groups)
        except OSError as e:
            error = str(e)
        try:
            os.read(read, 1)
        except BlockingIOError:
            self.say(id=ident, error=error[:1000])
        return code

    def reap(self) -> None:
        while self._live:
            pid, status, used = os.wait4(-1, os.WNOHANG)
            if pid == 0:
                return
            code, cpu = os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime
            self.say(id=self._live.pop(pid), exit=code, cpu=cpu)

    def kill(self, ident: int | None) -> None:
        """End one episode, or all; its harness process dies with the child that waits for it."""
        for pid, live in self._live.items():
            if ident in (None, live):
                os.kill(pid, signal.SIGKILL)

    def take(self, line: bytes) -> None:
        order = json.loads(line)
        if order.get("kill"):
            self.kill(order["id"])
        else:
            self.start(order["id"], order)

    def run(self) -> None:
        """Until stdin ends: its writer is gone then, and so are the episodes."""
        woken, wake = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(woken, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        rest = b""
        while True:
            ready, _, _ = select.select([0, woken], [], [])
            if woken in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(woken, 4096)
            self.reap()
            if 0 in ready:
                data = os.read(0, 1 << 16)
                if not data:
                    self.kill(None)
                    return
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self.take(line)


def main() -> None:
    out = os.dup(1)
    os.dup2(2, 1)  # whatever an import prints is no answer
    join = load(sys.argv[1])
    app = cli()
    import minisweagent

    for name in lazy_imports():
        with contextlib.suppress(Exception):  # modules that make others by name at run time
            importlib.import_module(name)
    if threading.active_count() != 1:
        raise SystemExit(f"warm_mini: imports left threads behind, a fork would lose them: {threading.enumerate()}")
    gc.collect()
    gc.freeze()
    warm = Warm(join, app, out)
    warm.say(ready=True, version=minisweagent.__version__)
    warm.run()


if __name__ == "__main__":
    main()
