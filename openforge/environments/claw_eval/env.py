"""claw_eval: self-contained task folders in ClawEval's format, driven by a harness, judged by a program.

The order is what makes the reward the task's own: files, agent, agent dead, then the verifier's files, then
its run. What the agent left in the sandbox is treated as hostile: the verifier's folder has a name it could
not know, holds nothing of the agent's, and is the verifier's working folder; links out of the work folder, by
which the agent's "result" could be the verifier's own expected one, are removed before those files enter.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from openforge.environments import CloseSession, EnvCallResult, LlmArgs, SessionEnd
from openforge.environments.verdict import VerdictError, parse
from openforge.harnesses.base import Context, Ended, Harness, Output, path_with_python, upload_all
from openforge.sandboxes.join import BASE_ENV, HOME, WORK
from openforge.sandboxes.protocol import ExecResult, Sandbox, SandboxError

CLEAN_SECONDS = 60.0
MESSAGE = 300

# Run in the work folder: removes links that lead out of it and whatever is no file, folder or link (a named
# pipe would block the verifier). realpath: a chain of links counts by where it ends, dangling or not. Folders
# that the agent closed to itself are opened first, so that nothing hides there.
_CLEAN = """\
import contextlib, os, stat
work = "/workspace"
def clean(path):
    mode = os.lstat(path).st_mode
    if stat.S_ISDIR(mode):
        if mode & 0o700 != 0o700:
            os.chmod(path, stat.S_IMODE(mode) | 0o700)
    elif stat.S_ISLNK(mode):
        if not (os.path.realpath(path) + "/").startswith(work + "/"):
            os.unlink(path)
    elif not stat.S_ISREG(mode):
        os.unlink(path)
clean(work)
for folder, folders, files in os.walk(work):
    for name in folders + files:
        with contextlib.suppress(OSError):
            clean(os.path.join(folder, name))
"""


class ClawEval:
    """One episode on one sandbox."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

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
        """See `PipelineEnv.run`."""
        result = EnvCallResult()
        ctx = Context(
            instruction=task["instruction"],
            base_url=llm_args.base_url,
            api_key=llm_args.api_key,
            model=llm_args.model,
            context_window=llm_args.context_window,
            max_tokens=task["sampling"]["max_tokens"],
            turns=limits["turns"],
            seconds=limits["seconds"],
            options=harness_options,
            home=HOME,
            cwd=WORK,
            root=harness.root,
        )
        with _clock(result, "setup"):
            await upload_all(self._sandbox, _placed(task["files"], WORK))
            result.harness_version = await harness.place(self._sandbox)
        with _clock(result, "agent"):
            ended = await harness.run(self._sandbox, ctx)
        # Before anything is killed: a connection that dies with its process is no answer taken.
        end = await session(not ended.timed_out)
        await self._sandbox.end_processes()
        output = await harness.output(self._sandbox, ctx, ended)
        result.harness_exit, result.harness_log = ended.exit_code, ended.log
        result.answer, result.cpu_seconds = output.answer, ended.cpu_seconds
        result.status, result.message = ending(end, ended, output, ctx)
        if result.status != "policy_failed":  # the one end here without a verdict
            with _clock(result, "verify"):
                await self._verify(task["verifier"], result)
        return result

    async def _verify(self, verifier: Mapping[str, Any], result: EnvCallResult) -> None:
        """Clean the work folder, bring the verifier in, run it; its failure replaces the status."""
        await self._clean()
        folder = f"/tmp/verifier-{secrets.token_hex(8)}"
        answer = (f"{folder}/answer", (result.answer or "").encode(errors="replace"), 0o600)
        await upload_all(self._sandbox, [*_placed(verifier["files"], folder), answer])
        places = {
            "{answer}": f"{folder}/answer",
            "{workspace}": WORK,
            "{evidence}": f"{folder}/evidence",
            "{python}": "python3",
        }
        done = await self._sandbox.exec(
            [places.get(word, word) for word in verifier["command"]],
            timeout=verifier["seconds"],
            cwd=folder,
            env=_clean_env(folder),
        )
        result.verifier_exit = done.exit_code
        problem = judged(done, verifier["seconds"])
        if problem is None:
            result.verifier_output = _last_line(done.stdout)
        else:
            result.status, result.message = problem

    async def _clean(self) -> None:
        command = ["python3", "-I", "-S", "-c", _CLEAN]
        done = await self._sandbox.exec(command, timeout=CLEAN_SECONDS, cwd="/", env=_clean_env("/tmp"))
        if done.exit_code != 0:
            told = done.stderr.decode(errors="replace").strip()[-MESSAGE:] or "out of time"
            raise SandboxError(f"the work folder could not be cleaned before verification: {told}")


def create_env(sandbox: Sandbox) -> ClawEval:
    """The environment on a sandbox whose binds hold the harness's."""
    return ClawEval(sandbox)


def ending(end: SessionEnd | None, ended: Ended, output: Output, ctx: Context) -> tuple[str, str | None]:
    """Status and message of the agent phase: the policy's failure first, our limits, then the harness."""
    if end is not None and end.policy_failed:
        return "policy_failed", end.policy_failed
    if end is not None and end.budget_exhausted:
        return "budget_exhausted", "the proxy refused a call beyond the episode's turns or tokens"
    if ended.timed_out:
        return "agent_timeout", f"the harness was killed after {ctx.seconds:g} s"
    if output.error is not None:
        return "agent_error", output.error
    return "completed", None


def judged(done: ExecResult, seconds: float) -> tuple[str, str] | None:
    """Status and message of a verifier that failed; None if it gave a verdict."""
    if done.timed_out:
        return "verifier_timeout", f"the verifier was killed after {seconds:g} s"
    if done.exit_code != 0:
        told = done.stderr.decode(errors="replace").strip()[-MESSAGE:] or "it printed no error"
        return "verifier_failed", f"the verifier exited with code {done.exit_code}: {told}"
    line = _last_line(done.stdout)
    if not line:
        return "verifier_failed", "the verifier printed no line"
    try:
        parse(line)
    except VerdictError as e:
        return "verifier_failed", str(e)
    return None


def _placed(files: Iterable[Mapping[str, Any]], folder: str) -> list[tuple[str, bytes, int]]:
    return [(f"{folder}/{f['path']}", f["content"], f["mode"]) for f in files]


def _last_line(stdout: bytes) -> str:
    lines = stdout.decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else ""


def _clean_env(home: str) -> dict[str, str]:
    """Nothing of the agent's home: a file there could change how a program starts."""
    path = path_with_python()
    return {**BASE_ENV, "HOME": home, "PATH": path, "PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1"}


@contextmanager
def _clock(result: EnvCallResult, phase: str) -> Iterator[None]:
    start = time.monotonic()
    try:
        yield
    finally:
        result.seconds[phase] = time.monotonic() - start
