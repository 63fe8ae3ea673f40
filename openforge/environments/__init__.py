"""Environments: what an episode consists of, from the task's files to the verifier's verdict."""

from __future__ import annotations

import importlib
import importlib.util
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from openforge.harnesses.base import Harness
from openforge.sandboxes.protocol import Sandbox


class UnknownEnvironment(ValueError):
    """An environment that cannot be made; the message names it."""


@dataclass(frozen=True)
class LlmArgs:
    """How a harness reaches the policy.

    Attributes:
        base_url: the episode's URL as seen from inside the sandbox, without /v1.
        context_window: tokens of prompt and response together.
    """

    base_url: str
    api_key: str = field(repr=False)
    model: str
    context_window: int


llm_args = LlmArgs


@dataclass
class EnvCallResult:
    """How an episode went.

    Attributes:
        status: an end of `openforge.rollout.status.ENDS`.
        message: one sentence on an end that is not `completed`.
        harness_exit: exit code of the harness, None if it was killed or never ran.
        verifier_exit: exit code of the verifier, None if it was killed or never ran.
        verifier_output: the verifier's JSON line, None if it gave none.
        seconds: seconds of the phases that were reached: setup, agent, verify.
        harness_log: the end of what the harness printed.
        answer: the agent's last message, None if it gave none.
        cpu_seconds: CPU seconds of the harness and its commands, None where they were not measured.
        dispatches: calls of the task's tools, with the members of the column `dispatches`; None if the agent did not
            come to its end.
        audit: what the task's services say was done to them, as JSON; None without services.
        snapshot: what the task asks to be looked at after the agent, as JSON; None where it asks for nothing.
        user_rounds: messages of the simulated user.
    """

    status: str = "setup_failed"
    message: str | None = None
    harness_exit: int | None = None
    verifier_exit: int | None = None
    harness_version: str | None = None
    verifier_output: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    harness_log: bytes = b""
    answer: str | None = None
    cpu_seconds: float | None = None
    dispatches: list[dict[str, Any]] | None = None
    audit: str | None = None
    snapshot: str | None = None
    user_rounds: int = 0


class SessionEnd(Protocol):
    """What the proxy says about a closed session."""

    @property
    def budget_exhausted(self) -> bool: ...

    @property
    def policy_failed(self) -> str | None: ...

    def conversation(self) -> list[dict[str, Any]]:
        """The messages of the agent's main thread in the chat format, its last answer included."""
        ...


CloseSession = Callable[[bool], Awaitable[SessionEnd | None]]


class PipelineEnv(Protocol):
    """An environment that owns the episode."""

    async def run(
        self,
        *,
        task: Mapping[str, Any],
        llm_args: LlmArgs,
        harness: Harness,
        harness_options: Mapping[str, Any],
        limits: Mapping[str, Any],
        session: CloseSession,
        judge: Mapping[str, Any] | None = None,
    ) -> EnvCallResult:
        """Run one episode to its verdict.

        Args:
            task: the rollout row.
            limits: turns, tokens and seconds in force; `setup_seconds` and `verify_seconds`, what is left for the
                setup phase and what the verify phase may take (a key that is missing sets no limit).
            session: closes the episode's session at the proxy; called once the harness has ended, with
                whether it ended by itself.
            judge: the rollout's judge, whose endpoint plays users, too; None without one.

        Raises:
            SandboxError: the sandbox could not be used, or was lost.
            HarnessError: the harness could not be started.
        """
        ...


def load(name: str) -> Callable[[Sandbox], PipelineEnv]:
    """`create_env` of the environment `name`: a package here, or the import path of a module of the user's.

    Raises:
        UnknownEnvironment: there is no such module, it cannot be imported, or it has no create_env.
    """
    if not all(part.isidentifier() for part in name.split(".")):
        raise UnknownEnvironment(
            f"environment {name!r} is no import path; it is claw_eval, or my_package.my_env for my_package/my_env.py"
        )
    path = name if "." in name else f"openforge.environments.{name}.env"
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as e:
        if e.name is not None and (path == e.name or path.startswith(f"{e.name}.")):
            raise UnknownEnvironment(f"environment {name!r}: there is no module {path}") from None
        raise _unimportable(name, path, e) from e
    except Exception as e:
        # A user's module may raise anything while it is imported.
        raise _unimportable(name, path, e) from e
    make = getattr(module, "create_env", None)
    if not callable(make):
        raise UnknownEnvironment(f"environment {name!r}: {module.__file__} has no create_env(sandbox)")
    found: Callable[[Sandbox], PipelineEnv] = make
    return found


def _unimportable(name: str, path: str, error: Exception) -> UnknownEnvironment:
    spec = importlib.util.find_spec(path)
    file = spec.origin if spec is not None and spec.origin else path
    # The innermost place in the user's own file.
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    place = file if line is None else f"{file}, line {line}"
    text = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
    return UnknownEnvironment(f"environment {name!r} cannot be imported: {place}: {type(error).__name__}: {text}")


def create_env(name: str, sandbox: Sandbox) -> PipelineEnv:
    """The environment `name` on a sandbox; the errors are those of `load`."""
    return load(name)(sandbox)
