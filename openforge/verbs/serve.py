"""`openforge serve RUN[@k]`: host a checkpoint of a run as an OpenAI-compatible endpoint until Ctrl-C."""

from __future__ import annotations

import re
import threading
from pathlib import Path

from openforge import config as typed
from openforge.config_paths import last_finished
from openforge.eval import policies
from openforge.policy.lease import Endpoint, PolicyMismatch, ServerError, lease
from openforge.policy.weights import CheckpointError, read_checkpoint
from openforge.software import SoftwareMissing
from openforge.verbs import VerbError


def checkpoint(name: str, root: Path) -> tuple[str, Path]:
    """The run and the folder of RUN@k; without @k its newest checkpoint that stands.

    Raises:
        VerbError: there is none.
    """
    run, at, k = name.partition("@")
    if not re.fullmatch(r"[a-z0-9_]+", run) or (at and not re.fullmatch(r"[0-9]+", k)):
        raise VerbError(f"{name!r} must be RUN, for its newest checkpoint, or RUN@k, e.g. claw_small@2")
    number = int(k) if at else last_finished(root / "results" / run)
    folder = root / "results" / run / "checkpoints" / f"{number:04d}"
    if not (folder / "checkpoint.json").is_file():
        raise VerbError(
            f"{folder} does not stand; train it (snakemake train_{run}), or prepare its base model: "
            f"snakemake results/{run}/checkpoints/0000/checkpoint.json"
        )
    return run, folder


def told(endpoint: Endpoint, policy: str) -> str:
    """What a client needs: URL, key, model name."""
    return (
        f"{policy} ({endpoint.policy_version}) answers until Ctrl-C:\n"
        f"  base URL  {endpoint.base_url}\n  API key   {endpoint.api_key}\n  model     {endpoint.model}\n"
    )


def run(name: str, root: Path) -> int:
    """Serve until SIGINT or SIGTERM."""
    run_name, folder = checkpoint(name, root)
    config = typed.load(run_name, root).config
    # A server of its own, which ends with this process: a warm one would swap under its clients.
    server = policies.server(config, None).model_copy(update={"warm": False, "url": None})
    try:
        version = read_checkpoint(folder)["policy_version"]
        with lease(
            server, folder, version, state_dir=root / ".servers", job=f"serve {name}", root=root, progress=print
        ) as endpoint:
            print(told(endpoint, f"{run_name}@{int(folder.name)}"), flush=True)
            threading.Event().wait()
    except KeyboardInterrupt:
        return 0
    except (CheckpointError, ServerError, PolicyMismatch, SoftwareMissing) as e:
        raise VerbError(str(e)) from None
    return 0
