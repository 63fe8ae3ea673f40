"""mini-swe-agent 2.4.6: bash only, one command a turn; its prompts are those of a YAML file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from openforge.harnesses import base
from openforge.harnesses.warm import WarmHarness
from openforge.sandboxes.protocol import Sandbox


class MiniSweAgent(base.Harness):
    """Options: `config`, a YAML below the project's root (its own mini.yaml without one); `launch`, fork (into a
    sandbox of this machine with its own system) or command.

    Commands run beside the harness in the episode's sandbox (environment class `local`), whatever the YAML
    says.
    """

    name = "mini_swe_agent"
    version = "2.4.6"
    software = "harness-mini"
    dialect = "chat"
    cannot = (
        "It does not stream.",
        "It drops the assistant turn after a format error.",
        "It takes no images.",
    )
    measured = base.Measured({"": 933}, cpu_seconds=4.2, rss_mb=220, disk_mb=381)
    constants: ClassVar[dict[str, str]] = {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it fetches a price list when it is imported
        "MSWEA_CONFIGURED": "1",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_SILENT_STARTUP": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    record = "trajectory.json"

    _warm: WarmHarness | None = None

    def files(self, ctx: base.Context) -> dict[str, bytes]:
        if ctx.options.get("config") is None:
            return {}
        path = ctx.root / ctx.options["config"]
        if not path.is_file():
            raise base.HarnessError(f"harness.config: {path} does not exist; it must be a YAML of mini-swe-agent's")
        return {"config.yaml": path.read_bytes()}

    def env(self, ctx: base.Context) -> dict[str, str]:
        return {"OPENAI_API_BASE": f"{ctx.base_url}/v1", "OPENAI_API_KEY": ctx.api_key}

    def argv(self, ctx: base.Context) -> list[str]:
        own = f"{self.folder}/lib/python3.11/site-packages/minisweagent/config/mini.yaml"
        config = own if ctx.options.get("config") is None else f"{ctx.home}/config.yaml"
        argv = [f"{self.folder}/bin/mini", "-m", f"openai/{ctx.model}", "-y", "--exit-immediately", "-l", "0"]
        argv += ["-o", f"{ctx.home}/{self.record}", "--environment-class", "local", "-c", config]
        if ctx.turns is not None:
            argv += ["-c", f"agent.step_limit={ctx.turns}"]
        return [*argv, "-t", ctx.instruction]

    def interpreter(self) -> list[str]:
        return [f"{self.folder}/bin/python"]

    def version_argv(self) -> list[str]:
        # The command has no --version.
        ask = "from importlib.metadata import version; print(version('mini-swe-agent'))"
        return [f"{self.folder}/bin/python", "-I", "-c", ask]

    def read_output(self, ended: base.Ended, record: bytes | None) -> base.Output:
        trajectory = base.parsed(record)
        messages = trajectory.get("messages") if isinstance(trajectory, dict) else None
        return base.Output(base.failed(self.name, ended), base.last_assistant(messages))

    async def start(self, options: Mapping[str, Any]) -> None:
        """Import mini-swe-agent once, unless its command is to be started anew for every episode."""
        if options.get("launch", "fork") == "fork":
            if self._warm is None:
                self._warm = WarmHarness(self.folder, self.environment(), self.version)
            await self._warm.start()

    async def close(self) -> None:
        if self._warm is not None:
            await self._warm.close()

    async def run(self, sandbox: Sandbox, ctx: base.Context) -> base.Ended:
        if ctx.options.get("launch", "fork") == "command":
            return await super().run(sandbox, ctx)
        await self.start(ctx.options)
        assert self._warm is not None
        await self.upload(sandbox, ctx)
        env = {**self.environment(), **self.env(ctx)}
        return await self._warm.run(sandbox, self.argv(ctx), env, ctx, self.log)
