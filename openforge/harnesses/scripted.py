"""An agent that is a shell script: a task's own reference, do-nothing or cheating agent. It asks no policy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import ClassVar

from openforge.harnesses.base import Context, Ended, Harness, Output, python_binds
from openforge.sandboxes.protocol import Bind, Sandbox


class Scripted(Harness):
    """Runs the text of its option `script` with bash in the work folder; what it prints is its answer."""

    name = "scripted"
    version = "1"
    software = "none"
    built = False
    dialect = "chat"
    cannot = ("It asks no policy: it is for checking tasks.",)
    constants: ClassVar[dict[str, str]] = {}

    def binds(self, root: Path | None = None) -> list[Bind]:
        return python_binds(Path(sys.base_prefix))

    async def place(self, sandbox: Sandbox) -> str:
        return self.version

    def files(self, ctx: Context) -> dict[str, bytes]:
        return {"agent.sh": str(ctx.options["script"]).encode()}

    def env(self, ctx: Context) -> dict[str, str]:
        return {}

    def argv(self, ctx: Context) -> list[str]:
        return ["bash", f"{ctx.home}/agent.sh"]

    def version_argv(self) -> list[str]:
        return ["true"]

    def read_output(self, ended: Ended, record: bytes | None) -> Output:
        return Output(None, ended.log.decode(errors="replace"))
