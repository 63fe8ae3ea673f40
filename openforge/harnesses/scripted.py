"""No harness and no model: a shell script of the task's own in the agent's place, for rows to compare a policy with."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from openforge.harnesses import base
from openforge.sandboxes.protocol import Bind, Sandbox


class Scripted(base.Harness):
    """Option `agent`: reference (solves the task), nothing, or cheat, of the task folder's agents/NAME.sh. What it
    prints is its answer; the task's tools are the command `tool`."""

    name = "scripted"
    version = "1"
    software = "none"
    built = False
    dialect = "chat"
    cannot = ("It calls no model: an episode of it has no call, and nothing to train on.",)
    constants: ClassVar[dict[str, str]] = {}

    def binds(self, root: Path | None = None) -> list[Bind]:
        return base.python_binds()

    async def place(self, sandbox: Sandbox) -> str:
        return self.version

    def files(self, ctx: base.Context) -> dict[str, bytes]:
        # Written by plan into the rollout's row; the shell has read it whole before it runs its first command.
        return {".agent.sh": f"{{\n{ctx.options.get('script', 'true')}\nexit\n}}\n".encode()}

    def env(self, ctx: base.Context) -> dict[str, str]:
        return {}

    def argv(self, ctx: base.Context) -> list[str]:
        return ["bash", f"{ctx.home}/.agent.sh"]

    def version_argv(self) -> list[str]:
        return ["true"]

    def read_output(self, ended: base.Ended, record: bytes | None) -> base.Output:
        # A cheat may fail: whether it was paid is what counts.
        return base.Output(None, ended.log.decode(errors="replace").strip() or None)
