"""Figures that a run's outlook is made of: measured on what the run has finished, else a stated default."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pyarrow.parquet as pq

from openforge.config import EvalConfig, RunConfig, Sampling
from openforge.eval import policies
from openforge.policy.weights import TOMBSTONE
from openforge.tables import EPISODES, check_file
from openforge.train.checkpoint import STATE_CARD
from openforge.verbs.jobs import Job, Jobs
from openforge.verbs.sizes import size

# Seconds of a job that runs no episode and trains nothing, its process included: `make demo` on two CPU cores.
JOB_SECONDS = {"tasks": 4.0, "prepare": 21.0, "plan": 0.5, "score": 0.5, "samples": 0.8, "eval": 1.0, "report": 1.5}
# Seconds that a software environment takes to build: the four of the demo take about four minutes.
SOFTWARE_SECONDS = 60.0
# Seconds until a policy server, or a trainer, is at work.
START_SECONDS = 20.0
# Parameters times sampled tokens a second. cpu: 164 M (135 M, untied) at 27 tokens/s in the demo, harness and sandbox
# included. gpu: 7 G at 2000 tokens/s on one GPU, the order of magnitude that serving engines report; not measured here.
SAMPLING_SPEED = {"cpu": 164e6 * 27, "gpu": 7e9 * 2000}
# Floating-point operations a second of training, 6 a parameter and token. cpu: the demo's 128 episodes of 520 tokens
# in 50 s, prefixes shared. gpu: a third of the 3e14 that an A100 does in bfloat16; not measured here.
TRAINING_SPEED = {"cpu": 1.3e12, "gpu": 1e14}
# Turns an episode (fewer where limits.turns says so), prompt tokens a call, share of sampling.max_tokens that is used.
TURNS, PROMPT_TOKENS, USED = 1.4, 365.0, 0.33
# Bytes of tables that an episode leaves in the demo, artifacts included.
EPISODE_BYTES = 1200.0
# Bytes of the checkpoint of a bundled model, fp32 and untied.
BUNDLED_BYTES = {"smollm2-135m-instruct": 655e6, "tiny-random": 13e6, "tiny-random-vl": 3e6}
UNKNOWN_PARAMETERS = 7e9
# AdamW keeps two fp32 numbers a parameter, beside four bytes of weights.
STATE_SHARE = 2.0

_TABLES = ("rollouts", "episodes", "calls", "blobs", "scores", "samples", "metrics", "eval", "artifacts")


@dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes:
        basis: measured on this run's own finished jobs, or default.
        source: over what it was measured, or where the default is from.
    """

    name: str
    value: float
    unit: str
    basis: Literal["measured", "default"]
    source: str


@dataclass
class Spent:
    """What finished rollouts of a cell took; `seconds` are of `timed` ones, in `jobs` jobs."""

    rollouts: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0
    timed: int = 0
    seconds: float = 0.0
    jobs: int = 0


