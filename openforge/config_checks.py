"""Keys that are right one by one and wrong together: a `ConfigError`, one sentence, before any job.

Of what comes from outside: endpoints, their keys, tables of tasks. `openforge.config` calls them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from openforge.config_reading import ConfigError

if TYPE_CHECKING:
    from openforge.config import Cell, EvalConfig, Server, Tasks

# Keys of `server` that say something about an endpoint only.
_ENDPOINT = ("api", "model", "api_key_env")


def no_endpoint(server: Server, label: str, why: str) -> None:
    """Refuse what says something about an endpoint where there is none."""
    for key in _ENDPOINT:
        if key in server.model_fields_set:
            raise ConfigError(f"{label}: key 'server.{key}' has no effect {why}; remove it")


def cells(cells: Sequence[Cell], label: str) -> None:
    """Every cell has the suite's one policy."""
    for i, cell in enumerate(cells):
        for key in ("url", *_ENDPOINT):
            if cell.server is not None and key in cell.server.model_fields_set:
                raise ConfigError(
                    f"{label}: key 'cells[{i}].server.{key}' has no effect: all cells have one policy; set server.{key}"
                )


def policy(config: EvalConfig, label: str) -> None:
    """Refuse two policies, and an endpoint's URL or key that would show a secret."""
    if config.policy is not None and config.server.url is not None:
        raise ConfigError(
            f"{label}: policy {config.policy!r} and server.url {config.server.url!r} name two policies; remove one"
        )
    url = config.server.url or config.policy or ""
    if "://" not in url:
        no_endpoint(config.server, label, "without an endpoint (server.url, or a URL as policy)")
        return
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{label}: the endpoint {url!r} must be http://HOST:PORT/v1 or https://HOST/v1")
    if parts.username is not None or parts.query or parts.fragment:
        # Not shown: it may be a key. It would stand in every table.
        raise ConfigError(
            f"{label}: the URL of the endpoint {parts.hostname} must be its address only, without user, password or "
            "query; name the variable that holds its key in server.api_key_env"
        )
    name = config.server.api_key_env
    if name is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ConfigError(
            f"{label}: server.api_key_env must be the NAME of an environment variable (letters, digits, _), not a key"
        )


def tasks(tasks: Tasks, label: str) -> None:
    """Refuse what has no effect on the source of tasks."""
    for key in ("columns", "verifier", "verifier_seconds"):
        if tasks.source in ("demo", "tiny") and key in tasks.model_fields_set:
            raise ConfigError(f"{label}: key 'tasks.{key}' has no effect on the generated tasks {tasks.source!r}")
    if tasks.verifier is None and "verifier_seconds" in tasks.model_fields_set:
        raise ConfigError(f"{label}: key 'tasks.verifier_seconds' has no effect without tasks.verifier; remove it")
