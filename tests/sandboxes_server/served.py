"""A real server in a process of its own, over real sandboxes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

KEY = "a-key-of-the-tests"


class Served:
    """A server of `openforge sandboxes serve` on a state folder; it can be killed and started again."""

    def __init__(self, state: Path, *options: str, key: str = KEY) -> None:
        self.state, self.options, self.key = state, options, key
        self.process: subprocess.Popen[str] | None = None
        self.start()

    def start(self) -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("SANDBOX_", "API_KEYS"))}
        options = list(self.options) if self.key else ["--no-key", *self.options]
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "openforge",
                "sandboxes",
                "serve",
                "--state",
                str(self.state),
                "--port",
                "0",
                *options,
            ],
            stdout=subprocess.PIPE,
            text=True,
            env=env | ({"API_KEYS": self.key} if self.key else {}),
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("export SANDBOX_BASE_URL=http://127.0.0.1:"), line
        self.url = line.strip().partition("=")[2]
        self.api = httpx.Client(base_url=self.url, headers={"X-API-Key": self.key} if self.key else {}, timeout=60)

    def kill(self) -> None:
        """As nobody can prepare for."""
        assert self.process is not None
        self.process.kill()
        self._gone()

    def end(self) -> str:
        """SIGTERM; what it printed."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self._gone()

    def _gone(self) -> str:
        assert self.process is not None
        self.api.close()
        said, _ = self.process.communicate(timeout=60)
        return said

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    # ---- shorthands
    def create(self, **fields: Any) -> dict[str, Any]:
        answer = self.api.post("/sandboxes", json={"image": "host", "wait": True, **fields})
        assert answer.status_code == 200, answer.text
        made: dict[str, Any] = answer.json()
        return made

    def exec(self, sandbox: str, command: str | list[str], **fields: Any) -> dict[str, Any]:
        answer = self.api.post(f"/sandboxes/{sandbox}/exec", json={"command": command, "wait": True, **fields})
        assert answer.status_code == 200, answer.text
        job: dict[str, Any] = answer.json()
        return job


def ends(pidfd: int, seconds: float = 30) -> bool:
    """Whether a process ends in time."""
    return bool(select.select([pidfd], [], [], seconds)[0])
