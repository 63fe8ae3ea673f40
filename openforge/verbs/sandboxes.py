"""`openforge sandboxes`: this machine's sandboxes over HTTP, for runs elsewhere and for Orchard's client."""

from __future__ import annotations

import argparse
import json
import logging
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openforge.tables import write_beside
from openforge.verbs import VerbError

if TYPE_CHECKING:
    from openforge.sandboxes.server.settings import Settings

KEYS = "API_KEYS"  # Orchard's names, of the server and of its client
BASE_URL, KEY = "SANDBOX_BASE_URL", "SANDBOX_API_KEY"
KEY_LEAST = 16
_PORT_MOST = 65535


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    serve = actions.add_parser("serve", help="serve this machine's sandboxes over Orchard's REST (docs/sandboxes.md)")
    serve.add_argument("--state", required=True, type=Path, metavar="DIR", help="folder for sandboxes and jobs")
    serve.add_argument(
        "--port", type=int, default=8000, metavar="N", help="port to listen on (8000); 0 takes a free one"
    )
    serve.add_argument("--host", default="127.0.0.1", help="address of this machine to listen on (127.0.0.1)")
    serve.add_argument("--no-key", action="store_true", help="ask for no API key; on a loopback address only")
    serve.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="routes may lead there; * is any host or port",
    )
    serve.add_argument(
        "--share", action="append", default=[], type=Path, metavar="DIR", help="sandboxes may have it bound, read-only"
    )
    serve.add_argument(
        "--image", action="append", default=[], metavar="NAME=FILE", help="an OCI archive that sandboxes may ask for"
    )
    serve.add_argument("--images", type=Path, metavar="DIR", help="... and every .tar in this folder, by its file name")
    serve.add_argument("--open-network", action="store_true", help="offer the host's network to sandboxes that ask")
    serve.add_argument("--max-sandboxes", type=int, default=256, metavar="N", help="at once (256)")
    serve.add_argument("--cpu", metavar="CORES", help="of all sandboxes together, as they ask for them")
    serve.add_argument("--memory", metavar="SIZE", help="of all sandboxes together, as they ask for it, e.g. 64Gi")
    serve.add_argument("--ttl", type=float, default=7200.0, metavar="S", help="a sandbox lives so long uncalled (7200)")
    serve.add_argument("--job-ttl", type=float, default=3600.0, metavar="S", help="a finished job is kept (3600)")
    serve.add_argument(
        "--grace", type=float, default=300.0, metavar="S", help="sandboxes outlive a killed server this long (300)"
    )
    serve.set_defaults(call=run_serve)
    for name, call, text in (
        ("list", run_list, "list a server's sandboxes"),
        ("reap", run_reap, "delete those of a server's sandboxes that have a label"),
    ):
        action = actions.add_parser(name, help=f"{text} (${BASE_URL}, ${KEY})")
        action.add_argument("--label", action="append", default=[], metavar="NAME=VALUE", help="only those with it")
        action.set_defaults(call=call)


def run_serve(args: argparse.Namespace) -> int:
    import uvloop

    from openforge.sandboxes.protocol import SandboxError
    from openforge.sandboxes.server.problems import Problem
    from openforge.sandboxes.server.serve import serve

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")

    def ready(port: int) -> None:
        where = f"[{args.host}]" if ":" in args.host else args.host
        print(f"export {BASE_URL}=http://{where}:{port}", flush=True)

    try:
        settings = _settings(args)
        uvloop.run(serve(settings, args.host, args.port, ready))
    except (SandboxError, Problem) as e:
        raise VerbError(str(e)) from None
    except OSError as e:
        if e.filename is not None:
            raise
        raise VerbError(f"cannot listen on {args.host}, port {args.port}: {e.strerror or e}") from None
    print("ended; every sandbox is deleted", flush=True)
    return 0


