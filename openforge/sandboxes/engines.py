"""Command lines of container engines: Podman and Docker, and Apptainer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openforge.sandboxes.join import HOME, WORK
from openforge.sandboxes.protocol import Bind, SandboxError
from openforge.sandboxes.unpack import TOOLS


@dataclass(frozen=True)
class Started:
    """What an engine says of a container that runs.

    Attributes:
        pid: of its first process, as this host numbers it.
        image: digest of its image, or the image's path.
        env: environment that the image asks for.
    """

    pid: int
    image: str
    env: Mapping[str, str]


@dataclass(frozen=True)
class Engine:
    """A container engine.

    Attributes:
        program: its command.
        start: words that start a container; {name}, {tmp_bytes} and {image} are filled in.
        network: words by network mode; `proxy` is a network of its own, where a listener is made from outside.
        bind: word that shows {host} at {inside}; {mode} is ro or rw.
        process: words that make the tools' `sleep` the first process; none if the engine has one of its own.
        facts: words that ask for `Started`.
        remove: words that kill a container and remove it.
        archives: how an image archive is named, by its layout.
    """

    program: str
    start: Sequence[str]
    network: Mapping[str, Sequence[str]]
    bind: Sequence[str]
    process: Sequence[str]
    facts: Sequence[str]
    remove: Sequence[str]
    archives: Mapping[str, str]

    def start_line(
        self, name: str, image: str, network: str, folder: Path, tools: Path, binds: Sequence[Bind], tmp_bytes: int
    ) -> list[str]:
        """The command that starts a container; `folder` has disk/work and disk/home."""
        shown = [(folder / "disk/work", WORK, "rw"), (folder / "disk/home", HOME, "rw")]
        shown += [(tools, TOOLS, "ro")] if self.process else []
        shown += [(b.host, b.inside or str(b.host), "ro") for b in binds]
        mounts = [w.format(host=h, inside=i, mode=m) for h, i, m in shown for w in self.bind]
        # The engine's own options first, then the image, then what runs in it.
        filled = [w.format(name=name, tmp_bytes=tmp_bytes) for w in self.start]
        tail = [image, *self.process] if self.process else [image, name]
        return [self.program, *filled, *self.network[network], *mounts, *tail]

    def facts_line(self, name: str) -> list[str]:
        return [self.program, *self.facts, name]

    def remove_line(self, name: str) -> list[str]:
        return [self.program, *self.remove, name]

    def archive(self, path: Path, layout: str) -> str:
        """How the engine's command line names an image archive; `SandboxError` if it takes none."""
        if layout not in self.archives:
            raise SandboxError(f"{self.program} runs no image archive: load {path} into it and give the image's name")
        return self.archives[layout].format(path=path)


_TIDY = (f"{TOOLS}/ld.so", "--library-path", TOOLS)
_SLEEP = (f"{TOOLS}/env", "--ignore-signal=CHLD", *_TIDY, f"{TOOLS}/sleep", "infinity")
_DOCKER: dict[str, Any] = {
    "network": {"none": ["--network=none"], "proxy": ["--network=none"], "open": ["--network=host"]},
    "bind": ["--volume={host}:{inside}:{mode}"],
    "process": [*_TIDY[1:], *_SLEEP],
    "facts": ["inspect", "--type=container", "--format={{.State.Pid}} {{.Image}} {{json .Config.Env}}"],
}
_RUN = (
    *("run", "--detach", "--rm", "--name={name}", "--hostname=sandbox", "--user=0:0", f"--entrypoint={_TIDY[0]}"),
    *("--cap-drop=all", "--security-opt=no-new-privileges", "--ulimit=nofile=4096:4096"),
    "--ulimit=nproc=1024:1024",  # Podman's own default is above what a root without every capability may set
    *("--tmpfs=/tmp:rw,nosuid,nodev,mode=1777,size={tmp_bytes}", "--shm-size={tmp_bytes}"),
)

ENGINES = {
    "podman": Engine(
        program="podman",
        start=_RUN,
        remove=["rm", "--force", "--ignore", "--time=0"],
        archives={"oci": "oci-archive:{path}", "docker": "docker-archive:{path}"},
        **_DOCKER,
    ),
    "docker": Engine(program="docker", start=_RUN, remove=["rm", "--force"], archives={}, **_DOCKER),
    "apptainer": Engine(
        program="apptainer",
        start=["instance", "start", "--containall", "--no-home", "--writable-tmpfs", "--userns", "--hostname=sandbox"],
        network={"none": ["--net", "--network=none"], "proxy": ["--net", "--network=none"], "open": []},
        bind=["--bind={host}:{inside}:{mode}"],
        process=[],
        facts=["instance", "list", "--json"],
        remove=["instance", "stop", "--signal=KILL"],
        archives={"oci": "oci-archive:{path}", "docker": "docker-archive:{path}"},
    ),
}


def started(engine: Engine, name: str, output: str) -> Started:
    """What the command `facts_line` printed.

    Raises:
        SandboxError: it names no running container.
    """
    if engine.program == "apptainer":
        found = [i for i in json.loads(output)["instances"] if i["instance"] == name]
        if not found:
            raise SandboxError(f"apptainer has no instance {name}")
        return Started(int(found[0]["pid"]), str(found[0]["img"]), {})
    pid, image, env = output.split(" ", 2)
    if int(pid) == 0:
        raise SandboxError(f"the container {name} ended as soon as it had started")
    pairs = (entry.partition("=") for entry in json.loads(env) or ())
    return Started(int(pid), image, {key: value for key, _, value in pairs})
