"""The files of one warm server in a state directory, and its control socket."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openforge import software
from openforge.config import Server as ServerConfig
from openforge.policy import process
from openforge.tables import write_beside

# What reload_weights cannot change, in words that every version of transformers writes alike.
_ARCHITECTURE = (
    "architectures",
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "tie_word_embeddings",
)


def server_key(cfg: ServerConfig, policy: Path, root: Path | None = None) -> str:
    """Digest of what a running server cannot change: its configuration, architecture, tokenizer and templates.

    Nothing of the weights goes in, so that every checkpoint of a run is served by one server.
    """
    config = json.loads((policy / "config.json").read_text())
    digest = hashlib.sha256()
    digest.update(json.dumps(cfg.model_dump(mode="json", exclude={"warm"}), sort_keys=True).encode())
    digest.update(json.dumps([config.get(k) for k in _ARCHITECTURE]).encode())
    files = [policy / "tokenizer.json", policy / "chat_template.jinja"]
    if cfg.chat_template is not None:
        files.append((root or software.ROOT) / cfg.chat_template)
    for file in files:
        digest.update(hashlib.sha256(file.read_bytes()).digest() if file.is_file() else b"-")
    return digest.hexdigest()[:12]


@dataclass(frozen=True)
class Place:
    """Where the server `key` keeps its socket, lock, record and logs."""

    folder: Path
    key: str

    def file(self, suffix: str) -> Path:
        return self.folder / f"{self.key}.{suffix}"

    @property
    def log(self) -> Path:
        """vLLM's output."""
        return self.file("vllm.log")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Held by the one job that looks whether a keeper runs and starts one."""
        with open(self.file("lock"), "a") as f:
            fcntl.flock(f, fcntl.LOCK_EX)
            yield

    def listen(self) -> socket.socket:
        """The keeper's control socket; a stale file of a dead keeper is replaced."""
        self.file("sock").unlink(missing_ok=True)
        s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with self._short("sock") as address:
            s.bind(address)
        os.chmod(self.file("sock"), 0o600)
        s.listen(64)
        return s

    def connect(self) -> socket.socket | None:
        """A connection to the keeper; None if none listens."""
        s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with self._short("sock") as address:
                s.connect(address)
        except (FileNotFoundError, ConnectionRefusedError):
            s.close()
            return None
        return s

    @contextlib.contextmanager
    def _short(self, suffix: str) -> Iterator[str]:
        # A UNIX socket's path may have 107 bytes; a results folder lies deeper easily.
        fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            yield f"/proc/self/fd/{fd}/{self.key}.{suffix}"
        finally:
            os.close(fd)

    def write(self, keeper: process.Identity, server: process.Identity | None) -> None:
        """Record who serves, for whoever finds this keeper killed."""
        record = {"keeper": str(keeper), "server": None if server is None else str(server)}
        write_beside(self.file("json"), json.dumps(record) + "\n")

    def read(self) -> tuple[process.Identity | None, process.Identity | None]:
        """Keeper and server of the record, each None where there is none."""
        try:
            record = json.loads(self.file("json").read_text())
        except FileNotFoundError:
            return None, None
        return tuple(None if record[k] is None else process.parse(record[k]) for k in ("keeper", "server"))  # type: ignore[return-value]

    def clear(self) -> None:
        for suffix in ("json", "sock"):
            self.file(suffix).unlink(missing_ok=True)


def places(folder: Path) -> list[Place]:
    """Every server that has a record in `folder`."""
    return [Place(folder, f.stem) for f in sorted(folder.glob("*.json"))]


def sweep(folder: Path) -> None:
    """End servers whose keeper was killed: they serve nobody and hold gigabytes."""
    for place in places(folder):
        keeper, server = place.read()
        if keeper is not None and not process.alive(keeper):
            if server is not None:
                process.end_session(server, grace=3)
            place.clear()


def send(s: socket.socket, message: dict[str, Any]) -> None:
    """One message of the control protocol: a JSON object on a line."""
    s.sendall(json.dumps(message).encode() + b"\n")
