"""One operation INSIDE a sandbox of an Orchard service: standard library, Python >= 3.9, sent along with each call.

The service runs a command whole or kills the sandbox, and its client may submit one twice. So a call only starts a
command here, under a supervisor in a session of its own, and ends within seconds. What the supervisor has to say lies
in files that the caller reads, which neither the service's restart nor a lost answer can take away:

    <base>/ID/         made by one mkdir(2), which decides that a command of this name starts at most once; it stays
    <base>/ID/state    {"pieces": n, "ended": null or {exit, timed_out, out, err}}, always renamed into place
    <base>/ID/log.N    both outputs as they came, in pieces; only where a log was asked for
    <base>/ID/out, err   outputs, where they are too long for the state
    <base>/ID/answer   of an upload: done
    <base>/ID.in.N, ID.out.N   pieces of what goes in and out

While a supervisor lives it holds the abstract UNIX socket openforge-ID, which nobody can remove.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import hashlib
import io
import json
import os
import re
import select
import shutil
import signal
import socket
import stat
import struct
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __name__.startswith("openforge."):
    from openforge.sandboxes import files
    from openforge.sandboxes.orchard import supervisor
else:  # sent along under these names
    import files
    import supervisor

Request = dict[str, Any]
BASES = ("/opt/sandbox-agent", "/tmp")  # the agent's own volume: an agent that empties /tmp leaves it alone
PIECE = 4 << 20  # bytes of a file that travels in one call: the service holds it in memory several times
MARK = "@openforge "
_KILL_SECONDS = 5.0


def base() -> str:
    """The folder of our files, made if need be."""
    for folder in BASES:
        if os.access(folder, os.W_OK):
            path = folder + "/.openforge"
            os.makedirs(path, 0o700, exist_ok=True)
            return path
    raise OSError(f"none of {', '.join(BASES)} can be written to")


def main(message: str) -> None:
    """Carry out a message (base64, or "@" and the name of its pieces) and print one line of JSON."""
    where = "a file"
    _retitle()
    try:
        raw = _pieces(message[1:]) if message.startswith("@") else base64.b64decode(message)
        line, _, payload = raw.partition(b"\n")
        request: Request = json.loads(line)
        where = request.get("path", where)
        _clean(request["done"])
        reply = OPERATIONS[request["op"]](request, payload)
    except OSError as e:
        where = e.filename if isinstance(e.filename, str) else where
        reply = {"error": f"{where} inside the sandbox: {e.strerror or e}", "errno": e.errno}
    except Damaged as e:
        reply = {"damaged": str(e)}
    print("\n" + MARK + json.dumps(reply), flush=True)


def _retitle() -> None:
    """Show as `openforge` in the agent's `ps`, and not with this whole file in the command line (proc(5): a command
    line whose last byte is not NUL is one that the process has overwritten, and ends at the first NUL)."""
    with open("/proc/self/stat", "rb") as f:
        start, end = (int(n) for n in f.read().rpartition(b")")[2].split()[45:47])
    title = b"openforge"
    if end - start > len(title) + 1:
        ctypes.memset(start, 0, end - start - 1)
        ctypes.memmove(start, title, len(title))
        ctypes.memset(end - 1, 1, 1)


class Damaged(Exception):
    """What arrived is not what was sent."""


def _pieces(name: str) -> bytes:
    """The content of "ID COUNT SHA256", in memory; the pieces stay until the caller says that it is done."""
    key, count, sha256 = name.split()
    try:
        data = b"".join(_read(f"{base()}/{key}.in.{i}") for i in range(int(count)))
    except FileNotFoundError as e:
        raise Damaged(str(e)) from None
    if hashlib.sha256(data).hexdigest() != sha256:
        raise Damaged(f"{len(data)} bytes arrived with another digest")
    return data


def _read(path: str) -> bytes:
    with open(path, "rb") as f:
        return f.read()


def _clean(done: list[str]) -> None:
    """Remove what finished calls left but the folders, which are the record that they ran."""
    root = base()
    for key in done:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"{root}/{key}"):
                if name != "answer":
                    os.unlink(f"{root}/{key}/{name}")
    for name in os.listdir(root):
        if re.sub(r"\.(in|out)\.\d+$", "", name) in done and "." in name:
            os.unlink(f"{root}/{name}")


# ---- commands --------------------------------------------------------------------------------------------------
def run(request: Request, stdin: bytes) -> Request:
    """Start a command unless one of this name was started; its state after `wait` seconds at most."""
    folder = f"{base()}/{request['id']}"
    if not os.path.isdir(folder):
        if not stat.S_ISDIR(os.stat(request["cwd"]).st_mode):
            raise NotADirectoryError(20, "Not a directory", request["cwd"])
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
            _start(folder, request, stdin)
    return look(request)


def _start(folder: str, request: Request, stdin: bytes) -> None:
    """Fork the supervisor; return when the command has ended, after `wait` seconds at most."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0openforge-{request['id']}")
    told, tell = os.pipe()
    if os.fork() == 0:
        try:
            os.setsid()
            listener.listen(4096)  # here and not before the fork: this process is the one that SO_PEERCRED names
            null = os.open("/dev/null", os.O_RDWR)
            for fd in (0, 1, 2):  # the service waits until nobody holds its pipes
                os.dup2(null, fd)
            os.close(told)
            os.write(tell, b"+")
            supervisor.Supervisor(folder, request, stdin, listener).run()
        finally:
            os._exit(0)
    listener.close()
    os.close(tell)
    os.read(told, 1)
    select.select([told], [], [], request["wait"])


