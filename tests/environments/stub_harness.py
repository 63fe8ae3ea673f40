"""A stub harness whose agent is a shell script, and what a stub proxy says at the close of a session."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from openforge.harnesses import Context, Ended, Harness, Output
from openforge.sandboxes import Bind, Sandbox


class StubHarness(Harness):
    """A stub: its agent is a shell script, the task's instruction. What it prints is its answer."""

    name = "stub"
    version = "1"
    software = "none"
    dialect = "chat"
    cannot = ()
    constants: ClassVar[dict[str, str]] = {}

    def binds(self, root: Path | None = None) -> list[Bind]:
        base = Path(sys.base_prefix)
        return [] if base.is_relative_to("/usr") else [Bind(base.resolve(), str(base))]

    async def place(self, sandbox: Sandbox) -> str:
        return self.version

    def files(self, ctx: Context) -> dict[str, bytes]:
        # What the environment adds (of tools, attachments, a user) is no script.
        script = re.split("\n\n(?=This task has tools|Attached files|Ask the user|You have worked)", ctx.instruction)[0]
        return {"task.sh": script.encode(), "task.md": ctx.instruction.encode()}

    def env(self, ctx: Context) -> dict[str, str]:
        return {}

    def argv(self, ctx: Context) -> list[str]:
        return ["bash", f"{ctx.home}/task.sh"]

    def version_argv(self) -> list[str]:
        return ["true"]

    def read_output(self, ended: Ended, record: bytes | None) -> Output:
        code = ended.exit_code
        return Output(None if code in (0, None) else f"stub exited with code {code}", ended.log.decode())


@dataclass
class End:
    """What the proxy says at the close of a session."""

    budget_exhausted: bool = False
    policy_failed: str | None = None
    said: tuple[dict[str, Any], ...] = ()

    def conversation(self) -> list[dict[str, Any]]:
        return list(self.said)
