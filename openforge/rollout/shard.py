"""The job of one shard: a policy, a proxy, a warm harness, and the episodes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openforge import __version__, environments, harnesses, machine, software
from openforge.config import Server
from openforge.job import Job
from openforge.policy.lease import Endpoint, lease
from openforge.policy.weights import read_checkpoint
from openforge.proxy.client import start_proxy
from openforge.rollout import engine
from openforge.rollout.partial import Partial, claim, digest
from openforge.rollout.progress import Progress
from openforge.sandboxes import LocalBackend, Owner, bwrap, reap


@dataclass(frozen=True)
class Done:
    """Rows of a finished shard; `partial` is removed after they are written."""

    episodes: list[dict[str, Any]]
    calls: list[dict[str, Any]]
    blobs: list[dict[str, Any]]
    partial: Partial


class MachineError(RuntimeError):
    """The machine cannot run a shard; one sentence."""


def check_machine(server: Server) -> None:
    """Refuse what every episode would fail of, before a server starts and an attempt is spent.

    Raises:
        MachineError: no sandbox can be made here, or the server needs a GPU that is not here.
    """
    why = bwrap.probe()["why"]
    if why is not None:
        raise MachineError(why)
    if server.url is None and server.device == "gpu" and not machine.gpus():
        raise MachineError(machine.no_gpu("server.device is gpu"))


def run_shard(rows: Sequence[Mapping[str, Any]], policy: Path | None, server: Server, job: Job) -> Done:
    """Run the episodes of one shard.

    Args:
        rows: its rollout rows, in table order.
        policy: checkpoint folder sampled from; None where `server` is attached by URL.
        server: how the policy is served.
    """
    check_machine(server)
    # A user's module may be broken since the command was typed.
    environments.load(rows[0]["environment"])
    cell = None if job.part["purpose"] == "train" else job.cell()
    version = read_checkpoint(policy)["policy_version"] if policy is not None else f"none@{server.url}"
    harness = harnesses.get(rows[0]["harness"])
    part = "-".join(job.part[k] for k in ("purpose", "cell", "k"))
    versions = [version, f"{rows[0]['environment']} {__version__}", software.pins_digest(harness.software, job.root)]
    # Two processes on one shard would take each other's attempts for lost ones and its journal away.
    claim(job.run_dir / ".locks" / f"{part}-{job.part['shard']}")
    partial = Partial(job.run_dir / "partial" / part / job.part["shard"], digest(rows, versions))
    with lease(
        server,
        policy,
        version,
        state_dir=job.root / ".servers",
        job=f"{job.run} {part} shard {job.part['shard']}",
        root=job.root,
        progress=job.say,
    ) as endpoint:
        job.say(f"policy {endpoint.policy_version[:17]} at {endpoint.base_url}")
        return asyncio.run(_run(rows, partial, endpoint, harness, job, cell.concurrency if cell else None))


async def _run(
    rows: Sequence[Mapping[str, Any]],
    partial: Partial,
    endpoint: Endpoint,
    harness: harnesses.Harness,
    job: Job,
    concurrency: int | None,
) -> Done:
    config = job.config.rollout
    staleness = None
    if job.part["purpose"] == "train":
        k = int(job.part["k"])
        staleness = k - 1 - job.train_config.sampled(k)
    backend = LocalBackend(partial.sandboxes, job.run, Owner.current())
    # An earlier process of this shard may have been killed: nothing of its sandboxes may meet this attempt.
    reap(partial.sandboxes, job.run)
    proxy = await start_proxy(
        endpoint.base_url.removesuffix("/v1"),
        partial.journal,
        upstream_key=endpoint.api_key,
        model=endpoint.model,
    )
    progress = Progress(len(rows), job.say)
    try:
        options = json.loads(rows[0]["harness_options"])
        async with backend, harness.warm(job.root, options) as warm:
            shard = engine.Shard(
                rows=rows,
                partial=partial,
                proxy=proxy,
                endpoint=endpoint,
                backend=backend,
                harness=warm,
                concurrency=concurrency or config.concurrency,
                attempts=config.attempts,
                keep_artifacts=config.keep_artifacts,
                staleness=staleness,
                progress=progress,
            )
            await shard.run()
    finally:
        await proxy.stop()
    job.say(progress.line())
    return Done(*engine.finish(shard, job.run_dir), partial)
