"""The owner's side of `spawner.py`: requests over its control socket, and the outputs of commands."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterable, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from openforge.sandboxes import join
from openforge.sandboxes.protocol import SandboxError, SandboxFileError, SandboxLost

OUTPUT_BYTES = 1 << 20  # of each output kept in a result: half from its start, half from its end
LOG_BYTES = 64 << 20  # of both outputs written to a log
_CHUNK = 1 << 16


class Request:
    """One request in flight: an asyncio stream to the forked child."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, request: dict[str, Any], payloads: Iterable[bytes] = ()) -> None:
        """Send the request's line and payloads. A child that has answered already may not read them all."""
        with contextlib.suppress(ConnectionError):
            self._writer.write(json.dumps(request).encode() + b"\n")
            for payload in payloads:
                self._writer.write(payload)
                await self._writer.drain()

    async def stream(self, data: AsyncIterable[bytes]) -> None:
        """Send a payload as it comes. A child that has answered already does not read it all."""
        with contextlib.suppress(ConnectionError):
            async for chunk in data:
                self._writer.write(chunk)
                await self._writer.drain()

    async def refusal(self, said: bytes) -> dict[str, Any]:
        """The child's answer, whose first bytes have been read; empty if it was killed."""
        try:
            reply: dict[str, Any] = json.loads(said + await self._reader.readline())
        except (ConnectionError, ValueError):
            return {}
        return reply

    async def answer(self) -> tuple[dict[str, Any], bytes] | None:
        """The child's answer and payload; None if it was killed before it could give one."""
        try:
            line = await self._reader.readline()
            if not line:
                return None
            reply: dict[str, Any] = json.loads(line)
            return reply, await self._reader.readexactly(reply["size"])
        except (ConnectionError, asyncio.IncompleteReadError):
            return None

    def hang_up(self) -> None:
        """Tell the child to end what it started and answer."""
        with contextlib.suppress(OSError):
            self._writer.write_eof()

    def tell(self, line: dict[str, Any]) -> None:
        """Send one more line to a child that takes some."""
        self._writer.write(json.dumps(line).encode() + b"\n")

    def cancel(self) -> None:
        """Tell a job's child to end it; a hang-up does not."""
        self._writer.write(b".")

    def close(self) -> None:
        self._writer.close()


class Terminal:
    """A command on a terminal inside.

    Attributes:
        fd: our end of the terminal, non-blocking.
        pid: the command's pid inside.
    """

    def __init__(self, fd: int, pid: int, child: Request) -> None:
        self.fd, self.pid, self._child = fd, pid, child

    async def write(self, data: bytes) -> None:
        """Type `data`; a command that does not read makes this wait."""
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self.fd, view) :]
            except BlockingIOError:
                await writable(self.fd)
            except OSError:  # the command has ended
                return

    def signal(self, number: int) -> None:
        """Send a signal to the command's process group."""
        self._child.tell({"signal": number})

    async def ended(self) -> int:
        """The command's exit code, once it has ended; -n if signal n ended it."""
        answer = await self._child.answer()
        return -9 if answer is None else int(answer[0]["exit"])

    def close(self) -> None:
        """Kill what is left of the command."""
        self._child.close()
        os.close(self.fd)


