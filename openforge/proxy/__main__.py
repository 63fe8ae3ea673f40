"""`python -m openforge.proxy`: one recording proxy for one rollout job (by hand: `openforge proxy`)."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from pathlib import Path

import uvloop

from openforge.proxy.control import Control
from openforge.proxy.serving import ServingError, Settings, serve


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m openforge.proxy", description=__doc__)
    p.add_argument("--upstream", required=True, action="append", metavar="URL", help="OpenAI base URL; one a server")
    p.add_argument("--api", choices=["vllm", "openai"], default="vllm", help="which fields they take")
    p.add_argument("--model", default="policy", help="name the policy servers know the policy by")
    p.add_argument("--journal", required=True, type=Path, metavar="DIR", help="folder of the journal")
    p.add_argument("--control", required=True, type=Path, metavar="PATH", help="UNIX socket to control it by")
    p.add_argument("--port", type=int, metavar="N", help="also serve on HOST:N; 0 takes a free one")
    p.add_argument("--host", default="127.0.0.1", help="address of this machine that the port listens on")
    p.add_argument("--tls-cert", type=Path, metavar="FILE", help="PEM certificate chain: the port speaks TLS")
    p.add_argument("--tls-key", type=Path, metavar="FILE", help="its key, where that is another file")
    p.add_argument("--fsync", type=float, metavar="SECONDS", help="fsync the journal in groups, this often")
    p.add_argument("--status-seconds", type=float, default=10.0, help="a stream's status line waits so long")
    p.add_argument("--alive-seconds", type=float, default=5.0, help="time between a stream's keep-alives")
    p.add_argument("--patience-seconds", type=float, default=10.0, help="silence that puts a policy server in doubt")
    p.add_argument("--probe-seconds", type=float, default=20.0, help="it must then sample one token within these")
    p.add_argument("--parent", type=int, metavar="PID", help="end when this process, our parent, is gone")
    return p


def settings(args: argparse.Namespace) -> Settings:
    return Settings(
        upstream=tuple(args.upstream),
        # By the environment only: every user of a machine can read command lines.
        upstream_key=os.environ.get("OPENFORGE_UPSTREAM_KEY"),
        api=args.api,
        model=args.model,
        journal=args.journal,
        control=args.control,
        host=args.host,
        port=args.port,
        tls=None if args.tls_cert is None else (args.tls_cert, args.tls_key),
        fsync=args.fsync,
        status_seconds=args.status_seconds,
        alive_seconds=args.alive_seconds,
        patience_seconds=args.patience_seconds,
        probe_seconds=args.probe_seconds,
        parent=args.parent,
    )


def _ready(_control: Control, journal: Path, port: int | None) -> None:
    print(json.dumps({"pid": os.getpid(), "port": port, "journal": str(journal)}), flush=True)


def main() -> int:
    given = settings(parser().parse_args())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        uvloop.run(serve(given, _ready))
    except (OSError, ServingError) as e:
        print(f"the recording proxy cannot start: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