class Figures:
    """Figures of one run; `used` has those that were asked for, by name.

    Attributes:
        spent: by (purpose, cell); under ("", "") over all.
        timings: seconds of finished jobs by the job's name (that of its log).
    """

    def __init__(self, jobs: Jobs) -> None:
        self._jobs, self._config, self._dir = jobs, jobs.config, jobs.run_dir
        self.used: dict[str, Figure] = {}
        self.timings = _timings(self._dir)
        self.spent = self._measure()

    def tokens(self, job: Job) -> tuple[float, float]:
        """Prompt and sampled tokens a rollout of a rollout job's cell."""
        where, spent = self._spent(job)
        name = f"{job.purpose} {job.cell}"
        if spent.rollouts:
            over = _many(spent.rollouts, "episode") + where
            prompt = self._measured(f"prompt tokens, {name}", spent.prompt_tokens / spent.rollouts, "an episode", over)
            value = spent.response_tokens / spent.rollouts
            return prompt, self._measured(f"sampled tokens, {name}", value, "an episode", over)
        cell = self._jobs.cell(job)
        limits = (cell.limits if cell is not None and cell.limits is not None else None) or self._config.limits
        turns = TURNS if limits.turns is None else min(TURNS, limits.turns)
        sampled = turns * self._sampling(job).max_tokens * USED
        sampled = sampled if limits.tokens is None else min(sampled, limits.tokens)
        how = f"{turns:.1f} calls, as in the demo"
        prompt = self._default(f"prompt tokens, {name}", turns * PROMPT_TOKENS, "an episode", how)
        return prompt, self._default(f"sampled tokens, {name}", sampled, "an episode", how)

    def rollout_seconds(self, job: Job) -> float:
        """Seconds a rollout of a rollout job's cell, all `concurrency` at once."""
        where, spent = self._spent(job, timed=True)
        name = f"rollout, {job.purpose} {job.cell}"
        if spent.timed:
            over = _many(spent.jobs, "job") + where
            return self._measured(name, spent.seconds / spent.timed, "seconds an episode", over)
        server = policies.server(self._config, self._jobs.cell(job))
        speed = SAMPLING_SPEED[server.device] * (server.tensor_parallel_size if server.device == "gpu" else 1)
        each = self.tokens(job)[1] * self.parameters() / speed
        value = each + START_SECONDS / max(1, self._jobs.episodes(job))
        return self._default(name, value, "seconds an episode", _speed(server.device))

    def train_seconds(self) -> float:
        """Seconds of a training job."""
        found = [s for name, s in self.timings.items() if re.fullmatch(r"train-\d{4}", name)]
        if found:
            return self._measured("train", sum(found) / len(found), "seconds an iteration", _many(len(found), "job"))
        assert isinstance(self._config, RunConfig)
        trainer = self._config.trainer
        rollouts = self._config.data.train_batch_size * self._config.rollout.n
        job = next(j for j in self._jobs.all if j.rule == "rollout" and j.purpose == "train")
        tokens = rollouts * sum(self.tokens(job)) * self._config.actor.ppo_epochs
        speed = TRAINING_SPEED[trainer.device] * (trainer.world_size if trainer.device == "gpu" else 1)
        value = START_SECONDS + 6 * self.parameters() * tokens / speed
        return self._default("train", value, "seconds an iteration", _speed(trainer.device))

    def job_seconds(self, rule: str) -> float:
        """Seconds of a job of any other rule."""
        stage = {"write_report": "report", "prepare_policy": "prepare"}.get(rule, rule)
        found = [s for name, s in self.timings.items() if name.split("-")[0] == stage]
        if found:
            return self._measured(stage, sum(found) / len(found), "seconds a job", _many(len(found), "job"))
        return self._default(stage, JOB_SECONDS[stage], "seconds a job", "the demo on two CPU cores")

    def parameters(self) -> float:
        return self.checkpoint_bytes() / 4

    def checkpoint_bytes(self) -> float:
        """Bytes of a checkpoint, which is fp32."""
        name, unit = "checkpoint", "bytes"
        whole = [p.parent for p in self._checkpoints() if any(p.parent.glob("*.safetensors"))]
        if whole:
            return self._measured(name, size(whole) / len(whole), unit, _many(len(whole), "checkpoint"))
        model = self._config.policy if isinstance(self._config, EvalConfig) else None
        model = model or self._config.model
        if model in BUNDLED_BYTES:
            return self._default(name, BUNDLED_BYTES[model], unit, f"{model} in fp32")
        weights = [*(self._jobs.root / model).glob("*.safetensors")]
        if weights:
            # Published in two bytes a parameter as a rule.
            return self._default(name, 2 * size(weights), unit, f"twice the weights in {model}")
        stated = re.search(r"(\d+(?:\.\d+)?)([bm])(?![a-z])", model.lower())
        if stated:
            parameters = float(stated[1]) * (1e9 if stated[2] == "b" else 1e6)
            return self._default(name, 4 * parameters, unit, f"{stated[0].upper()} parameters in the name {model}")
        return self._default(name, 4 * UNKNOWN_PARAMETERS, unit, f"7 B parameters; the name {model} says none")

    def state_bytes(self) -> float:
        """Bytes of an optimizer's state."""
        found = [size([p]) for p in full_states(self._dir)]
        # Where nothing was trained yet, a state is a card alone.
        found = [s for s in found if s > 10**5]
        if found:
            return self._measured("optimizer state", sum(found) / len(found), "bytes", _many(len(found), "state"))
        value = STATE_SHARE * self.checkpoint_bytes()
        return self._default("optimizer state", value, "bytes", "twice the weights, as AdamW has it")

    def episode_bytes(self) -> float:
        """Bytes of tables and artifacts that a rollout leaves."""
        rollouts = self.spent["", ""].rollouts
        if rollouts:
            value = size(self._dir / t for t in _TABLES) / rollouts
            return self._measured("tables", value, "bytes an episode", _many(rollouts, "episode"))
        return self._default("tables", EPISODE_BYTES, "bytes an episode", "the demo")

    def _checkpoints(self) -> list[Path]:
        return [
            *self._dir.glob("checkpoints/[0-9]*/checkpoint.json"),
            *self._dir.glob("policies/*/checkpoint.json"),
        ]

    def _sampling(self, job: Job) -> Sampling:
        cell = self._jobs.cell(job)
        if cell is not None:
            return cell.sampling
        assert isinstance(self._config, RunConfig)
        return self._config.sampling

    def _measured(self, name: str, value: float, unit: str, over: str) -> float:
        self.used[name] = Figure(name, value, unit, "measured", over)
        return value

    def _default(self, name: str, value: float, unit: str, source: str) -> float:
        self.used[name] = Figure(name, value, unit, "default", source)
        return value

    def _spent(self, job: Job, timed: bool = False) -> tuple[str, Spent]:
        """What finished rollouts of the job's cell took, or without any those of the whole run; and which of them."""
        own = self.spent[job.purpose, job.cell]
        return ("", own) if (own.timed if timed else own.rollouts) else (" of other cells", self.spent["", ""])

    def _measure(self) -> defaultdict[tuple[str, str], Spent]:
        """Episodes and timings of every finished rollout job, also of evaluations that are no longer asked for."""
        spent: defaultdict[tuple[str, str], Spent] = defaultdict(Spent)
        for path in sorted(self._dir.glob("episodes/*/*/*/*/episodes.parquet")):
            check_file(path, EPISODES)
            columns = ["final", "prompt_tokens", "response_tokens"]
            rows = pq.read_table(path, columns=columns, partitioning=None).to_pydict()
            purpose, cell, k, shard = (p.name.partition("=")[2] for p in reversed(path.parents[:4]))
            seconds = self.timings.get(f"rollout-{purpose}-{cell}-{k}-{shard}")
            for one in (spent[purpose, cell], spent["", ""]):
                one.rollouts += sum(rows["final"])
                one.prompt_tokens += sum(rows["prompt_tokens"])
                one.response_tokens += sum(rows["response_tokens"])
                if seconds is not None:
                    one.timed += sum(rows["final"])
                    one.seconds += seconds
                    one.jobs += 1
        return spent


