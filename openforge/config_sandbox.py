"""The section `sandbox` of a configuration: where sandboxes are made, of what, and how long each phase may take."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from openforge.config_reading import Above0, NonNegative, Positive, Section, Text, only_if

Network = Literal["proxy", "none", "open"]
# What an episode's sandbox is on this machine; the others are reached over HTTP.
LOCAL = ("local",)
REMOTE = "orchard"
# Of a rollout row without an image.
DEFAULT_IMAGE = "host"


class SandboxLimits(Section):
    """Limits of one sandbox, its processes together; NULL leaves the backend's own default."""

    memory_gb: Annotated[float, Field(ge=1 / 256)] | None = Field(
        default=None, description="Memory in GiB, /tmp included; a process beyond it is killed."
    )
    cpus: Annotated[float, Field(ge=0.01)] | None = Field(default=None, description="Processors' worth of CPU time.")
    processes: Annotated[int, Field(ge=4)] | None = Field(default=None, description="Processes at once.")
    disk_gb: Annotated[float, Field(ge=1 / 1024)] | None = Field(
        default=None, description="GiB written outside of /tmp and /dev/shm."
    )
    best_effort: bool = Field(
        default=False, description="Leave out a limit that cannot be held, instead of ending as `unsupported`."
    )


class Artifacts(Section):
    """What is kept of episodes, in one archive a shard."""

    keep: Literal["none", "first", "failed", "all"] = Field(
        default="first",
        description="Episodes: the first rollouts of the shard, attempts that did not end as `completed`, or all.",
    )
    most: Positive = Field(
        default=10,
        description="Episodes kept a shard at most.",
        json_schema_extra=only_if(keep=["first", "failed", "all"]),
    )
    work: bool = Field(
        default=False,
        description="Keep the work folder too (.tar), beside the harness's log.",
        json_schema_extra=only_if(keep=["first", "failed", "all"]),
    )


class Sandbox(Section):
    """Sandboxes of episodes."""

    backend: Literal["local", "orchard"] = Field(
        default="local",
        description="`local` makes them on this machine; `orchard` asks a server that speaks Orchard's REST: "
        "`openforge sandboxes serve`, or Orchard on Kubernetes.",
    )
    url: Text | None = Field(
        default=None,
        description="URL of that server; the environment variable SANDBOX_BASE_URL without it.",
        json_schema_extra=only_if(backend=REMOTE),
    )
    api_key_env: Text = Field(
        default="SANDBOX_API_KEY",
        description="NAME of the environment variable with its key; no key where it is not set.",
        json_schema_extra=only_if(backend=REMOTE),
    )
    network_policy: bool = Field(
        default=False,
        description="Orchard on Kubernetes: its cluster has the NetworkPolicy that network `proxy` needs.",
        json_schema_extra=only_if(backend=REMOTE),
    )
    ttl_seconds: Above0 = Field(
        default=7200.0,
        description="Orchard on Kubernetes: age at which it deletes a sandbox (SANDBOX_TTL_HOURS); episodes that may "
        "take longer are refused.",
        json_schema_extra=only_if(backend=REMOTE),
    )
    image: Text | None = Field(
        default=None,
        description="Root file system: an OCI image archive (local), or what the server calls an image; without one "
        "the backend's default, of `local` this machine's system, read-only.",
    )
    network: Network = Field(
        default="proxy", description="What a sandbox reaches: the episode's own proxy and services, nothing, or all."
    )
    limits: SandboxLimits = Field(default_factory=SandboxLimits, description="Limits of one sandbox.")
    warm: NonNegative = Field(default=0, description="Sandboxes kept ready for the next rollouts of a shard.")
    max_alive: Positive | None = Field(
        default=None,
        description="Sandboxes of a shard at once, warm ones included, grading ones not; no such limit without it.",
    )
    creating: Positive = Field(default=8, description="Sandboxes of a shard created at once.")
    create_seconds: Above0 = Field(
        default=300.0, description="Seconds to create one, without waiting for room; then setup_failed."
    )
    setup_seconds: Above0 = Field(
        default=300.0,
        description="Seconds of the setup phase (files, services, harness) from there to the agent's start; then "
        "setup_failed.",
    )
    verify_seconds: Above0 = Field(
        default=120.0,
        description="Seconds of the verify phase beyond the verifier's own (cleaning, copying); then verifier_timeout.",
    )
    grading: Literal["same", "second"] = Field(
        default="same",
        description="Where the verifier runs: in the agent's sandbox once its processes are dead, or in a second one "
        "that the work folder is copied to.",
    )
    artifacts: Artifacts = Field(default_factory=Artifacts, description="What is kept of episodes.")

    def can_fork(self) -> bool:
        """Whether a warm harness can be forked into a sandbox: it is one of this machine, with this machine's files."""
        return self.backend in LOCAL and self.image is None


def image_of(row: Mapping[str, Any], root: Path) -> str | None:
    """The image of a rollout row as its backend takes it; None for the backend's default."""
    if row["image"] == DEFAULT_IMAGE:
        return None
    return str(root / row["image"]) if row["orchestrator"] in LOCAL else str(row["image"])
