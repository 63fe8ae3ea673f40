"""Sandboxes at an Orchard service: a client that is safe where the service is not."""

from openforge.sandboxes.orchard.backend import Options, OrchardBackend
from openforge.sandboxes.orchard.sandbox import OrchardSandbox

__all__ = ["Options", "OrchardBackend", "OrchardSandbox"]
