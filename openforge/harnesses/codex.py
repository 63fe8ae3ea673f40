"""Codex 0.171.0: OpenAI's coding agent, with a shell, apply_patch and more; a native program."""

from __future__ import annotations

from typing import Any, ClassVar

from openforge.harnesses import base

_VENDOR = "npm/node_modules/@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl"
_INSTRUCTIONS = ".codex/instructions.md"


class Codex(base.Harness):
    """Options: `instructions`, a file in place of its system prompt of some 4,000 tokens.

    Its turns are bounded by the proxy's budget and its time only.
    """

    name = "codex"
    version = "0.171.0"
    software = "harness-codex"
    dialect = "responses"
    cannot = (
        "It has no turn limit of its own.",
        "It speaks no other dialect than responses, streamed.",
    )
    measured = base.Measured({"": 5172, "instructions": 1363}, cpu_seconds=0.3, rss_mb=145, disk_mb=655)
    constants: ClassVar[dict[str, str]] = {}
    tools = "mcp"
    resumes = True

    def files(self, ctx: base.Context) -> dict[str, bytes]:
        instructions = base.option_file(ctx, "instructions")
        top: dict[str, Any] = {
            "model": ctx.model,
            "model_provider": "proxy",
            "model_context_window": ctx.context_window,
            "model_auto_compact_token_limit": ctx.context_window * 7 // 8,
            "check_for_update_on_startup": False,
            "web_search": "disabled",
        }
        if instructions is not None:
            top["model_instructions_file"] = f"{ctx.home}/{_INSTRUCTIONS}"
        provider = {
            "name": "proxy",
            "base_url": f"{ctx.base_url}/v1",
            "env_key": "OPENFORGE_API_KEY",
            "wire_api": "responses",
            "request_max_retries": 2,
            "stream_max_retries": 2,
        }
        sections: dict[str, dict[str, Any]] = {
            "analytics": {"enabled": False},
            # Plugins ask a host outside for a list; the others' texts would be a part of every prompt.
            "features": {"plugins": False, "goals": False},
            "agents": {"enabled": False},
            "skills": {"include_instructions": False},
            "model_providers.proxy": provider,
        }
        if ctx.mcp_url is not None:
            sections[f"mcp_servers.{base.MCP_NAME}"] = {
                "url": ctx.mcp_url,
                # Without its tools there is no task: it must not begin without them.
                "required": True,
                "startup_timeout_sec": base.MCP_START,
                "tool_timeout_sec": base.MCP_CALL,
            }
        files = {".codex/config.toml": base.toml(top, sections)}
        return files if instructions is None else {**files, _INSTRUCTIONS: instructions}

    def env(self, ctx: base.Context) -> dict[str, str]:
        # As its launcher does, which is not installed: the package brings its own ripgrep.
        path = f"{self.folder}/{_VENDOR}/codex-path:{base.agent_path()}"
        return {"OPENFORGE_API_KEY": ctx.api_key, "PATH": path}

    def argv(self, ctx: base.Context) -> list[str]:
        mode = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--strict-config", "--json"]
        # The instruction comes on standard input: as an argument it could be taken for an option.
        if ctx.again:
            return [self._binary(), "exec", "resume", "--last", *mode, "-"]
        return [self._binary(), "exec", *mode, "-"]

    def stdin(self, ctx: base.Context) -> bytes | None:
        return ctx.instruction.encode()

    def version_argv(self) -> list[str]:
        return [self._binary(), "--version"]

    def _binary(self) -> str:
        return f"{self.folder}/{_VENDOR}/bin/codex"

    def read_output(self, ended: base.Ended, record: bytes | None) -> base.Output:
        events = base.events(ended.log)
        items = [e["item"] for e in events if e.get("type") == "item.completed" and isinstance(e.get("item"), dict)]
        said = [i.get("text") for i in items if i.get("type") == "agent_message"]
        answer = said[-1] if said else None
        ends = [e for e in events if e.get("type") in ("turn.failed", "turn.completed")]
        if ends and ends[-1]["type"] == "turn.failed":
            error = ends[-1].get("error")
            why = error.get("message") if isinstance(error, dict) else error
            return base.Output(f"{self.name} ended with an error: {why}", answer)
        return base.Output(base.failed(self.name, ended), answer)
