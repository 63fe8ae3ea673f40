"""Qwen Code 0.24.4: a coding agent with some 20 tools, run_shell_command among them; a node program."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, ClassVar

from openforge.harnesses import base

_TOOLS = (
    *("agent", "cron_create", "cron_delete", "cron_list", "edit", "enter_worktree", "exit_worktree", "get_goal"),
    *(
        "glob",
        "grep_search",
        "list_agents",
        "loop_wakeup",
        "monitor",
        "notebook_edit",
        "read_file",
        "read_mcp_resource",
    ),
    *("record_artifact", "report_findings", "run_shell_command", "send_message", "skill", "task_stop", "tool_call"),
    *("tool_search", "update_goal", "web_fetch", "write_file", "zoom_image"),
)
_TURN_LIMIT = 53  # exit code at --max-session-turns


class QwenCode(base.NodeHarness):
    """Options: `tools`, the names of the tools that it offers, separated by commas; `instructions`, a file in place of
    its system prompt.

    Its own --bare is no option here: it reads no settings then, and so not the window.
    """

    name = "qwen_code"
    version = "0.24.4"
    software = "harness-qwen"
    script = "@qwen-code/qwen-code/cli-entry.js"
    dialect = "chat"
    cannot = ("Its pins leave out the optional packages for images, audio and the clipboard.",)
    measured = base.Measured({"": 18207, "tools": 10607}, cpu_seconds=3.3, rss_mb=1897, disk_mb=354)
    constants: ClassVar[dict[str, str]] = {"QWEN_CODE_SUPPRESS_YOLO_WARNING": "1"}
    tools = "mcp"
    resumes = True

    def files(self, ctx: base.Context) -> dict[str, bytes]:
        settings: dict[str, Any] = {
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "general": {"enableAutoUpdate": False},
            "model": {"generationConfig": {"contextWindowSize": ctx.context_window}},
        }
        if ctx.options.get("tools") is not None:
            offered = [name.strip() for name in ctx.options["tools"].split(",")]
            settings["tools"] = {"disabled": [name for name in _TOOLS if name not in offered]}
        if ctx.mcp_url is not None:
            # Else they are not in the prompt but searched for.
            always = {"alwaysLoadTools": True, "trust": True}
            server = {"httpUrl": ctx.mcp_url, "timeout": base.MCP_CALL * 1000, **always}
            settings["mcpServers"] = {base.MCP_NAME: server}
        return {".qwen/settings.json": json.dumps(settings).encode()}

    def env(self, ctx: base.Context) -> dict[str, str]:
        return {
            "OPENAI_API_KEY": ctx.api_key,
            "OPENAI_BASE_URL": f"{ctx.base_url}/v1",
            "OPENAI_MODEL": ctx.model,
            "QWEN_CODE_MAX_OUTPUT_TOKENS": str(ctx.max_tokens),
        }

    def argv(self, ctx: base.Context) -> list[str]:
        argv = [*self.command(), "--yolo", "--auth-type", "openai", "--model", ctx.model]
        argv += ["--output-format", "stream-json"]
        if ctx.again:
            argv.append("--continue")
        if ctx.turns is not None:
            argv += ["--max-session-turns", str(ctx.turns)]
        instructions = base.option_file(ctx, "instructions")
        return argv if instructions is None else [*argv, f"--system-prompt={instructions.decode()}"]

    def stdin(self, ctx: base.Context) -> bytes | None:
        # As an argument, an instruction that starts with / or - would be taken for a command or an option.
        return ctx.instruction.encode()

    def read_output(self, ended: base.Ended, record: bytes | None) -> base.Output:
        if ended.exit_code == _TURN_LIMIT:
            ended = dataclasses.replace(ended, exit_code=0)
        return base.result_output(self.name, ended)
