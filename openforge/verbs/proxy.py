"""`openforge proxy`: the recording proxy without a run. Point an agent at it, query its calls in SQL."""

from __future__ import annotations

import argparse
import logging
import math
import os
import secrets
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from openforge.tables import write_beside
from openforge.verbs import VerbError

if TYPE_CHECKING:
    # Other verbs start without a web server's imports.
    from openforge.proxy.control import Control
    from openforge.proxy.serving import Settings
    from openforge.proxy.wire import Api

KEY = "OPENFORGE_PROXY_KEY"
KEY_LEAST = 16
PORT_MOST = 65535
_SAMPLING: dict[str, tuple[type, Any]] = {
    "temperature": (float, 1.0),
    "top_p": (float, 1.0),
    "top_k": (int, -1),
    "min_p": (float, 0.0),
    "repetition_penalty": (float, 1.0),
    "presence_penalty": (float, 0.0),
    "frequency_penalty": (float, 0.0),
    "max_tokens": (int, 4096),
}


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--upstream", required=True, action="append", metavar="URL", help="the policy server; once for each replica"
    )
    p.add_argument("--port", required=True, type=int, metavar="N", help="port to listen on; 0 takes a free one")
    p.add_argument("--journal", required=True, type=Path, metavar="DIR", help="folder that calls are recorded in")
    p.add_argument("--session", nargs="?", const="", metavar="NAME", help="open a session and write DIR/NAME.env")
    p.add_argument("--host", default="127.0.0.1", help="address of this machine to listen on (127.0.0.1)")
    p.add_argument("--tls-cert", type=Path, metavar="FILE", help="PEM certificate chain: speak TLS")
    p.add_argument("--tls-key", type=Path, metavar="FILE", help="its key, where that is another file")
    p.add_argument("--api", choices=["auto", "vllm", "openai"], default="auto", help="fields the policy server takes")
    p.add_argument("--model", metavar="NAME", help="model to ask for, where the server lists several")
    p.add_argument("--key-env", metavar="NAME", help="environment variable with the policy server's API key")
    p.add_argument("--context-window", type=int, metavar="N", help="tokens; the server's max_model_len without it")
    p.add_argument("--policy-version", metavar="TEXT", help="recorded with every call; MODEL@ROOT without it")
    p.add_argument("--call-seconds", type=float, default=600.0, help="a call is given up after these (600)")
    p.add_argument("--fsync", type=float, metavar="SECONDS", help="fsync the journal in groups, this often")
    for name, (kind, value) in _SAMPLING.items():
        option = f"--{name.replace('_', '-')}"
        p.add_argument(option, type=kind, default=value, metavar="X", help=f"sent with every call ({value})")


def run(args: argparse.Namespace) -> int:
    import uvloop

    from openforge.policy.server import ServerError
    from openforge.proxy.control import Refused
    from openforge.proxy.journal import JournalError
    from openforge.proxy.public import PublicError
    from openforge.proxy.serving import ServingError, serve

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    controls: list[Control] = []

    def ready(control: Control, journal: Path, port: int | None) -> None:
        controls.append(control)
        _announce(args, settings, control)

    try:
        settings = _settings(args)
        uvloop.run(serve(settings, ready))
    except KeyboardInterrupt:
        print("ended before it listened", flush=True)
        return 130
    except (ServerError, PublicError, ServingError, Refused, JournalError) as e:
        raise VerbError(str(e)) from None
    except OSError as e:
        if e.filename is not None:
            raise
        raise VerbError(f"cannot listen on {args.host}, port {args.port}: {e.strerror or e}") from None
    calls = sum(s.calls for c in controls for s in c.gate.sessions.values())
    print(f"ended; calls recorded: {calls}; journal: {args.journal}", flush=True)
    return 0


