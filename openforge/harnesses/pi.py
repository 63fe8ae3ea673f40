"""pi 0.73.1: a coding agent with the tools read, bash, edit and write, called natively; a node program."""

from __future__ import annotations

import json
from typing import ClassVar

from openforge.harnesses import base


class Pi(base.NodeHarness):
    """No options. Its turns are bounded by the proxy's budget and its time only."""

    name = "pi"
    version = "0.73.1"
    software = "harness-pi"
    script = "@mariozechner/pi-coding-agent/dist/cli.js"
    dialect = "chat"
    cannot = (
        "It has no turn limit of its own.",
        "Its exit code is 0 after errors: they are read from its events.",
    )
    measured = base.Measured({"": 1429}, cpu_seconds=0.7, rss_mb=154, disk_mb=435)
    constants: ClassVar[dict[str, str]] = {
        "PI_OFFLINE": "1",
        "PI_SKIP_VERSION_CHECK": "1",
        "PI_TELEMETRY": "0",
    }
    resumes = True

    def files(self, ctx: base.Context) -> dict[str, bytes]:
        model = {
            "id": ctx.model,
            "name": ctx.model,
            "reasoning": False,
            "input": ["text"],
            "contextWindow": ctx.context_window,
            "maxTokens": ctx.max_tokens,
            "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        }
        provider = {
            "baseUrl": f"{ctx.base_url}/v1",
            "api": "openai-completions",
            "apiKey": "OPENFORGE_API_KEY",  # the name of a variable
            # What vLLM's chat API does not know.
            "compat": {
                "supportsStore": False,
                "supportsDeveloperRole": False,
                "supportsReasoningEffort": False,
            },
            "models": [model],
        }
        # Its defaults (16384 and 20000 tokens) would compact at every turn of a smaller window.
        compaction = {
            "reserveTokens": min(16384, ctx.context_window // 8),
            "keepRecentTokens": min(20000, ctx.context_window // 4),
        }
        return {
            ".pi/agent/models.json": json.dumps({"providers": {"proxy": provider}}).encode(),
            ".pi/agent/settings.json": json.dumps({"compaction": compaction}).encode(),
        }

    def env(self, ctx: base.Context) -> dict[str, str]:
        return {"OPENFORGE_API_KEY": ctx.api_key}

    def argv(self, ctx: base.Context) -> list[str]:
        mode = ["-p", "--mode", "json", "--provider", "proxy", "--model", ctx.model]
        return [*self.command(), *mode, "--continue"] if ctx.again else [*self.command(), *mode]

    def stdin(self, ctx: base.Context) -> bytes | None:
        # As an argument, an instruction that starts with @ or - would be taken for a file or an option.
        return ctx.instruction.encode()

    def read_output(self, ended: base.Ended, record: bytes | None) -> base.Output:
        ends = [e.get("message") for e in base.events(ended.log) if e.get("type") == "message_end"]
        messages = [m for m in ends if isinstance(m, dict) and m.get("role") == "assistant"]
        error = base.failed(self.name, ended)
        if error is None and not ended.timed_out:
            if not messages:
                error = f"{self.name} ended without a message of the model's"
            elif messages[-1].get("stopReason") == "error":
                error = f"{self.name} ended with an error: {messages[-1].get('errorMessage')}"
        return base.Output(error, base.last_assistant(messages))
