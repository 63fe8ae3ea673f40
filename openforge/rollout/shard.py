"""The job of one shard: a policy, a proxy, a warm harness, and the episodes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial as partial_of
from pathlib import Path
from typing import Any

from openforge import __version__, environments, harnesses, interrupts, machine, software
from openforge.config import ConfigError, Server
from openforge.config_sandbox import LOCAL
from openforge.job import Job
from openforge.policy.lease import Endpoint, lease
from openforge.policy.weights import read_checkpoint
from openforge.proxy import wire
from openforge.proxy.client import KeptProxy, start_proxy
from openforge.rollout import backends, engine, reach
from openforge.rollout.gate import Gate
from openforge.rollout.machine import Machine, elsewhere
from openforge.rollout.partial import Partial, claim, digest
from openforge.rollout.progress import Progress
from openforge.rollout.reopen import folder
from openforge.rollout.rows import Book, archive, evidence
from openforge.rollout.status import failed
from openforge.tables import partition_path


@dataclass(frozen=True)
class Done:
    """Rows of a finished shard, and the progress that they were made of."""

    episodes: list[dict[str, Any]]
    calls: list[dict[str, Any]]
    blobs: list[dict[str, Any]]
    partial: Partial
    archive: Path

    def keep_artifacts(self) -> None:
        """Before the rows are written, which name them."""
        archive(sorted(self.partial.artifacts.glob("[!.]*")), self.archive)

    def close(self) -> None:
        """After the rows are written: keep the progress only while a failed rollout needs it."""
        if any(e["final"] and failed(e["status"]) for e in self.episodes):
            self.partial.close()
        else:
            self.partial.remove()


class MachineError(RuntimeError):
    """The machine cannot run a shard; one sentence."""


def check_machine(server: Server) -> None:
    """Refuse what every episode would fail of, before a server starts and an attempt is spent.

    Raises:
        MachineError: the server needs a GPU that is not here.
    """
    if server.url is None and server.device == "gpu" and not machine.gpus():
        raise MachineError(machine.no_gpu("server.device is gpu"))


@dataclass(frozen=True)
class Watch:
    """What is wanted of a shard of one episode that somebody looks on.

    Attributes:
        harness_log: new file that the harness's output goes to as it comes.
        keep: folder that the sandbox's work folder is moved to at its end; None removes it.
    """

    harness_log: Path
    keep: Path | None


def run_shard(
    rows: Sequence[Mapping[str, Any]],
    policy: Path | None,
    server: Server,
    job: Job,
    seal: bool = False,
    watch: Watch | None = None,
) -> Done:
    """Run the episodes of one shard.

    Args:
        rows: its rollout rows, in table order.
        policy: checkpoint folder sampled from; None where `server` is attached by URL.
        server: how the policy is served.
        seal: run nothing; what has not ended becomes shard_lost.
        watch: for a shard of one episode.
    """
    kind, terms = rows[0]["orchestrator"], job.config.sandbox
    if not seal:
        check_machine(server)
        asyncio.run(backends.check(kind, terms, job.run, backends.episode_seconds(rows, terms)))
    # A user's module may be broken since the command was typed.
    environments.load(rows[0]["environment"])
    cell = None if job.part["purpose"] == "train" else job.cell()
    version = read_checkpoint(policy)["policy_version"] if policy is not None else f"none@{server.url}"
    harness = harnesses.get(rows[0]["harness"])
    place = [job.part[k] for k in ("purpose", "cell", "k", "shard")]
    versions = [version, f"{rows[0]['environment']} {__version__}", software.pins_digest(harness.software, job.root)]
    # Two processes on one shard would take each other's attempts for lost ones and its journal away.
    claim(job.run_dir / ".locks" / "-".join(place))
    base = folder(job.run_dir, *place)
    # An earlier process of this shard may have been killed: nothing of its sandboxes may meet this attempt. First, for
    # the folders of other inputs go next, and with them what names their processes.
    asyncio.run(backends.reap(list(base.glob("*/sandboxes")), job.config.sandbox, job.run))
    partial = Partial(base, digest(rows, versions))
    partition = Path(partition_path("artifacts", place[0], place[1], job.iteration, int(place[3]))).parent
    zipped = partition.with_name(f"{partition.name}.zip")
    staleness = None
    if job.part["purpose"] == "train":
        k = int(job.part["k"])
        staleness = k - 1 - job.train_config.sampled(k)
    book = Book(rows, harness.version, version, staleness, str(zipped))
    if seal:
        job.say("the last attempt of this shard: what has not ended is given up")
        episodes = book.sealed(partial)
    else:
        with lease(
            server,
            policy,
            version,
            state_dir=job.root / ".servers",
            job=f"{job.run} {'-'.join(place[:3])} shard {place[3]}",
            root=job.root,
            progress=job.say,
        ) as endpoint:
            job.say(f"policy {endpoint.policy_version[:17]} at {endpoint.base_url}")
            check_sampling(rows, endpoint)
            asyncio.run(_run(book, partial, endpoint, harness, job, server, cell.concurrency if cell else None, watch))
        episodes = book.finished(partial)
    return Done(episodes, *evidence(episodes, partial), partial, job.run_dir / zipped)


def check_sampling(rows: Sequence[Mapping[str, Any]], endpoint: Endpoint) -> None:
    """Refuse sampling that a plain endpoint cannot be asked for, before the first episode.

    Raises:
        ConfigError: names the cell, the key and its value.
    """
    problem = wire.not_taken(rows[0]["sampling"]) if endpoint.api == "openai" else None
    if problem is not None:
        raise ConfigError(f"cell {rows[0]['cell']}: {problem}")


async def _run(
    book: Book,
    partial: Partial,
    endpoint: Endpoint,
    harness: harnesses.Harness,
    job: Job,
    server: Server,
    concurrency: int | None,
    watch: Watch | None,
) -> None:
    interrupts.cancel_task_on_end()
    config = job.config.rollout
    terms, row = job.config.sandbox, book.rows[0]
    kind, seconds = row["orchestrator"], backends.episode_seconds(book.rows, terms)
    server_url = None if kind in LOCAL else backends.url_of(terms)
    starter = partial_of(
        start_proxy,
        [endpoint.base_url, *endpoint.replicas],
        partial.journal,
        upstream_key=endpoint.api_key,
        api=endpoint.api,
        model=endpoint.model,
    )
    proxy = KeptProxy(lambda: reach.start(starter, server_url))
    progress = Progress(len(book.rows), job.say, quiet=watch is not None)
    backend = backends.make(kind, terms, partial.sandboxes, job.run, seconds, watch.keep if watch else None)
    try:
        started = await proxy.get()
        if server_url is not None:
            await reach.check(backend, started, row, job.root)
        async with harness.warm(job.root, json.loads(row["harness_options"])) as warm:
            warm.log = watch.harness_log if watch else None
            shard = engine.Shard(
                book=book,
                partial=partial,
                proxy=proxy,
                endpoint=endpoint,
                gate=Gate(endpoint, server.start_seconds, progress),
                machine=Machine([partial.folder]) if server_url is None else elsewhere([partial.folder]),
                backend=backend,
                harness=warm,
                concurrency=concurrency or config.concurrency,
                attempts=config.attempts,
                sandbox=terms,
                progress=progress,
                metric=job.train_config.algorithm.filter_groups.metric if job.part["purpose"] == "train" else "reward",
                claw=job.train_config.reward.claw if job.part["purpose"] == "train" else "pass",
            )
            await shard.run()
    finally:
        await backend.close()
        await proxy.stop()
    if not progress.quiet:
        job.say(progress.line())