def _settings(args: argparse.Namespace) -> Settings:
    from openforge.policy.endpoint import Words, api_key
    from openforge.proxy import opening, public, wire
    from openforge.proxy.serving import Settings

    words = Words("--upstream", "--model", "--key-env")
    for url in args.upstream:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc or parts.query:
            # Not shown: it may hold a key, and it would stand in what the proxy prints.
            raise VerbError(
                "--upstream must be http://HOST:PORT/v1 or https://HOST/v1, without user, password or query"
            )
    for name, low in (("port", 0), ("context_window", 1), ("max_tokens", 1)):
        value = getattr(args, name)
        if value is not None and value < low:
            raise VerbError(f"--{name.replace('_', '-')} is {value}; it must be {low} or more")
    if args.port > PORT_MOST:
        raise VerbError(f"--port is {args.port}; it must be {PORT_MOST} or less (0 takes a free one)")
    for name in ("call_seconds", "fsync"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise VerbError(f"--{name.replace('_', '-')} is {value}; it must be a number of seconds above 0")
    if args.tls_key is not None and args.tls_cert is None:
        raise VerbError("--tls-key has no effect without --tls-cert; name the certificate too")
    for name in (public.CERT, public.KEY):
        # The URLs handed out would say https of a port that speaks none.
        if args.tls_cert is None and os.environ.get(name, "").strip():
            raise VerbError(f"{name} has no effect without --tls-cert: give the files by --tls-cert and --tls-key")
    key = api_key(args.key_env, words)
    model, api, window, version = _asked(args, key, words)
    sampling = {name: getattr(args, name) for name in _SAMPLING}
    told = wire.not_taken(sampling) if api == "openai" else None
    if told is not None:
        raise VerbError(told)
    outside = public.from_environment(os.environ, tls=args.tls_cert is not None)
    defaults = {
        "sampling": sampling,
        # A session by hand has no end; a call has (--call-seconds).
        "deadline_seconds": math.inf,
        "policy_version": version,
        "context_window": window,
    }
    try:
        opening.check(opening.filled({}, defaults))
    except ValueError as e:
        raise VerbError(str(e)) from None
    return Settings(
        upstream=tuple(map(wire.base_url, args.upstream)),
        upstream_key=key or None,
        api=api,
        model=model,
        journal=args.journal,
        control_key=_control_key(),
        defaults=defaults,
        host=args.host,
        port=args.port,
        tls=None if args.tls_cert is None else (args.tls_cert, args.tls_key),
        public_url=None if outside is None else outside.url,
        fsync=args.fsync,
        call_seconds=args.call_seconds,
    )


def _asked(args: argparse.Namespace, key: str, words: Any) -> tuple[str, Api, int, str]:
    """Model, api, context window and version of the policy, as its servers tell them and options overrule.

    Raises:
        ServerError, VerbError: no server answers, or they do not serve one policy.
    """
    from openforge.policy.endpoint import api_of, listed, model_of, unlike, window_of
    from openforge.policy.server import ServerError

    found: dict[str, Mapping[str, Any]] = {}
    lost: list[ServerError] = []
    model: str | None = args.model
    for url in args.upstream:
        try:
            known = listed(url, key, args.key_env, words)
        except ServerError as e:
            lost.append(e)
            continue
        if args.model is None and known and model is not None and model not in known:
            raise VerbError(f"--upstream {url} does not list {model}, which {next(iter(found))} serves")
        model = model_of(url, model, known, _warn, words)
        found[url] = known.get(model, {})
    for problem in lost:
        # A replica may come up later; all of them are a mistake.
        if not found:
            raise problem
        _warn(str(problem))
    assert model is not None
    first, entries = next(iter(found)), list(found.values())
    api: Api = args.api if args.api != "auto" else api_of(entries[0])
    for url, entry in found.items():
        if args.api == "auto" and api_of(entry) != api:
            raise VerbError(f"--upstream {first} and {url} take other fields; replicas are alike, or name --api")
    # What an option says of all of them is not asked.
    said = {"root": args.policy_version, "max_model_len": args.context_window}
    if told := unlike(model, found, [key for key, value in said.items() if not value]):
        raise VerbError(f"--upstream {told}")
    windows = [w for w in map(window_of, entries) if w is not None]
    window: int | None = args.context_window or min(windows, default=None)
    if window is None:
        raise VerbError(f"--upstream {first} does not tell the context window of {model}; give --context-window N")
    root = entries[0].get("root") or first
    version = args.policy_version or (f"{model}@{root}" if api == "vllm" else f"none@{first}")
    return model, api, window, version


def _control_key() -> str:
    key = os.environ.get(KEY, "").strip()
    if key and not (len(key) >= KEY_LEAST and key.isascii() and key.isprintable() and " " not in key):
        raise VerbError(f"{KEY} must be at least {KEY_LEAST} printable ASCII characters without spaces")
    return key or secrets.token_urlsafe(24)


def _announce(args: argparse.Namespace, settings: Settings, control: Control) -> None:
    """What listens where, and how to open a session; with --session how to use the one that is open."""
    from openforge.proxy.wire import is_loopback

    base, defaults = control.base, settings.defaults
    assert base is not None and defaults is not None
    if settings.tls is None and not is_loopback(f"http://[{args.host}]" if ":" in args.host else f"http://{args.host}"):
        _warn(f"prompts and keys are sent in the clear to whoever reaches {args.host}; see docs/remote-sandboxes.md")
    lines = [
        f"recording {settings.model} at {', '.join(settings.upstream)} ({settings.api}, "
        f"{defaults['context_window']} tokens)",
        f"open a session: POST {base}/sessions with Authorization: Bearer "
        + (f"${KEY}" if os.environ.get(KEY, "").strip() else str(settings.control_key)),
    ]
    if args.session is not None:
        session, secret = control.open({"episode_id": args.session} if args.session else {})
        path = settings.journal / f"{session.config.episode_id}.env"
        write_beside(path, _exports(control.access(session, secret)), mode=0o600)
        lines.append(f"session {session.config.episode_id} is open: . {shlex.quote(str(path))}")
    print("\n".join(lines), flush=True)


def _exports(access: Mapping[str, str]) -> str:
    """The variables of OpenAI's and Anthropic's clients, as a shell reads them."""
    url, key = access["base_url"], access["api_key"]
    names = {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_AUTH_TOKEN": key,
    }
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in names.items())


def _warn(sentence: str) -> None:
    logging.getLogger(__name__).warning("%s", sentence)
