"""The keys of ClawEval's task.yaml that make an episode's set-up; folders of our own and checkouts share them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from openforge.environments.claw_eval.evidence import TREE
from openforge.environments.claw_eval.keys import FolderError, Keys, file_row, once
from openforge.environments.claw_eval.setup import Service, Snapshot, Tool, Tree, User, digest

# Limits that the format sets where task.yaml is silent; an explicit null sets none.
DEFAULT_TURNS, DEFAULT_SECONDS, DEFAULT_SNAPSHOT_SECONDS, DEFAULT_ROUNDS = 20, 300.0, 10.0, 3
# The published tasks' 10 s are for an idle machine, on which a service takes up to 3; one that is busy with other
# episodes takes longer, and a service that fails ends at once and is not waited for.
READY_SECONDS = 60.0
_SERVICE = (
    *("name", "command", "port", "health_check", "health_check_method", "ready_timeout", "reset_endpoint"),
    "env",
)
_TOOL, _ENDPOINT = ("name", "description", "input_schema"), ("tool_name", "url", "method")
_USER = ("enabled", "persona", "max_rounds", "system_prompt_suffix")
_HOSTS = ("localhost", "127.0.0.1")
_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
_TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # what the wire formats of models take
# The widths of the table's columns.
INT32, INT64 = 2**31 - 1, 2**63 - 1


def task_limits(environment: Keys) -> dict[str, Any]:
    """The column task_limits."""
    return {
        "turns": environment.whole("max_turns", DEFAULT_TURNS, INT32),
        "tokens": environment.whole("max_tokens", None, INT64),
        "seconds": environment.seconds("timeout_seconds", DEFAULT_SECONDS),
    }


def services(keys: Keys, strict: bool) -> tuple[Service, ...]:
    """`services`; `strict` refuses unknown keys.

    Raises:
        FolderError: a key is missing or mistyped, two services have one name or port, a URL is not the service's.
    """
    found: list[Service] = []
    for given in keys.each("services"):
        if strict:
            given.known(_SERVICE)
        port = given.whole("port", None, 65535)
        if port is None:
            raise FolderError(f"{keys.file}: key {given.prefix + 'port'!r} is required (a port)")
        reset = given.text("reset_endpoint") if given.rest(()).get("reset_endpoint") is not None else None
        method = given.text("health_check_method", "POST").upper()
        if method not in _METHODS:
            raise given.wrong("health_check_method", f"one of {', '.join(_METHODS)}")
        service = Service(
            name=given.text("name"),
            command=given.text("command"),
            port=port,
            health_check=_url(given, "health_check", {port}),
            health_check_method=method,
            ready_timeout=_ready(given, strict),
            reset_endpoint=None if reset is None else _url(given, "reset_endpoint", {port}),
            env=_env(given, port),
        )
        for other in found:
            for key in ("name", "port"):
                if getattr(other, key) == getattr(service, key):
                    raise FolderError(
                        f"{keys.file}: key {given.prefix + key!r} is {getattr(service, key)!r}, as another service's; "
                        f"they must differ"
                    )
        _words(service, given)
        found.append(service)
    return tuple(found)


def tools(keys: Keys, ports: Sequence[int], strict: bool) -> tuple[Tool, ...]:
    """`tools` with their `tool_endpoints`.

    Raises:
        FolderError: a key is missing or mistyped, a tool has no endpoint or an endpoint no tool, a URL names a port
            that no service has.
    """
    endpoints: dict[str, Keys] = {}
    for given in keys.each("tool_endpoints"):
        if strict:
            given.known(_ENDPOINT)
        name = given.text("tool_name")
        if name in endpoints:
            raise FolderError(f"{keys.file}: key {given.prefix + 'tool_name'!r} is {name!r} again; one endpoint a tool")
        endpoints[name] = given
    found: dict[str, Tool] = {}
    for given in keys.each("tools"):
        if strict:
            given.known(_TOOL)
        name = given.text("name")
        if not _TOOL_NAME.fullmatch(name) or name in found:
            raise given.wrong("name", "1 to 64 letters, digits, _ and -, and no other tool's")
        schema = given.mapping("input_schema", {"type": "object", "properties": {}})
        if schema.get("type", "object") != "object":
            raise given.wrong("input_schema", "a JSON schema of type object")
        if name not in endpoints:
            raise FolderError(f"{keys.file}: tool {name!r} has no entry in 'tool_endpoints'")
        at = endpoints.pop(name)
        method = at.text("method", "POST").upper()
        if method not in _METHODS:
            raise at.wrong("method", f"one of {', '.join(_METHODS)}")
        found[name] = Tool(name, given.free_text("description"), schema, _url(at, "url", set(ports)), method)
    for name, at in endpoints.items():
        raise FolderError(f"{keys.file}: key {at.prefix + 'tool_name'!r} is {name!r}, which is no tool of 'tools'")
    return tuple(found.values())


def user(keys: Keys, strict: bool) -> User | None:
    """`user_agent`, None where it is not enabled."""
    given = keys.inside("user_agent")
    if strict:
        given.known(_USER)
    if not given.flag("enabled", False):
        return None
    rounds = given.whole("max_rounds", DEFAULT_ROUNDS, 1000)
    if rounds is None:
        raise given.wrong("max_rounds", "a whole number above 0")
    return User(given.free_text("persona"), rounds, given.free_text("system_prompt_suffix"))


def snapshot(keys: Keys, environment: Keys) -> Snapshot | None:
    """`env_snapshot_*`; None where the task looks at nothing."""
    commands, files = keys.strings("env_snapshot_commands", []), keys.strings("env_snapshot_files", [])
    seconds = environment.seconds("env_snapshot_timeout", DEFAULT_SNAPSHOT_SECONDS)
    if not (commands or files):
        return None
    return Snapshot(tuple(commands), tuple(files), seconds or DEFAULT_SNAPSHOT_SECONDS)


def agent_files(folder: Path, keys: Keys, hidden: Sequence[Path]) -> list[dict[str, Any]]:
    """What the agent finds in its work folder: `sandbox_files`, else `environment.fixtures`; and attachments.

    Args:
        hidden: data of the task's services. The format lists them as fixtures too, but an agent that can read them
            needs no tool: they are placed only where `sandbox_files` names them.
    """
    prompt = keys.inside("prompt")
    key, names = "sandbox_files", keys.strings("sandbox_files", [])
    if not names:
        key = "environment.fixtures"
        names = [n for n in keys.inside("environment").strings("fixtures", []) if not _below(folder / n, hidden)]
    where = f"{keys.file}: {key}"
    names = [n for name in names for n in _expanded(folder, name)]
    files = once([file_row(folder, folder, n, where) for n in names], where)
    where = f"{keys.file}: prompt.attachments"
    attached = once([file_row(folder, folder, n, where) for n in prompt.strings("attachments", [])], where)
    return files + [f for f in attached if f["path"] not in names]


def service_paths(all_services: Sequence[Service], keys: Keys, cwd: Path) -> dict[str, list[tuple[str, Path]]]:
    """(key, path) of every path below `cwd`, or relative to it, that a service's command or env names, by its name."""
    found: dict[str, list[tuple[str, Path]]] = {}
    for i, service in enumerate(all_services):
        where = f"{keys.file}: services[{i}]"
        program = next((w for w in shlex.split(service.command)[1:] if not w.startswith("-")), None)
        paths = []
        if program is not None and ("/" in program or program.endswith(".py")):
            paths.append((f"{where}.command", cwd / program))
        for name, value in service.env.items():
            if "/" in value and "://" not in value and not value.startswith("/"):
                paths.append((f"{where}.env.{name}", cwd / value))
        found[service.name] = paths
    return found


