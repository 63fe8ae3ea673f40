"""ZeroClaw 0.8.4: an assistant with shell, file and web tools; one native program that no package registry has.

Not run by us: no binary could be had. Its configuration and wire form were read, and requests of that form go through
the proxy in the tests; whoever uses it brings the program.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from openforge.harnesses import base
from openforge.sandboxes.protocol import Bind

_INSIDE = "/opt/zeroclaw"


class Zeroclaw(base.Harness):
    """Options: `binary`, the program, which is required; `wire_api`, chat_completions or responses."""

    name = "zeroclaw"
    version = "0.8.4"
    software = "harness-zeroclaw"
    built = False
    dialect = "chat"
    cannot = (
        "It was never run here: its program is on no package registry, `binary` names yours.",
        "It trims and summarises its own history, so an episode may have more than one row.",
    )
    constants: ClassVar[dict[str, str]] = {}

    _binary: Path | None = None

    async def start(self, options: Mapping[str, Any]) -> None:
        """Take the program that the option `binary` names.

        Raises:
            HarnessError: there is none.
        """
        binary = options.get("binary")
        if binary is None:
            raise base.HarnessError(NO_BINARY)
        self._binary = self.root / binary
        if not self._binary.is_file():
            raise base.HarnessError(f"harness.binary: {self._binary} does not exist; it must be ZeroClaw's program")

    def binds(self, root: Path | None = None) -> list[Bind]:
        if self._binary is None:
            raise base.HarnessError(NO_BINARY)
        return [*base.python_binds(), Bind(self._binary.resolve(), _INSIDE)]

    def files(self, ctx: base.Context) -> dict[str, bytes]:
        provider = {
            "uri": f"{ctx.base_url}/v1",
            "model": ctx.model,
            "context_window": ctx.context_window,
            "max_tokens": ctx.max_tokens,
            "wire_api": ctx.options.get("wire_api") or "chat_completions",
        }
        sections: dict[str, dict[str, Any]] = {
            "providers.models.custom.proxy": provider,
            "risk_profiles.open": {"level": "full"},
            "agents.main": {"model_provider": "custom.proxy", "risk_profile": "open"},
        }
        if ctx.turns is not None:
            sections["runtime_profiles.episode"] = {"max_tool_iterations": ctx.turns}
            sections["agents.main"]["runtime_profile"] = "episode"
        return {".zeroclaw/config.toml": base.toml({}, sections)}

    def env(self, ctx: base.Context) -> dict[str, str]:
        # Every field can be set by a variable; so the key stands in no file.
        key = "ZEROCLAW_providers__models__custom__proxy__api_key"
        return {"ZEROCLAW_CONFIG_DIR": f"{ctx.home}/.zeroclaw", key: ctx.api_key}

    def argv(self, ctx: base.Context) -> list[str]:
        # One word with the option: an instruction that starts with - would be taken for another.
        return [_INSIDE, "agent", "-a", "main", f"--message={ctx.instruction}"]

    def version_argv(self) -> list[str]:
        return [_INSIDE, "--version"]

    def read_output(self, ended: base.Ended, record: bytes | None) -> base.Output:
        text = ended.log.decode(errors="replace").strip()
        return base.Output(base.failed(self.name, ended), text or None)


NO_BINARY = (
    f"harness.binary is required with {Zeroclaw.name}: its program is on no package registry; build version "
    f"{Zeroclaw.version} from its source and name the file (a path from the project's root)"
)
