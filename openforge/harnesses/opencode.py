"""opencode 1.18.33: a coding agent with the tools bash, read, edit, write, task and more; a native program."""

from __future__ import annotations

import json
from typing import Any, ClassVar

from openforge.harnesses import base

_BINARY = "npm/node_modules/opencode-linux-x64/bin/opencode"


class Opencode(base.Harness):
    """No options. Its turns are bounded by the proxy's budget and its time only."""

    name = "opencode"
    version = "1.18.33"
    software = "harness-opencode"
    dialect = "chat"
    cannot = (
        "It has no turn limit of its own.",
        "Its exit code is 0 after errors: they are read from its events.",
    )
    measured = base.Measured({"": 7619}, cpu_seconds=3.6, rss_mb=636, disk_mb=409)
    constants: ClassVar[dict[str, str]] = {
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
    }
    tools = "mcp"
    resumes = True

    def files(self, ctx: base.Context) -> dict[str, bytes]:
        limit = {"context": ctx.context_window, "output": ctx.max_tokens}
        provider = {
            "npm": "@ai-sdk/openai-compatible",  # bundled: nothing is fetched
            "name": "proxy",
            "options": {"baseURL": f"{ctx.base_url}/v1", "apiKey": "{env:OPENFORGE_API_KEY}"},
            "models": {ctx.model: {"name": ctx.model, "limit": limit}},
        }
        config: dict[str, Any] = {
            "autoupdate": False,
            "share": "disabled",
            "snapshot": False,
            "permission": "allow",
            "provider": {"proxy": provider},
        }
        if ctx.mcp_url is not None:
            server = {"type": "remote", "url": ctx.mcp_url, "oauth": False, "timeout": base.MCP_CALL * 1000}
            config["mcp"] = {base.MCP_NAME: server}
        return {".config/opencode/opencode.json": json.dumps(config).encode()}

    def env(self, ctx: base.Context) -> dict[str, str]:
        return {"OPENFORGE_API_KEY": ctx.api_key}

    def argv(self, ctx: base.Context) -> list[str]:
        # Without a title it asks for one, in a call of its own.
        argv = [self._binary(), "run", "--format", "json", "--model", f"proxy/{ctx.model}", "--title", "task"]
        return [*argv, "--continue"] if ctx.again else argv

    def stdin(self, ctx: base.Context) -> bytes | None:
        # As an argument, an instruction that starts with - would be taken for an option.
        return ctx.instruction.encode()

    def version_argv(self) -> list[str]:
        return [self._binary(), "--version"]

    def _binary(self) -> str:
        return f"{self.folder}/{_BINARY}"

    def read_output(self, ended: base.Ended, record: bytes | None) -> base.Output:
        events = base.events(ended.log)
        said = [e["part"].get("text") for e in events if e.get("type") == "text" and isinstance(e.get("part"), dict)]
        answer = said[-1] if said and isinstance(said[-1], str) else None
        if events and events[-1].get("type") == "error":
            error = events[-1].get("error")
            data = error.get("data") if isinstance(error, dict) else None
            why = data.get("message") if isinstance(data, dict) else error
            return base.Output(f"{self.name} ended with an error: {why}", answer)
        return base.Output(base.failed(self.name, ended), answer)
