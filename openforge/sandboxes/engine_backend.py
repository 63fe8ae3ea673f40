"""Sandboxes in the containers of an engine that the user has: Podman, Docker or Apptainer.

The engine starts a container and removes it, by its command line. Everything between is done as in `local`, by joining
the first process's namespaces: an exec then costs no start of the engine's client, and no daemon carries its bytes.
Joining takes root, or an engine that this user runs without it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path

from openforge.sandboxes import images, layer
from openforge.sandboxes.engines import ENGINES, started
from openforge.sandboxes.images import Image, default_cache
from openforge.sandboxes.join import AGENT_ID
from openforge.sandboxes.local import LocalBackend
from openforge.sandboxes.local_sandbox import LocalSandbox
from openforge.sandboxes.owner import Owner
from openforge.sandboxes.protocol import Bind, SandboxError


class EngineBackend(LocalBackend):
    """A `Backend` whose sandboxes are an engine's containers; `image` is needed, a name or an archive's path.

    Args:
        engine: podman, docker or apptainer.
    """

    def __init__(self, engine: str, root: Path, run: str, owner: Owner, images: Path | None = None) -> None:
        if engine not in ENGINES:
            raise SandboxError(f"engine {engine!r} must be one of {', '.join(ENGINES)}")
        super().__init__(root, run, owner, images=images)
        self.engine = ENGINES[engine]
        self._cache = images or default_cache()
        self._containers: set[str] = set()

    async def _root(self, image: str | None) -> Image | None:
        if shutil.which(self.engine.program) is None:
            raise SandboxError(f"{self.engine.program} is not installed")
        if image is None:
            raise SandboxError(f"a sandbox of {self.engine.program} needs an image")
        path = Path(image)
        name = self.engine.archive(path.absolute(), _layout(path)) if path.is_file() else image
        return Image(name, Path("/"), {}, "/bin/sh")

    async def _launch(self, sandbox: LocalSandbox, binds: Sequence[Bind], noted: int) -> tuple[int, list[str]]:
        os.close(noted)  # the engine minds its own
        if sandbox.limits.disk_bytes is not None and not sandbox.limits.best_effort:
            raise SandboxError(f"limits.disk_bytes is not offered by {self.engine.program}")
        image, folder = sandbox.image, self.root / sandbox.sandbox_id
        assert image is not None
        for bind in binds:
            if not bind.host.exists():
                raise SandboxError(f"{bind.host} does not exist and cannot be bound into the sandbox")
        (folder / "disk").mkdir()
        layer.folders(str(folder / "disk"), None, layered=False)
        if os.geteuid() == 0:  # see join.enter
            for name in ("work", "home"):
                os.chown(folder / "disk" / name, AGENT_ID, AGENT_ID)
        tools = await asyncio.to_thread(images.tools, self._cache)
        name = f"openforge-{sandbox.sandbox_id}"
        self._containers.add(name)
        await self._said(
            self.engine.start_line(name, image.digest, sandbox.network, folder, tools, binds, sandbox.limits.tmp_bytes)
        )
        facts = started(self.engine, name, await self._said(self.engine.facts_line(name)))
        sandbox.image = Image(facts.image, image.root, dict(facts.env), image.shell)
        version = (await self._said([self.engine.program, "--version"])).strip().rpartition(" ")[2]
        return facts.pid, [f"{self.engine.program} {version}", f"image {facts.image}"]

    async def _forget(self, sandbox: LocalSandbox) -> None:
        name = f"openforge-{sandbox.sandbox_id}"
        if name in self._containers:
            await self._said(self.engine.remove_line(name), check=False)
            self._containers.discard(name)

    async def _said(self, line: list[str], check: bool = True) -> str:
        """What a command of the engine prints; `SandboxError` with what it says if it fails."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *line, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe
        )
        out, err = await process.communicate()
        if check and process.returncode != 0:
            words = " ".join(err.decode(errors="replace").split())[-500:]
            raise SandboxError(f"{line[0]} {line[1]} failed: {words}")
        return out.decode(errors="replace")


def _layout(path: Path) -> str:
    try:
        with tarfile.open(path, "r:") as tar:
            return "oci" if any(m.name.removeprefix("./") == "oci-layout" for m in tar) else "docker"
    except tarfile.TarError as e:
        raise SandboxError(f"image {path}: no archive of an image ({e}); {images.RIGHT}") from None