def _settings(args: argparse.Namespace) -> Settings:
    from openforge.sandboxes.server import settings

    if not 0 <= args.port <= _PORT_MOST:
        raise VerbError(f"--port is {args.port}; it must be from 0 (a free one) to {_PORT_MOST}")
    for name in ("max_sandboxes", "ttl", "job_ttl", "grace"):
        if not getattr(args, name) > 0:
            raise VerbError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be above 0")
    for pattern in args.allow:
        settings.target(pattern, pattern=True)
    for share in args.share:
        if not share.is_dir():
            raise VerbError(f"--share {share} is no folder")
    return settings.Settings(
        state=args.state.absolute(),
        keys=_keys(args),
        allow=tuple(args.allow),
        shares=tuple(share.absolute() for share in args.share),
        images=_images(args),
        open_network=args.open_network,
        max_sandboxes=args.max_sandboxes,
        cpu=None if args.cpu is None else settings.cores(args.cpu),
        memory=None if args.memory is None else settings.size(args.memory),
        ttl=args.ttl,
        job_ttl=args.job_ttl,
        grace=args.grace,
    )


def _images(args: argparse.Namespace) -> dict[str, Path]:
    images: dict[str, Path] = {}
    if args.images is not None:
        if not args.images.is_dir():
            raise VerbError(f"--images {args.images} is no folder")
        images = {path.stem: path.absolute() for path in sorted(args.images.glob("*.tar"))}
    for given in args.image:
        name, equals, file = given.partition("=")
        if not equals or not name or not Path(file).exists():
            raise VerbError(f"--image {given} is not NAME=FILE with a file that exists")
        images[name] = Path(file).absolute()
    return images


def _keys(args: argparse.Namespace) -> frozenset[str]:
    """The keys of the environment; where there are none, the state folder's own."""
    keys = os.environ.get(KEYS, "").replace(",", " ").split()
    if args.no_key:
        if keys:
            raise VerbError(f"--no-key and {KEYS} exclude each other: take one away")
        if args.host not in ("127.0.0.1", "::1", "localhost"):
            raise VerbError(f"--no-key on {args.host}: without a key, only this machine may reach the server")
        return frozenset()
    for key in keys:
        if len(key) < KEY_LEAST or not key.isascii():
            raise VerbError(f"a key in {KEYS} has fewer than {KEY_LEAST} characters, or others than ASCII")
    path = args.state / "key"
    if not keys:
        if not path.exists():
            args.state.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_beside(path, secrets.token_urlsafe(24) + "\n", mode=0o600)
        keys = path.read_text().split()
        print(f"export {KEY}=$(cat {path.absolute()})", flush=True)
    return frozenset(keys)


def run_list(args: argparse.Namespace) -> int:
    for found in _listed(args.label):
        age = time.time() - found["created_at"]
        labels = " ".join(f"{k}={v}" for k, v in sorted(found["labels"].items()))
        print(f"{found['sandbox_id']}  {found['status']:8}  {found['image']}  {age:.0f} s  {labels}".rstrip())
    return 0


def run_reap(args: argparse.Namespace) -> int:
    if not args.label:
        raise VerbError("openforge sandboxes reap needs --label NAME=VALUE: without one it would delete everybody's")
    for found in _listed(args.label):
        _asked("DELETE", f"/sandboxes/{found['sandbox_id']}")
        print(f"deleted {found['sandbox_id']}")
    return 0


def _listed(labels: list[str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = _asked("GET", "/sandboxes", [("label", label) for label in labels])["sandboxes"]
    return found


def _asked(method: str, path: str, params: Sequence[tuple[str, str]] = ()) -> Any:
    import httpx

    base, key = os.environ.get(BASE_URL, "").rstrip("/"), os.environ.get(KEY, "")
    if not base:
        raise VerbError(f"{BASE_URL} is not set; it names the server, as http://HOST:PORT")
    try:
        headers = {"X-API-Key": key} if key else {}
        answer = httpx.request(method, base + path, params=tuple(params), headers=headers, timeout=60)
        body = answer.json()
    except (httpx.HTTPError, json.JSONDecodeError) as e:
        raise VerbError(f"{base} does not answer as a server of sandboxes: {e}") from None
    if answer.status_code == 405:
        raise VerbError(f"{base} cannot list sandboxes; Orchard's own service has no such call")
    if answer.is_error:
        raise VerbError(f"{base}: {body.get('detail')}")
    return body
