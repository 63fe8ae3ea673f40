"""Sandboxes: the protocol of every backend, and the local one (bubblewrap)."""

from openforge.sandboxes.bwrap import Bind, Limits, probe
from openforge.sandboxes.local import LocalBackend, LocalSandbox
from openforge.sandboxes.owner import Owner, reap
from openforge.sandboxes.protocol import (
    ExecResult,
    FileEntry,
    Sandbox,
    SandboxError,
    SandboxFileError,
    SandboxLost,
)

__all__ = [
    "Bind",
    "ExecResult",
    "FileEntry",
    "Limits",
    "LocalBackend",
    "LocalSandbox",
    "Owner",
    "Sandbox",
    "SandboxError",
    "SandboxFileError",
    "SandboxLost",
    "probe",
    "reap",
]
