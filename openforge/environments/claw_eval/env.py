"""claw_eval: tasks in ClawEval's format, driven by a harness, judged by a program.

The order is what makes the reward the task's own: files and services, agent, agent dead, the services' audit, the
snapshot, then the verifier's files, then its run (`verifying`). Services, and what is recorded of them, are never
within the agent's reach (`world`).
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from openforge.environments import CloseSession, EnvCallResult, LlmArgs, SessionEnd
from openforge.environments.claw_eval import setup as setups
from openforge.environments.claw_eval.evidence import Evidence, messages_of
from openforge.environments.claw_eval.setup import Setup
from openforge.environments.claw_eval.user import Model, Said, UserFailed, retold
from openforge.environments.claw_eval.verifying import Verifier, clean, look, placed
from openforge.environments.claw_eval.world import World
from openforge.environments.phases import PhaseTimeout, grading_sandbox, within
from openforge.harnesses.base import Context, Ended, Harness, Output, upload_all
from openforge.sandboxes.join import HOME, WORK
from openforge.sandboxes.protocol import Sandbox


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
        world = World(self._sandbox, setup, harness)
        try:
            with _clock(result, "setup"):
                async with within("setup", limits.get("setup_seconds"), "sandbox.setup_seconds"):
                    await upload_all(self._sandbox, placed(task["files"], WORK))
                    result.harness_version = await harness.place(self._sandbox)
                    await world.open()
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
                try:
                    async with within("verify", limits.get("verify_seconds"), "sandbox.verify_seconds"):
                        verifier, evidence = await self._evidence(task, setup, world, llm_args, end, result)
                        await verifier.run(evidence, result)
                except PhaseTimeout as e:
                    result.status, result.message = "verifier_timeout", str(e)
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

    async def _evidence(
        self,
        task: Mapping[str, Any],
        setup: Setup,
        world: World,
        llm_args: LlmArgs,
        end: SessionEnd | None,
        result: EnvCallResult,
    ) -> tuple[Verifier, Evidence]:
        """Collect what is known of the episode, in the result too, and make ready where it is judged."""
        declared = task["verifier"]
        audit = await world.shut()
        result.dispatches = [_row(d) for d in world.dispatches]
        result.audit = json.dumps(audit) if setup.services else None
        sandbox = await grading_sandbox(self._sandbox, task, world.harness)
        await clean(sandbox)
        seen = await look(sandbox, declared, setup)
        result.snapshot = None if seen is None else json.dumps(seen)
        # Made of every call's messages: only for a verifier that reads it.
        told = end is not None and "{evidence}" in declared["command"]
        evidence = Evidence(
            episode_id=llm_args.base_url.rsplit("/", 1)[-1],
            task_id=task["task_id"],
            model=llm_args.model,
            answer=result.answer,
            messages=messages_of(end.conversation()) if end is not None and told else (),
            dispatches=world.dispatches,
            audit=audit,
            snapshot=seen,
            user_rounds=result.user_rounds,
        )
        if setup.grading == "companion":
            sandbox = await world.companion()
        return Verifier(declared, sandbox, world.python), evidence


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


@contextmanager
def _clock(result: EnvCallResult, phase: str) -> Iterator[None]:
    start = time.monotonic()
    try:
        yield
    finally:
        result.seconds[phase] = time.monotonic() - start