class Spawner:
    """The spawner process, started on the first request and ended by `close` or by this process's death."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # -I -S: no site, no environment; an own session: a Ctrl-C of the terminal is the owner's to handle.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "spawner.py"],  # its command line shows in `ps` inside
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env={},
                cwd=Path(__file__).parent,
                start_new_session=True,
            )
        self._control = ours
        return ours

    def _hand_over(self, fds: Sequence[int], holder: int | None = None) -> socket.socket:
        """Have a child hold `fds`; returns our end of its request socket."""
        control = self._control or self._start()
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                said = b"+" if holder is None else b"+%d" % holder
                socket.send_fds(control, [said], [theirs.fileno(), *fds])
            except OSError:
                ours.close()
                raise SandboxLost("the process that keeps this run's sandboxes died, and they with it") from None
        return ours

    async def request(self, fds: Sequence[int] = (), holder: int | None = None) -> Request:
        """Begin a request whose child holds `fds` (which the caller closes).

        Args:
            holder: of a job, the first process of its sandbox.
        """
        return Request(*await asyncio.open_unix_connection(sock=self._hand_over(fds, holder), limit=1 << 24))

    async def call(self, request: dict[str, Any], payloads: Iterable[bytes] = ()) -> tuple[dict[str, Any], bytes]:
        """A request that needs no descriptors and no hang-up.

        Raises:
            SandboxLost: the child was killed, or the sandbox is gone.
            SandboxFileError: the operation failed inside.
        """
        child = await self.request()
        try:
            await child.send(request, payloads)
            answer = await child.answer()
        finally:
            child.close()
        if answer is None:
            raise SandboxLost(f"the process that should {request['op']} inside the sandbox was killed")
        checked(answer[0])
        return answer

    async def listen(self, holder: int, port: int) -> socket.socket:
        """A listener on the sandbox's own 127.0.0.1:`port`; `SandboxError` if that cannot be had."""
        try:
            return await self._socket("listen", holder, port)
        except join.JoinError as e:
            raise SandboxError(f"cannot listen on port {port} inside the sandbox: {e}") from None

    async def connect(self, holder: int, port: int) -> socket.socket:
        """A connection to the sandbox's own 127.0.0.1:`port`.

        Raises:
            ConnectionRefusedError: nobody listens there.
            SandboxError: the sandbox is gone.
        """
        try:
            return await self._socket("connect", holder, port)
        except join.JoinError as e:
            if e.errno == errno.ECONNREFUSED:
                raise ConnectionRefusedError(e.errno, f"nobody listens on port {port} inside the sandbox") from None
            raise SandboxError(f"cannot connect to port {port} inside the sandbox: {e}") from None

    async def _socket(self, op: str, holder: int, port: int) -> socket.socket:
        with self._hand_over(()) as channel:
            channel.sendall(json.dumps({"op": op, "holder": holder, "port": port}).encode() + b"\n")
            await readable(channel.fileno())
            return join.received(channel)

    async def terminal(self, request: dict[str, Any]) -> Terminal:
        """Run a command on a terminal inside.

        Args:
            request: holder, argv, cwd, env, limits, rows, cols.

        Raises:
            SandboxLost: the sandbox is gone.
            SandboxFileError: cwd is no folder, or there is no terminal to be had.
        """
        channel = self._hand_over(())
        fd = -1
        try:
            channel.sendall(json.dumps({"op": "terminal", **request}).encode() + b"\n")
            await readable(channel.fileno())
            said, fds, _, _ = socket.recv_fds(channel, 1, 1)
            child = Request(*await asyncio.open_unix_connection(sock=channel, limit=1 << 24))
            if not fds:
                checked(await child.refusal(said))
                raise SandboxLost("the process that should open a terminal inside the sandbox was killed")
            fd = fds[0]
            os.set_blocking(fd, False)
            answer = await child.answer()
            if answer is None:
                raise SandboxLost("the process that should open a terminal inside the sandbox was killed")
            return Terminal(fd, checked(answer[0])["pid"], child)
        except BaseException:
            channel.close()
            if fd >= 0:
                os.close(fd)
            raise

    @property
    def pid(self) -> int | None:
        """The spawner's pid; /proc/<pid>/stat accounts for the CPU time of all it ever started and reaped."""
        return None if self._process is None else self._process.pid

    async def close(self) -> None:
        """End the spawner, and with it every sandbox that is still there."""
        if self._control is not None and self._process is not None:
            self._control.close()
            await asyncio.to_thread(self._process.wait)
        self._control = self._process = None


async def readable(fd: int) -> None:
    """Return when `fd` can be read or is at its end."""
    ready = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(fd, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)


async def writable(fd: int) -> None:
    """Return when `fd` can be written to."""
    ready = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_writer(fd, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_writer(fd)


def close_all(fds: list[int]) -> None:
    """Close descriptors and forget them."""
    while fds:
        os.close(fds.pop())


def checked(reply: dict[str, Any]) -> dict[str, Any]:
    """The reply, unless it is an error."""
    if "error" in reply:
        if reply["lost"]:
            raise SandboxLost(reply["error"])
        raise SandboxFileError(reply["error"], reply["errno"])
    return reply


class Log:
    """A log file outside, of limited size."""

    def __init__(self, path: Path | None) -> None:
        self._file: BinaryIO | None = None if path is None else open(path, "ab", buffering=0)  # noqa: SIM115
        self._left = LOG_BYTES

    def write(self, data: bytes) -> None:
        if self._file is None or self._left == 0:
            return
        self._file.write(data[: self._left])
        self._left = max(0, self._left - len(data))
        if self._left == 0:
            self._file.write(f"\n[the log ends here: {LOG_BYTES} bytes]\n".encode())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class Output:
    """Reads one output of a command as it comes and keeps its start and its end."""

    def __init__(self, log: Log, fds: list[int]) -> None:
        """Makes the pipe; its write end is appended to `fds`, which the caller closes."""
        self.fd, write_end = os.pipe()
        fds.append(write_end)
        os.set_blocking(self.fd, False)
        self._log = log
        self._head, self._tail, self._total = bytearray(), bytearray(), 0
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.fd, self._read)

    def _read(self) -> bool:
        """Read once; whether there may be more."""
        try:
            data = os.read(self.fd, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self._loop.remove_reader(self.fd)
            return False
        self._log.write(data)
        self._total += len(data)
        room = OUTPUT_BYTES // 2 - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > OUTPUT_BYTES:  # cut now and then, not on every read
            del self._tail[: -OUTPUT_BYTES // 2]
        return True

    def finish(self) -> bytes:
        """What was written, without waiting for a daemon that keeps the output open."""
        for _ in range(1024):  # the command is dead: its words are in the pipe; a daemon could fill it for ever
            if not self._read():
                break
        self.close()
        tail = bytes(self._tail[-OUTPUT_BYTES // 2 :])
        left_out = self._total - len(self._head) - len(tail)
        mark = f"\n[... {left_out} bytes left out ...]\n".encode() if left_out else b""
        return bytes(self._head) + mark + tail

    def close(self) -> None:
        """Stop reading; again is harmless."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self.fd)
            os.close(self.fd)