def job_name(job: Job) -> str:
    """Name of a job's log and timing: the stage, then its wildcards."""
    k = "none" if job.iteration is None else f"{job.iteration:04d}"
    match job.rule:
        case "tasks" | "prepare":
            return job.rule
        case "prepare_policy":
            return f"prepare-{job.output.parent.name}"
        case "write_report":
            return "report"
        case "train":
            return f"train-{k}"
        case "eval":
            return f"eval-{job.cell}-{k}"
        case "rollout":
            return f"rollout-{job.purpose}-{job.cell}-{k}-{job.shard:04d}"
        case _:
            return f"{job.rule}-{job.purpose}-{job.cell}-{k}"


def full_states(run_dir: Path) -> list[Path]:
    """Folders of optimizer states that are no tombstones, oldest first."""
    cards = sorted(run_dir.glob(f"state/[0-9]*/{STATE_CARD}"))
    return [p.parent for p in cards if not (p.parent / TOMBSTONE).exists()]


def _timings(run_dir: Path) -> dict[str, float]:
    found = {}
    for path in run_dir.glob("timings/*.json"):
        try:
            found[path.stem] = float(json.loads(path.read_text())["seconds"])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # being written, or an older one's leavings: an outlook goes without
    return found


def _speed(device: str) -> str:
    return "the demo on two CPU cores, by model size" if device == "cpu" else "a usual GPU, not measured here"


def _many(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")
