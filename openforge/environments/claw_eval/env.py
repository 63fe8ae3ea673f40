"""claw_eval: tasks in ClawEval's format, driven by a harness, judged by a program.

The order is what makes the reward the task's own: files and services, agent, agent dead, the services' audit, the
snapshot, then the verifier's files, then its run. What the agent left in the sandbox is treated as hostile: the
verifier's folder has a name it could not know, holds nothing of the agent's, and is the verifier's working folder;
links out of the work folder, by which the agent's "result" could be the verifier's own expected one, are removed before
those files enter. Services and what is recorded of them were never within its reach.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from openforge.environments import CloseSession, EnvCallResult, LlmArgs, SessionEnd
from openforge.environments.claw_eval import setup as setups
from openforge.environments.claw_eval import snapshot
from openforge.environments.claw_eval.evidence import Evidence, messages_of
from openforge.environments.claw_eval.setup import Setup
from openforge.environments.claw_eval.user import Model, Said, UserFailed, retold
from openforge.environments.claw_eval.world import World
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
        setup, model = setups.of(task), Model.of(judge)
        if setup.user is not None and model is None:
            result.status = "unsupported"
            result.message = "the task needs a simulated user, and no endpoint plays one: set judge.url"
            return result
        world = World(self._sandbox, setup, harness.root)
        try:
            with _clock(result, "setup"):
                await upload_all(self._sandbox, _placed(task["files"], WORK))
                result.harness_version = await harness.place(self._sandbox)
                await world.open(harness)
            ctx = Context(
                instruction=instruction(task["instruction"], setup) + world.note,
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
                mcp_url=world.mcp_url,
            )
            with _clock(result, "agent"):
                ended, failed = await self._agent(harness, ctx, setup, model, result)
            # Before anything is killed: a connection that dies with its process is no answer taken.
            end = await session(not ended.timed_out)
            await self._sandbox.end_processes()
            output = await harness.output(self._sandbox, ctx, ended)
            result.harness_exit, result.answer = ended.exit_code, output.answer
            result.status, result.message = ending(end, ended, output, ctx)
            if failed is not None and result.status != "policy_failed":
                result.status, result.message = "user_failed", failed
            if result.status in ("policy_failed", "user_failed"):  # the ends here without a verdict
                return result
            with _clock(result, "verify"):
                await self._verify(task, setup, world, llm_args, end, result)
        finally:
            await world.close()
        return result

    async def _agent(
        self, harness: Harness, ctx: Context, setup: Setup, model: Model | None, result: EnvCallResult
    ) -> tuple[Ended, str | None]:
        """Run the harness, once more after each message of the simulated user; how it ended at last, and why the user
        gave no message where that ended it."""
        began = time.monotonic()
        conversation = [Said("user", ctx.instruction)]
        now = ctx
        while True:
            ended = await harness.run(self._sandbox, now)
            result.harness_log += ended.log
            if ended.cpu_seconds is not None:
                result.cpu_seconds = (result.cpu_seconds or 0.0) + ended.cpu_seconds
            user, left = setup.user, ctx.seconds - (time.monotonic() - began)
            if user is None or model is None or ended.exit_code != 0 or result.user_rounds >= user.max_rounds:
                return ended, None
            output = await harness.output(self._sandbox, now, ended)
            if output.error is not None or output.answer is None:
                return ended, None
            conversation.append(Said("agent", output.answer))
            try:
                said = await model.next(user, conversation)
            except UserFailed as e:
                return ended, str(e)
            left = ctx.seconds - (time.monotonic() - began)
            if said is None or left <= 0:
                return ended, None
            result.user_rounds += 1
            conversation.append(Said("user", said))
            message = said if harness.resumes else retold(ctx.instruction, conversation)
            now = dataclasses.replace(ctx, instruction=message, seconds=left, again=True)

    async def _verify(
        self,
        task: Mapping[str, Any],
        setup: Setup,
        world: World,
        llm_args: LlmArgs,
        end: SessionEnd | None,
        result: EnvCallResult,
    ) -> None:
        """Collect the evidence, clean the work folder, bring the verifier in, run it; its failure replaces the
        status."""
        verifier = task["verifier"]
        audit = await world.shut()
        result.dispatches = [_row(d) for d in world.dispatches]
        result.audit = json.dumps(audit) if setup.services else None
        await self._clean()
        seen = await self._snapshot(verifier, setup)
        result.snapshot = None if seen is None else json.dumps(seen)
        evidence = Evidence(
            episode_id=llm_args.base_url.rsplit("/", 1)[-1],
            task_id=task["task_id"],
            model=llm_args.model,
            answer=result.answer,
            messages=messages_of(end.conversation()) if end is not None and "{evidence}" in verifier["command"] else (),
            dispatches=world.dispatches,
            audit=audit,
            snapshot=seen,
            user_rounds=result.user_rounds,
        )
        sandbox = self._sandbox
        if setup.grading == "companion":
            sandbox = await self._sandbox.companion(network="none", binds=await world.binds())
        folder = f"/tmp/verifier-{secrets.token_hex(8)}"
        answer = (f"{folder}/answer", (result.answer or "").encode(errors="replace"), 0o600)
        files = [(f"{folder}/evidence/{name}", data, 0o600) for name, data in evidence.files().items()]
        await upload_all(sandbox, [*_placed(verifier["files"], folder), answer, *files])
        places = {
            "{answer}": f"{folder}/answer",
            "{workspace}": WORK,
            "{evidence}": f"{folder}/evidence",
            "{python}": world.python,
        }
        done = await sandbox.exec(
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

    async def _snapshot(self, verifier: Mapping[str, Any], setup: Setup) -> dict[str, Any] | None:
        """Place the grader's files in the work folder, then look at it; None where the task asks for nothing."""
        by_path = {f["path"]: f for f in verifier["files"]}
        late = [{**by_path[f"{setups.LATE}/{name}"], "path": name} for name in setup.late]
        await upload_all(self._sandbox, _placed(late, WORK))
        local = {
            f"local_file:{name}": {
                "encoding": "base64",
                "content": base64.b64encode(by_path[f"{setups.LOCAL}/{name}"]["content"]).decode(),
            }
            for name in setup.local
        }
        if setup.snapshot is None:
            return local or None
        return await snapshot.take(self._sandbox, setup.snapshot, _clean_env("/tmp")) | local

    async def _clean(self) -> None:
        command = ["python3", "-I", "-S", "-c", _CLEAN]
        done = await self._sandbox.exec(command, timeout=CLEAN_SECONDS, cwd="/", env=_clean_env("/tmp"))
        if done.exit_code != 0:
            told = done.stderr.decode(errors="replace").strip()[-MESSAGE:] or "out of time"
            raise SandboxError(f"the work folder could not be cleaned before verification: {told}")


def create_env(sandbox: Sandbox) -> ClawEval:
    """The environment on a sandbox whose binds hold the harness's."""
    return ClawEval(sandbox)


def instruction(text: str, setup: Setup) -> str:
    """What the agent is asked, the tools aside: the task, its attachments, and what its user's part asks for."""
    suffix = setup.user.system_prompt_suffix if setup.user is not None else ""
    attached = f"Attached files, in {WORK}: {', '.join(setup.attachments)}" if setup.attachments else ""
    return "\n\n".join(filter(None, (text, attached, suffix)))


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


def _row(dispatch: Mapping[str, Any]) -> dict[str, Any]:
    """A dispatch as the column `dispatches` has it."""
    return {
        "tool": dispatch["tool_name"],
        "endpoint": dispatch["endpoint_url"],
        "arguments": json.dumps(dispatch["request_body"]),
        "status": dispatch["response_status"],
        "response": json.dumps(dispatch["response_body"]),
        "latency": dispatch["latency_ms"] / 1000,
        "time": dispatch["timestamp"],
    }


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