def look(request: Request, payload: bytes = b"") -> Request:
    """The state of a command. One whose supervisor was killed, and the command with it, ended by signal 9."""
    for patience in (0.0, 1.0):
        time.sleep(patience)  # the one that made the folder may not have come to its socket yet
        alive = _supervisor(request["id"]) is not None
        state = supervisor.state(f"{base()}/{request['id']}")
        if state is not None and (alive or state["ended"] is not None):
            return state
        if alive:
            return {"pieces": 0, "ended": None}
    return _killed(request["id"])


def _killed(key: str) -> Request:
    """The state of a command whose supervisor is dead."""
    folder = f"{base()}/{key}"
    state = supervisor.state(folder)
    if state is not None and state["ended"] is not None:
        return state
    return supervisor.publish(folder, 0 if state is None else state["pieces"], -signal.SIGKILL)


def end(request: Request, payload: bytes) -> Request:
    """End a command with all that it started; one that was not started yet never will be."""
    folder = f"{base()}/{request['id']}"
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
        return supervisor.publish(folder, 0, -signal.SIGKILL)
    deadline = time.monotonic() + _KILL_SECONDS
    while (pid := _supervisor(request["id"])) is not None:
        with contextlib.suppress(ProcessLookupError):
            if time.monotonic() > deadline:  # the agent has stopped it
                for child in supervisor.descendants(pid):
                    os.kill(child, signal.SIGKILL)
                os.kill(pid, signal.SIGKILL)
            else:
                os.kill(pid, signal.SIGTERM)
        time.sleep(0.02)
    return look(request)


