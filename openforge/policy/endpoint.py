"""Where a policy answers, and how to attach to an endpoint that is someone else's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from openforge.config import Server as ServerConfig
from openforge.policy.server import MODEL, ServerError
from openforge.policy.state import send
from openforge.proxy import wire

# What a server lists of a model's weights: where they were loaded from, and the context window.
CARD = ("root", "max_model_len")
# Of a long list in a sentence.
SHOWN = 20


@dataclass(frozen=True)
class Words:
    """What a person calls an endpoint's settings: keys of the configuration, or options of a command."""

    url: str = "server.url"
    model: str = "server.model"
    key: str = "server.api_key_env"


_CONFIG = Words()


@dataclass(frozen=True)
class Endpoint:
    """Where a policy answers.

    Attributes:
        base_url: an OpenAI base URL, `/v1` included, without a slash at its end.
        api_key: to be sent as `Authorization: Bearer`; none is sent where it is empty.
        model: the name to ask for.
        context_window: tokens of prompt and response together.
        policy_version: iteration@sha256 of the weights, or none@URL of a foreign endpoint.
        api: the fields that it takes.
        replicas: base URLs of further servers that answer for it.
        seeded: whether it may be sent seeds: one of ours. A foreign vLLM on CPU dies of one where it prefills in
            chunks.
        link: the lease's connection to the keeper, see `Link`; None for a foreign endpoint.
    """

    base_url: str
    api_key: str = field(repr=False)
    model: str
    context_window: int
    policy_version: str
    api: wire.Api = "vllm"
    replicas: tuple[str, ...] = ()
    seeded: bool = False
    link: Link | None = field(default=None, compare=False)


class Link:
    """What a lease and its keeper tell each other while it lasts."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def progress(self) -> None:
        """The job's work gets on: the server's restarts so far are forgiven."""
        # A keeper that is gone is said by `listen`.
        with contextlib.suppress(OSError):
            send(self._sock, {"op": "progress"})

    async def listen(self, restarting: Callable[[str], None]) -> str:
        """Wait until the server is lost; why. `restarting` is called with why whenever it is started again."""
        loop, rest = asyncio.get_running_loop(), b""
        self._sock.setblocking(False)
        while data := await loop.sock_recv(self._sock, 65536):
            *lines, rest = (rest + data).split(b"\n")
            for message in map(json.loads, lines):
                if "lost" in message:
                    return str(message["lost"])
                if "restart" in message:
                    restarting(message["restart"])
        return "the keeper of the policy server is gone, and the server with it"


def attach(cfg: ServerConfig, version: str, progress: Callable[[str], None]) -> Endpoint:
    """Someone else's OpenAI-compatible endpoint at `cfg.url`, used as it is.

    Raises:
        ServerError: it cannot be reached, refuses the key, or leaves open which model to ask for; or a replica serves
            another model or other weights. A replica that cannot be reached may come up later.
    """
    assert cfg.url is not None
    base, key = wire.base_url(cfg.url), api_key(cfg.api_key_env)
    known = listed(cfg.url, key, cfg.api_key_env)
    model = model_of(cfg.url, cfg.model, known, progress)
    entry = known.get(model, {})
    api = api_of(entry) if cfg.api == "auto" else cfg.api
    window = window_of(entry) or cfg.max_model_len
    for url in cfg.replicas:
        try:
            others = listed(url, key, cfg.api_key_env, Words("server.replicas"))
        except ServerError as e:
            progress(str(e))
            continue
        if others and known and model in known and model not in others:
            raise ServerError(f"server.replicas: {url} does not list {model}, which {cfg.url} serves")
        if told := unlike(model, {cfg.url: entry, url: others.get(model, {})}):
            raise ServerError(f"server.replicas: {told}")
        window = min(window, window_of(others.get(model, {})) or window)
    return Endpoint(base, key, model, window, version, api, tuple(map(wire.base_url, cfg.replicas)))


def api_of(entry: Mapping[str, Any]) -> wire.Api:
    """The fields that a listed model's server takes. SGLang takes vLLM's, and ignores what it does not know."""
    return "vllm" if entry.get("owned_by") in ("vllm", "sglang") else "openai"


def window_of(entry: Mapping[str, Any]) -> int | None:
    """Tokens of a listed model's context window; None where its server does not say."""
    window = entry.get("max_model_len")
    return window if isinstance(window, int) and window > 0 else None


def unlike(model: str, entries: Mapping[str, Mapping[str, Any]], keys: Sequence[str] = CARD) -> str | None:
    """What tells that servers (URL -> entry of the listed model) have other weights, as a sentence; None if nothing.

    Their calls would all be recorded as the first one's policy version. What a server does not tell is not compared.
    """
    for key in keys:
        told = {url: entry[key] for url, entry in entries.items() if entry.get(key) is not None}
        for url, value in told.items():
            first, wanted = next(iter(told.items()))
            if value != wanted:
                return f"{url} serves {model} with {key} {value}, {first} with {wanted}; replicas serve one policy"
    return None


def api_key(name: str | None, words: Words = _CONFIG) -> str:
    """The key in environment variable `name`; empty where none is named.

    Raises:
        ServerError: it is not set, or no key.
    """
    if name is None:
        return ""
    key = os.environ.get(name, "").strip()
    if not key:
        raise ServerError(f"{words.key} names {name}, which is not set in this job's environment")
    if not (key.isascii() and key.isprintable()):
        raise ServerError(f"the key in {name} holds characters that no HTTP header can carry")
    return key


def listed(url: str, key: str, key_env: str | None, words: Words = _CONFIG) -> dict[str, Mapping[str, Any]]:
    """The models that an endpoint lists, by name; none where it has no such route.

    Raises:
        ServerError: it cannot be reached, or refuses the key.
    """
    base = wire.base_url(url)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    where = f"{words.url} {url}: {base}/models"
    try:
        answer = httpx.get(f"{base}/models", headers=headers, timeout=30, trust_env=not wire.is_loopback(base))
    except (httpx.HTTPError, httpx.InvalidURL) as e:
        raise ServerError(f"{where} cannot be reached: {str(e) or type(e).__name__}") from None
    if answer.status_code in (401, 403):
        own = f"the key in {key_env}" if key_env else f"a request without a key (see {words.key})"
        raise ServerError(f"{where} refuses {own} (status {answer.status_code})")
    if answer.status_code in (404, 405, 501):
        return {}
    try:
        if answer.status_code != 200:
            raise ValueError(f"status {answer.status_code}")
        return {str(m["id"]): m for m in answer.json()["data"]}
    except (ValueError, KeyError, TypeError) as e:
        raise ServerError(
            f"{where} lists no models ({e}); an OpenAI base URL such as http://HOST:PORT/v1 is expected"
        ) from None


def model_of(
    url: str,
    asked: str | None,
    listed: Mapping[str, Any],
    progress: Callable[[str], None],
    words: Words = _CONFIG,
) -> str:
    """Which of an endpoint's models to ask for: the one asked for, else ours, else the only one.

    Raises:
        ServerError: that leaves it open.
    """
    names = ", ".join(list(listed)[:SHOWN]) + (f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else "")
    if asked is not None:
        if listed and asked not in listed:
            # Aliases are listed nowhere.
            progress(f"{url} does not list the model {asked}, which is asked for all the same; it lists {names}")
        return asked
    if MODEL in listed:
        return MODEL
    if len(listed) == 1:
        return next(iter(listed))
    told = f"lists several models ({names})" if listed else "lists no models"
    raise ServerError(f"{words.url} {url} {told}; name the one to ask for in {words.model}")