def program_folder(program: Path, base: Path) -> Path:
    """What is shown for a program of a service: the folder right below `base` that it stands in, for what it imports
    stands there too; the program alone where it lies in `base` itself, or outside."""
    found, top = program.resolve(), base.resolve()
    if not found.is_relative_to(top) or found.parent == top:
        return program
    return base / found.relative_to(top).parts[0]


def tree(root: Path, paths: Sequence[Path]) -> tuple[Tree, ...]:
    """The paths as folders of a tree below `root`, those within another left out.

    Raises:
        FolderError: a path lies outside of root.
    """
    top = root.resolve()
    whole = sorted({p.resolve() for p in paths}, key=lambda p: len(p.parts))
    kept: list[Path] = []
    for path in whole:
        if not path.is_relative_to(top):
            raise FolderError(f"{path} lies outside of {top}; a task's services may use only what lies in it")
        if not _below(path, kept):
            kept.append(path)
    return tuple(Tree(str(p), str(p.relative_to(top)), digest(p)) for p in sorted(kept))


def tree_cwd(root: Path, cwd: Path) -> str:
    """Where a folder of the source stands in a companion."""
    inside = cwd.resolve().relative_to(root.resolve())
    return str(PurePosixPath(TREE) / inside)


def _expanded(folder: Path, name: str) -> list[str]:
    """The name, or those of all files below it where it is a folder."""
    if name.startswith("/") or not (folder / name).is_dir():
        return [name]
    return [str(p.relative_to(folder)) for p in sorted((folder / name).rglob("*")) if p.is_file()]


def _below(path: Path, folders: Sequence[Path]) -> bool:
    resolved = path.resolve()
    return any(resolved.is_relative_to(f.resolve()) for f in folders)


def _env(given: Keys, port: int) -> dict[str, str]:
    env = {}
    for name, value in given.inside("env").rest(()).items():
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise FolderError(
                f"{given.file}: key {given.prefix + 'env.' + str(name)!r} is {value!r}; it must be a text"
            )
        env[str(name)] = str(value)
    if env.get("PORT", str(port)) != str(port):
        key, other = f"{given.prefix}env.PORT", f"{given.prefix}port"
        raise FolderError(f"{given.file}: key {key!r} is {env['PORT']!r}, but {other!r} is {port}")
    return env


def _ready(given: Keys, strict: bool) -> float:
    seconds = given.seconds("ready_timeout", None) or READY_SECONDS
    return seconds if strict else max(seconds, READY_SECONDS)


def _words(service: Service, given: Keys) -> None:
    try:
        words = shlex.split(service.command)
    except ValueError as e:
        raise given.wrong("command", f"a command line ({e})") from None
    if not words:
        raise given.wrong("command", "a command line")


def _url(given: Keys, key: str, ports: set[int]) -> str:
    url = given.text(key)
    try:
        parts = urlsplit(url)
        right = parts.scheme == "http" and parts.hostname in _HOSTS and (parts.port or 80) in ports
    except ValueError:
        right = False
    if not right:
        of = " or ".join(str(p) for p in sorted(ports)) or "of a service"
        raise given.wrong(key, f"an http URL of localhost, port {of}")
    return url