def _supervisor(key: str) -> int | None:
    """The pid of a command's supervisor, None if it is gone."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(f"\0openforge-{key}")
        except ConnectionRefusedError:
            return None
        pid: int = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        return pid


# ---- files -----------------------------------------------------------------------------------------------------
def write(request: Request, payload: bytes) -> Request:
    """Write a file, once: a submission that comes late must not undo what happened since."""
    with _once(request["id"]) as first:
        if first:
            source = io.BytesIO(payload)
            files.write(request["root"], request["parts"], request["mode"], len(payload), source.read)
    return {}


def stage(request: Request, payload: bytes) -> Request:
    """A file's content: in the answer if it is short, else laid out in pieces, so that it stays as it was read."""
    data = files.read(request["path"], request["limit"])
    reply: Request = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    if len(data) <= request["inline"]:
        return {**reply, "content": base64.b64encode(data).decode()}
    for i in range(0, len(data), PIECE):
        supervisor.replace(f"{base()}/{request['id']}.out.{i // PIECE}", data[i : i + PIECE])
    return {**reply, "pieces": (len(data) + PIECE - 1) // PIECE}


def entries(request: Request, payload: bytes) -> Request:
    """The entries of a folder."""
    return {"entries": files.entries(request["path"])}


def unpack(request: Request, payload: bytes) -> Request:
    """Put a file or folder at `inside` from an archive in which it is called "root", once."""
    target, beside = request["inside"], f"{request['inside']}.{request['id']}"
    with _once(request["id"]) as first:
        if first:
            shutil.rmtree(beside, ignore_errors=True)
            os.makedirs(beside)
            with tarfile.open(fileobj=io.BytesIO(payload), mode="r:gz") as archive:
                archive.extractall(beside)
            if os.path.isdir(target) and not os.path.islink(target):
                shutil.rmtree(target)
            elif os.path.lexists(target):
                os.unlink(target)
            os.replace(f"{beside}/root", target)
            os.rmdir(beside)
    return {}


@contextlib.contextmanager
def _once(key: str) -> Iterator[bool]:
    """Whether what this name stands for has yet to be done."""
    folder = f"{base()}/{key}"
    first = not os.path.exists(f"{folder}/answer")
    yield first
    if first:
        os.makedirs(folder, 0o700, exist_ok=True)
        supervisor.replace(f"{folder}/answer", b"{}")


# ---- the sandbox -----------------------------------------------------------------------------------------------
def hello(request: Request, payload: bytes) -> Request:
    """Make the work and home folders; where our files lie, what runs here before any agent, which markers are there."""
    for folder in request["folders"]:
        os.makedirs(folder, exist_ok=True)
    return {
        "base": base(),
        "uid": os.getuid(),
        "kernel": os.uname().release,
        "processes": [[p, start] for p, _, _, start in supervisor.processes() if p not in _own()],
        "markers": [m for m in request["markers"] if os.path.exists(m)],
    }


def kill(request: Request, payload: bytes) -> Request:
    """Kill every process but the first, those of `spare` ((pid, start) of the service's own) and our own ancestors.

    All are stopped first, until no new one turns up: a process that forks faster than one can look stands still then.
    """
    spare = {tuple(p) for p in request["spare"]}
    keep = _own()

    def others() -> set[int]:
        return {
            p
            for p, _, state, start in supervisor.processes()
            if state not in "ZX" and p not in keep and (p, start) not in spare
        }

    deadline = time.monotonic() + _KILL_SECONDS
    while (alive := others()) and time.monotonic() < deadline:
        seen: set[int] = set()
        while alive - seen and time.monotonic() < deadline:
            _signal(alive, signal.SIGSTOP)
            seen |= alive
            alive = others()
        _signal(seen, signal.SIGKILL)
        time.sleep(0.001)
    for key in request["jobs"]:
        if os.path.isdir(f"{base()}/{key}"):
            _killed(key)
    return {"left": len(alive)}


def _signal(pids: set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _own() -> set[int]:
    """This process, its ancestors, and pid 1."""
    parents = {p: parent for p, parent, _, _ in supervisor.processes()}
    own, pid = {1}, os.getpid()
    while pid > 1:
        own.add(pid)
        pid = parents.get(pid, 0)
    return own


OPERATIONS: dict[str, Callable[[Request, bytes], Request]] = {
    "run": run,
    "look": look,
    "end": end,
    "write": write,
    "stage": stage,
    "list": entries,
    "unpack": unpack,
    "hello": hello,
    "kill": kill,
}

if __name__ == "__main__":
    main(sys.argv[1])
