"""Sandboxes at an Orchard service: a client that is safe where the service is not."""

from openforge.sandboxes.orchard.backend import OrchardBackend
from openforge.sandboxes.orchard.sandbox import OrchardSandbox
from openforge.sandboxes.orchard.starting import Options

__all__ = ["Options", "OrchardBackend", "OrchardSandbox"]
