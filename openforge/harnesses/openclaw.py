"""OpenClaw 2026.9.6: a personal assistant with exec, process, read, write, edit and more tools; a node program."""

from __future__ import annotations

import json
from typing import Any, ClassVar

from openforge.harnesses import base

_CONFIG = "openclaw.json"


class Openclaw(base.NodeHarness):
    """Options: `bare`, its reduced set of tools for local models.

    Its turns are bounded by the proxy's budget and its time only. It could speak chat or messages too, but there it
    moves a message of its own to the end of every turn, so that no prompt extends the one before.
    """

    name = "openclaw"
    version = "2026.9.6"
    software = "harness-openclaw"
    script = "openclaw/openclaw.mjs"
    dialect = "responses"
    cannot = (
        "It has no turn limit of its own.",
        "Its prompts hold the minute and a session id, so the prompts of a group differ.",
    )
    measured = base.Measured({"": 9039, "bare": 8889}, cpu_seconds=10.1, rss_mb=1304, disk_mb=878)
    constants: ClassVar[dict[str, str]] = {}
    tools = "mcp"

    def files(self, ctx: base.Context) -> dict[str, bytes]:
        model = {
            "id": ctx.model,
            "name": ctx.model,
            "reasoning": False,
            "input": ["text"],
            "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
            "contextWindow": ctx.context_window,
            "maxTokens": ctx.max_tokens,
        }
        provider = {
            "baseUrl": f"{ctx.base_url}/v1",
            "apiKey": "${OPENFORGE_API_KEY}",
            "api": "openai-responses",
            "timeoutSeconds": max(1, int(ctx.seconds)),
            "models": [model],
        }
        config: dict[str, Any] = {
            "models": {"mode": "replace", "providers": {"proxy": provider}},
            "agents": {"defaults": {"model": {"primary": f"proxy/{ctx.model}"}}},
            "update": {"checkOnStart": False},
            "plugins": {"enabled": False},
        }
        if ctx.mcp_url is not None:
            server = {
                "url": ctx.mcp_url,
                "transport": "streamable-http",
                "connectionTimeoutMs": base.MCP_START * 1000,
                "requestTimeoutMs": base.MCP_CALL * 1000,
            }
            config["mcp"] = {"servers": {base.MCP_NAME: server}}
            # Else a server's tools are not in the prompt but searched for, as are some forty of its own that need what
            # is not here; those that it declares itself stay.
            config["tools"] = {"toolSearch": False, "allow": ["group:fs", "group:runtime", "bundle-mcp"]}
        return {_CONFIG: json.dumps(config).encode()}

    def env(self, ctx: base.Context) -> dict[str, str]:
        return {"OPENFORGE_API_KEY": ctx.api_key}

    def argv(self, ctx: base.Context) -> list[str]:
        argv = [*self.command(), "agent", "exec", "--config", f"{ctx.home}/{_CONFIG}", "--cwd", ctx.cwd, "--json"]
        # Its own clock must not end it before ours does.
        argv += ["--message-file", "-", "--timeout", str(int(ctx.seconds) + 60)]
        return [*argv, "--local-model-lean"] if ctx.options.get("bare") else argv

    def stdin(self, ctx: base.Context) -> bytes | None:
        return ctx.instruction.encode()

    def read_output(self, ended: base.Ended, record: bytes | None) -> base.Output:
        # One JSON object, and what it logs after it.
        start = ended.log.find(b"{\n")
        try:
            told, _ = json.JSONDecoder().raw_decode(ended.log[start:].decode(errors="replace"))
        except (ValueError, RecursionError):
            told = {}
        if told.get("ok") is False and isinstance(told.get("error"), dict):
            return base.Output(f"{self.name} ended with an error: {told['error'].get('message')}", None)
        return base.Output(base.failed(self.name, ended), told.get("final") or None)
