"""What a sandbox's root file system and disk are made of: folders of the host, an image, memory."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from openforge.sandboxes import images, layer
from openforge.sandboxes.images import Image
from openforge.sandboxes.protocol import SandboxError

_NO_TOOLS = Path("/nonexistent")  # without an image none are needed


class Roots:
    """The images of a backend, and how a sandbox gets its own writable copy of one.

    Args:
        root: the backend's folder of sandboxes.
        cache: folder that images are unpacked to.
    """

    def __init__(self, root: Path, cache: Path) -> None:
        self.tools = _NO_TOOLS
        self._root, self._cache = root, cache
        self._lock = asyncio.Lock()
        self._images: dict[tuple[str, int, int, int], Image] = {}
        self._no_overlay: str | None = None

    async def image(self, archive: Path) -> Image:
        """The unpacked image of an archive."""
        async with self._lock:
            try:
                info = archive.stat()
            except OSError:
                return await asyncio.to_thread(images.unpacked, archive, self._cache)  # which says what is wrong
            key = (str(archive), info.st_ino, info.st_size, info.st_mtime_ns)
            if key not in self._images:
                self._images[key] = await asyncio.to_thread(images.unpacked, archive, self._cache)
            if self.tools is _NO_TOOLS:
                self.tools = await asyncio.to_thread(images.tools, self._cache)
                self._no_overlay = await asyncio.to_thread(no_overlay, self._root)
            return self._images[key]

    async def prepare(self, folder: Path, disk: int | None, image: Image | None) -> dict[str, Any] | None:
        """Make the folders of a new sandbox; the arguments of `layer.mount` where something has to be mounted."""
        (folder / "disk").mkdir(mode=0o700)
        layered = image is not None and self._no_overlay is None
        if disk is None:
            layer.folders(str(folder / "disk"), layered)
        if layered:
            (folder / "lower").mkdir()
            (folder / "root").mkdir()
        elif image is not None:
            if disk is not None:
                raise SandboxError(f"disk_bytes cannot limit a copied image ({self._no_overlay})")
            await asyncio.to_thread(_copy, image.root, folder / "root")
        if disk is None and not layered:
            return None
        return {"folder": str(folder), "disk": disk, "lower": str(image.root) if image and layered else None}

    def named(self, image: Image | None) -> list[str]:
        """The part of `Sandbox.isolation` on the root file system."""
        if image is None:
            return []
        how = "overlayfs" if self._no_overlay is None else f"copied, no overlayfs ({self._no_overlay})"
        return [f"image {image.digest} ({how})"]


def no_overlay(root: Path) -> str | None:
    """Why this user cannot have overlayfs with its upper layer below `root`; None if it works."""
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=".overlay") as name:
        folder = Path(name)
        for part in ("disk", "lower", "root", "source"):
            (folder / part).mkdir()
        (folder / "source/file").touch()
        layer.folders(str(folder / "disk"), image=True)
        program = [sys.executable, "-I", "-S", layer.__file__, name, str(folder / "source")]
        done = subprocess.run(program, capture_output=True, text=True, check=False)
        # overlayfs makes a folder in its work folder that its owner may not enter.
        subprocess.run(["chmod", "-R", "u+rwx", str(folder / "disk")], check=False, capture_output=True)
    return (done.stderr.strip().splitlines() or ["unknown"])[-1] if done.returncode else None


def _copy(source: Path, target: Path) -> None:
    done = subprocess.run(
        ["cp", "-a", "--reflink=auto", "--", str(source), str(target)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        shutil.rmtree(target, ignore_errors=True)
        raise SandboxError(f"the image cannot be copied: {done.stderr.strip()[-300:]}")
