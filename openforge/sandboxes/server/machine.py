"""GET /resources: this host, in the shape in which Orchard tells of a cluster."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from typing import Any

import psutil

from openforge.sandboxes.server.hosted import NAMESPACE, Hosted


def resources(hosted: Iterable[Hosted]) -> dict[str, Any]:
    """Capacity, what sandboxes asked for, and what is left of it: cpu in cores, memory in bytes."""
    sandboxes = list(hosted)
    whole = {"cpu": float(os.cpu_count() or 1), "memory_bytes": int(psutil.virtual_memory().total)}
    asked = {"cpu": sum(h.kept.cpu for h in sandboxes), "memory_bytes": sum(h.kept.memory for h in sandboxes)}
    left = {name: max(0, whole[name] - asked[name]) for name in whole}
    pods = [
        {
            "name": f"sandbox-{h.sandbox_id}",
            "namespace": NAMESPACE,
            "phase": "Running" if h.status == "ready" else "Pending",
            "cpu_request": h.kept.cpu,
            "memory_request_bytes": h.kept.memory,
        }
        for h in sandboxes
    ]
    return {
        "status": "ok",
        "nodes": [{"name": socket.gethostname(), "capacity": whole, "allocatable": whole}],
        "total_capacity": whole,
        "total_allocatable": whole,
        "total_requested": asked,
        "available": left,
        "sandbox_pods": pods,
    }
