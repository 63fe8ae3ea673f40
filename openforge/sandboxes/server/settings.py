"""What an operator of the server decides."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from openforge.sandboxes.protocol import Limits
from openforge.sandboxes.server.problems import Problem

HOST_IMAGE = "host"
_UNITS = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_TARGET = re.compile(r"([A-Za-z0-9.*-]+|\[[0-9A-Fa-f:.]+\]):(\d{1,5}|\*)")
_PORT_MOST = 65535


@dataclass(frozen=True)
class Settings:
    """Settings of a server.

    Attributes:
        state: folder that outlives it: sandboxes, jobs, keeper.
        keys: API keys; empty: none is asked for.
        allow: "HOST:PORT" patterns that routes may lead to.
        shares: folders that sandboxes may have bound.
        images: name -> OCI archive.
        open_network: whether sandboxes may have the host's network.
        max_sandboxes: at once.
        cpu, memory: of all sandboxes together, as they ask for it: cores, bytes; None is no limit.
        default_cpu, default_memory: of a sandbox that does not say.
        ttl: seconds that a sandbox lives without a call.
        job_ttl: seconds that a finished job is kept.
        grace: seconds that sandboxes outlive a server that was killed.
        limits: of every sandbox that does not say.
    """

    state: Path
    keys: frozenset[str] = frozenset()
    allow: tuple[str, ...] = ()
    shares: tuple[Path, ...] = ()
    images: Mapping[str, Path] = field(default_factory=dict)
    open_network: bool = False
    max_sandboxes: int = 256
    cpu: float | None = None
    memory: int | None = None
    default_cpu: str = "1"
    default_memory: str = "1Gi"
    ttl: float = 7200.0
    job_ttl: float = 3600.0
    grace: float = 300.0
    limits: Limits = field(default_factory=Limits)

    def networks(self) -> list[str]:
        """Modes offered."""
        return ["none", "proxy", *(["open"] if self.open_network else [])]

    def shared(self, path: str) -> Path:
        """A path below one of the shares, links resolved; `Problem` if it is not."""
        real = Path(path).resolve()
        if not Path(path).is_absolute() or not any(real.is_relative_to(share.resolve()) for share in self.shares):
            offered = ", ".join(map(str, self.shares)) or "none"
            raise Problem("forbidden", f"{path} is below none of the folders that this server shares ({offered})")
        if not real.exists():
            raise Problem("invalid", f"{path} does not exist on the server and cannot be bound into the sandbox")
        return real

    def image(self, name: str | None) -> Path | None:
        """The archive of an image, None for the host's own system; `Problem` for a name that is none."""
        if name is None or name == HOST_IMAGE:
            return None
        if name not in self.images:
            offered = ", ".join([HOST_IMAGE, *sorted(self.images)])
            raise Problem("invalid", f"image {name!r} is not on this server; images here: {offered}")
        return self.images[name]


def cores(text: str) -> float:
    """Cores of "4", "0.5" or "500m"; `Problem` for another text."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(m?)", text)
    value = 0.0 if found is None else float(found[1]) / (1000 if found[2] else 1)
    if not 0 < value < 1 << 20:
        raise Problem("invalid", f"cpu {text!r} is no number of cores, such as 4, 0.5 or 500m")
    return value


def size(text: str) -> int:
    """Bytes of "16Gi", "512M" or "1000"; `Problem` for another text."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kMGT]|[KMGT]i)?", text)
    value = 0 if found is None else int(float(found[1]) * _UNITS[found[2] or ""])
    if not 0 < value < 1 << 60:
        raise Problem("invalid", f"memory {text!r} is no size, such as 16Gi, 512M or a number of bytes")
    return value


def target(text: str, pattern: bool = False) -> tuple[str, str]:
    """(host, port) of "HOST:PORT" ("*" stands for either in a pattern); `Problem` for another text."""
    found = _TARGET.fullmatch(text)
    if found is None or (found[2] != "*" and not 0 < int(found[2]) <= _PORT_MOST) or ("*" in text and not pattern):
        raise Problem("invalid", f"{text!r} is no target: HOST:PORT with a port from 1 to {_PORT_MOST}")
    return found[1].strip("[]").lower(), found[2]


def allowed(text: str, patterns: tuple[str, ...]) -> bool:
    """Whether a target, or a pattern as a whole, lies within one of the patterns."""
    host, port = target(text, pattern=True)
    return any(h in ("*", host) and p in ("*", port) for h, p in (target(p, pattern=True) for p in patterns))
