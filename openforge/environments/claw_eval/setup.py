"""What a task's episode needs beside files and a verifier: services, tools, a user, a snapshot, folders of a tree.

Importers write it as member `openforge` of the row's payload, the environment reads it back with `of`. Everything is in
the row but the folders of `tree`, which are read in place: their digests are in the row, and `Tree.changed` tells what
differs by now.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from openforge.environments.claw_eval.evidence import TREE
from openforge.sandboxes.protocol import Bind

KEY = "openforge"  # of the payload
Format = Literal["folder", "claweval", "qwenclaw"]
# Left out of a digest: a run of the tree's own code may leave them.
_UNREAD = ("__pycache__", ".git", ".DS_Store")


@dataclass(frozen=True)
class Service:
    """A program that runs beside the agent, out of its reach; see ClawEval's services[].

    Attributes:
        command: as a shell splits it; `python` and `python3` are the Python of `Setup.software`.
        port: where it listens on 127.0.0.1.
        health_check: URL that answers below 500 once it is ready: some have no such page and answer 404.
        ready_timeout: seconds that it may take.
        reset_endpoint: URL that is POSTed before the agent starts, where there is one.
        env: over the sandbox's own; PORT is the environment's to add where it is missing.
    """

    name: str
    command: str
    port: int
    health_check: str
    health_check_method: str
    ready_timeout: float
    reset_endpoint: str | None
    env: dict[str, str]


@dataclass(frozen=True)
class Tool:
    """A tool offered to the agent: input_schema is a JSON schema, url a service's, on localhost."""

    name: str
    description: str
    input_schema: dict[str, Any]
    url: str
    method: str


@dataclass(frozen=True)
class User:
    """A simulated user: it answers the agent up to max_rounds times."""

    persona: str
    max_rounds: int
    system_prompt_suffix: str


@dataclass(frozen=True)
class Snapshot:
    """What is looked at in the work folder after the agent's death: commands first, which may make the files.

    Attributes:
        files: paths or patterns, relative to /workspace or absolute.
        seconds: limit of each command.
    """

    commands: tuple[str, ...]
    files: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class Tree:
    """A file or folder of the source that a companion sandbox shows, read-only.

    Attributes:
        host: where it stands.
        path: where below TREE it is shown.
        digest: of its content when the task was imported.
    """

    host: str
    path: str
    digest: str

    def bind(self) -> Bind:
        return Bind(Path(self.host), f"{TREE}/{self.path}")

    def changed(self) -> str | None:
        """A sentence if what stands there is no longer what was imported."""
        try:
            now = digest(Path(self.host))
        except OSError as e:
            return f"{self.host}, which the task was imported with, cannot be read: {e.strerror}"
        if now != self.digest:
            return f"{self.host} is not what the task was imported with; restore it, or start a run with a new name"
        return None


@dataclass(frozen=True)
class Setup:
    """See the module.

    Attributes:
        format: what the task was imported from.
        tree: what a companion for services and grading shows below TREE.
        cwd: folder there that services start in and their paths are relative to.
        software: software environment (envs/) of services and grader; None is the sandbox's own Python.
        attachments: files of the row, placed in the work folder, that the prompt comes with.
        late: files of the verifier that are placed in the work folder once the agent is dead, before the snapshot,
            by their path there; the verifier lists them below LATE.
        local: files of the verifier that enter the snapshot as local_file:PATH; the verifier lists them below LOCAL.
        grading: where the verifier runs: `workspace` needs the work folder, `companion` only tree and evidence.
        needs: what must be configured for a score: `judge`, `user`.
    """

    format: Format = "folder"
    services: tuple[Service, ...] = ()
    tools: tuple[Tool, ...] = ()
    tree: tuple[Tree, ...] = ()
    cwd: str = TREE
    software: str | None = None
    user: User | None = None
    attachments: tuple[str, ...] = ()
    snapshot: Snapshot | None = None
    late: tuple[str, ...] = ()
    local: tuple[str, ...] = ()
    grading: Literal["workspace", "companion"] = "workspace"
    needs: tuple[str, ...] = ()

    def payload(self) -> dict[str, Any]:
        """The member KEY of a payload; plain data."""
        return asdict(self)


# Folders of `verifier.files` that hold the files of `Setup.late` and `Setup.local`.
LATE, LOCAL = "late", "local"


def of(row: Mapping[str, Any]) -> Setup:
    """The set-up of a row of the tasks or rollouts table; an empty one where its importer wrote none."""
    payload = json.loads(row["payload"])
    given = payload.get(KEY) if isinstance(payload, dict) else None
    if not isinstance(given, dict):
        return Setup()
    user, snapshot = given["user"], given["snapshot"]
    return Setup(
        format=given["format"],
        services=tuple(Service(**s) for s in given["services"]),
        tools=tuple(Tool(**t) for t in given["tools"]),
        tree=tuple(Tree(**t) for t in given["tree"]),
        cwd=given["cwd"],
        software=given["software"],
        user=None if user is None else User(**user),
        attachments=tuple(given["attachments"]),
        snapshot=None
        if snapshot is None
        else Snapshot(tuple(snapshot["commands"]), tuple(snapshot["files"]), snapshot["seconds"]),
        late=tuple(given["late"]),
        local=tuple(given["local"]),
        grading=given["grading"],
        needs=tuple(given["needs"]),
    )


def digest(path: Path) -> str:
    """Digest of a file, or of a folder's files by path and content; 16 hex digits.

    Raises:
        OSError: something cannot be read.
    """
    total = hashlib.sha256()
    for name, file in _files(path):
        total.update(hashlib.sha256(name.encode(errors="surrogateescape") + b"\0" + file.read_bytes()).digest())
    return total.hexdigest()[:16]


def _files(path: Path) -> Iterator[tuple[str, Path]]:
    if not path.is_dir():
        yield "", path
        return
    for file in sorted(path.rglob("*")):
        name = file.relative_to(path)
        if file.is_file() and not set(name.parts) & set(_UNREAD):
            yield str(name), file
