"""What stands around the agent of one episode: its task's services, and the gateway through which it reaches them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from openforge import software
from openforge.environments.claw_eval import gateway
from openforge.environments.claw_eval.services import Services
from openforge.environments.claw_eval.setup import Setup, Tool, Tree
from openforge.harnesses.base import COMMANDS, Harness, base_python, python_binds, upload_all
from openforge.sandboxes.protocol import Bind, Sandbox, SandboxError
from openforge.sandboxes.waiting import when_free

_COMMAND = Path(__file__).with_name("tool_command.py")


class World:
    """Services, gateway and command of one episode; nothing of each where the task asks for none.

    Attributes:
        mcp_url: where a harness that takes an MCP server finds the tools; None where it gets a command, or none.
        note: what the instruction must say of the tools, for a harness that gets a command; else empty.
    """

    def __init__(self, sandbox: Sandbox, setup: Setup, harness: Harness) -> None:
        self._sandbox, self._setup, self.harness = sandbox, setup, harness
        self._services: Services | None = None
        self._gateway: gateway.Gateway | None = None
        self.mcp_url: str | None = None
        self.note = ""

    @property
    def dispatches(self) -> list[gateway.Dispatch]:
        """Every call of a tool so far (`evidence.DISPATCH`)."""
        return [] if self._gateway is None else self._gateway.dispatches

    async def open(self) -> None:
        """Start the services and open the way to them.

        Raises:
            SandboxError: something of it cannot be had; the message names it.
        """
        setup = self._setup
        if setup.services:
            self._services = Services(await self.companion(), setup.services, setup.cwd, self._python())
            await self._services.start()
        if setup.tools:
            assert self._services is not None, "an importer lets no tool pass without a service"
            self._gateway = gateway.Gateway(setup.tools, self._services)
            url = await self._sandbox.route(self._gateway, gateway.PORT)
            if self.harness.tools == "mcp":
                self.mcp_url = f"{url}/mcp"
            else:
                await self._place_command(url)
                self.note = note(setup.tools)

    async def _place_command(self, url: str) -> None:
        files = [
            (f"{COMMANDS}/tool", _COMMAND.read_bytes(), 0o755),
            (f"{COMMANDS}/tool.url", url.encode(), 0o644),
        ]
        await upload_all(self._sandbox, files)

    async def companion(self) -> Sandbox:
        """A sandbox out of the agent's reach that shows the task's folders of its source, and the Python of services
        and grader.

        Raises:
            SandboxError: a folder is not what the task was imported with.
            SoftwareMissing: the software environment is not built.
        """
        for tree in self._setup.tree:
            if (problem := await asyncio.to_thread(_changed, tree)) is not None:
                raise SandboxError(problem)
        binds = [*(tree.bind() for tree in self._setup.tree), *self._python_binds()]
        return await when_free(lambda: self._sandbox.companion(network="none", binds=binds))

    def _python_binds(self) -> list[Bind]:
        if self._setup.software is None:
            return python_binds()
        software.python_of(self._setup.software, self.harness.root)
        folder = software.folder(self._setup.software, self.harness.root)
        return [Bind(folder.resolve(), str(folder)), *python_binds(base_python(folder))]

    @property
    def python(self) -> str:
        """The Python of services and grader."""
        folder = self._python()
        return "python3" if folder is None else f"{folder}/python"

    def _python(self) -> str | None:
        """The folder with the Python of services and grader, where it is not the sandbox's own."""
        if self._setup.software is None:
            return None
        return str(software.folder(self._setup.software, self.harness.root) / "bin")

    async def shut(self) -> Mapping[str, Any]:
        """End the way to the services, then the services; the audit of each by its name. For when the agent is dead.

        Raises:
            SandboxLost: a service died under the episode, or gives no audit.
        """
        if self._gateway is not None:
            await self._gateway.close()
        if self._services is None:
            return {}
        audit = await self._services.audit()
        await self.close()
        return audit

    async def close(self) -> None:
        """End what is left; again is harmless."""
        if self._gateway is not None:
            await self._gateway.close()
        services, self._services = self._services, None
        if services is not None:
            await services.stop()


@cache
def _changed(tree: Tree) -> str | None:
    # Once a job: it reads every file.
    return tree.changed()


def note(tools: Sequence[Tool]) -> str:
    """What an instruction says of tools that are a command of the shell."""
    lines = "".join(f"- {t.name}({_arguments(t)}): {' '.join(t.description.split())}\n" for t in tools)
    return (
        "\n\nThis task has tools, which you call in the shell: `tool NAME 'ARGUMENTS'`, ARGUMENTS a JSON object, "
        "prints the tool's answer; `tool --list` prints the schema of every tool's arguments. The tools:\n"
        f"{lines}"
    )


def _arguments(tool: Tool) -> str:
    required = tool.input_schema.get("required") or ()
    names = tool.input_schema.get("properties") or {}
    return ", ".join(name if name in required else f"{name}?" for name in names)
