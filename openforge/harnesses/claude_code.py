"""Claude Code 2.1.332: Anthropic's coding agent, with Bash, Read, Edit, Write and many more tools; a native program."""

from __future__ import annotations

import json
from typing import ClassVar

from openforge.harnesses import base

_BINARY = "npm/node_modules/@anthropic-ai/claude-code-linux-x64/claude"


class ClaudeCode(base.Harness):
    """Options: `bare`, its minimal mode; `tools`, the names of the tools that it offers, separated by commas;
    `instructions`, a file in place of its system prompt.

    Its prompt depends on the model's name: one that it knows gets twice the text.
    """

    name = "claude_code"
    version = "2.1.332"
    software = "harness-claude"
    dialect = "messages"
    cannot = ("It speaks no other dialect than messages.",)
    measured = base.Measured({"": 12215, "tools": 4033, "bare": 1070}, cpu_seconds=0.5, rss_mb=211, disk_mb=615)
    constants: ClassVar[dict[str, str]] = {
        # Without it a line that changes with every call heads the system prompt.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "IS_SANDBOX": "1",
        # Else a server's tools are not in the prompt but searched for, with a tool of its own.
        "ENABLE_TOOL_SEARCH": "false",
        "MCP_TIMEOUT": str(base.MCP_START * 1000),
        "MCP_TOOL_TIMEOUT": str(base.MCP_CALL * 1000),
    }
    tools = "mcp"
    resumes = True

    def files(self, ctx: base.Context) -> dict[str, bytes]:
        instructions = base.option_file(ctx, "instructions")
        files = {} if instructions is None else {"instructions.md": instructions}
        if ctx.mcp_url is not None:
            servers = {base.MCP_NAME: {"type": "http", "url": ctx.mcp_url}}
            files["mcp.json"] = json.dumps({"mcpServers": servers}).encode()
        return files

    def env(self, ctx: base.Context) -> dict[str, str]:
        return {
            "ANTHROPIC_BASE_URL": ctx.base_url,
            "ANTHROPIC_API_KEY": ctx.api_key,  # --bare reads no other
            "ANTHROPIC_AUTH_TOKEN": ctx.api_key,
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(ctx.context_window),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(ctx.max_tokens),
        }

    def argv(self, ctx: base.Context) -> list[str]:
        argv = [self._binary(), "-p", "--dangerously-skip-permissions", "--model", ctx.model]
        argv += ["--output-format", "stream-json", "--verbose"]
        if ctx.turns is not None:
            argv += ["--max-turns", str(ctx.turns)]
        if ctx.options.get("bare"):
            argv.append("--bare")
        if ctx.options.get("tools") is not None:
            argv += ["--tools", ctx.options["tools"]]
        if ctx.options.get("instructions") is not None:
            argv += ["--system-prompt-file", f"{ctx.home}/instructions.md"]
        if ctx.mcp_url is not None:
            argv += ["--mcp-config", f"{ctx.home}/mcp.json", "--strict-mcp-config"]
        return [*argv, "--continue"] if ctx.again else argv

    def stdin(self, ctx: base.Context) -> bytes | None:
        # As an argument, an instruction that starts with - would be taken for an option.
        return ctx.instruction.encode()

    def version_argv(self) -> list[str]:
        return [self._binary(), "--version"]

    def _binary(self) -> str:
        return f"{self.folder}/{_BINARY}"

    def read_output(self, ended: base.Ended, record: bytes | None) -> base.Output:
        return base.result_output(self.name, ended)
