"""Sandboxes: the protocol of every backend, and the local one (bubblewrap)."""

from openforge.sandboxes.bwrap import probe
from openforge.sandboxes.local import LocalBackend
from openforge.sandboxes.local_sandbox import LocalSandbox
from openforge.sandboxes.owner import Owner, reap
from openforge.sandboxes.protocol import (
    Adopter,
    Backend,
    Bind,
    ExecResult,
    FileEntry,
    Limits,
    Network,
    Sandbox,
    SandboxError,
    SandboxFileError,
    SandboxFull,
    SandboxLost,
    SandboxUnsupported,
)

__all__ = [
    "Adopter",
    "Backend",
    "Bind",
    "ExecResult",
    "FileEntry",
    "Limits",
    "LocalBackend",
    "LocalSandbox",
    "Network",
    "Owner",
    "Sandbox",
    "SandboxError",
    "SandboxFileError",
    "SandboxFull",
    "SandboxLost",
    "SandboxUnsupported",
    "probe",
    "reap",
]
