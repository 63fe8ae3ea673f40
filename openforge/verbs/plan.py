"""`openforge plan RUN`: jobs, episodes, tokens, hours, disk and GPU-hours of what is left and in all."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from openforge.config import EvalConfig, RunConfig
from openforge.eval import policies
from openforge.verbs.figures import SOFTWARE_SECONDS, Figures, full_states, job_name
from openforge.verbs.jobs import Job, Jobs
from openforge.verbs.sizes import said, size


def run(name: str, config: RunConfig | EvalConfig, root: Path, as_json: bool) -> int:
    """Print the outlook; exit code 0."""
    found = outlook(name, config, root)
    print(json.dumps(found, indent=1) if as_json else text(found))
    return 0


def outlook(name: str, config: RunConfig | EvalConfig, root: Path) -> dict[str, Any]:
    """The outlook of a run.

    Returns:
        jobs.{left,total} by rule; episodes.{left,total}.{train,eval}; prompt_tokens, sampled_tokens, hours (of jobs one
        after another), disk_bytes and gpu_hours, each {left, total}; figures: what they were made of, each with its
        basis.

    Raises:
        VerbError: the tasks cannot be counted.
        TableError: a table that stands cannot be read.
    """
    jobs = Jobs(name, config, root)
    left, figures = jobs.left(), Figures(jobs)
    software = jobs.software(left)
    rollouts = [j for j in jobs.all if j.rule == "rollout"]
    missing = [j for j in left if j.rule == "rollout"]
    tokens = {j: [jobs.episodes(j) * t for t in figures.tokens(j)] for j in missing}
    spent = figures.spent["", ""]
    seconds = {j: _seconds(j, jobs, figures) for j in left}
    # What is finished is counted as it was; a job without a timing, as another of its kind would be.
    before = {j: figures.timings.get(job_name(j)) for j in jobs.all if j not in seconds}
    done = {j: _seconds(j, jobs, figures) if s is None else s for j, s in before.items()}
    gpu_left = sum(s * _gpus(j, jobs) for j, s in seconds.items())
    gpu_done = sum(s * _gpus(j, jobs) for j, s in done.items())
    building = SOFTWARE_SECONDS * len(software)
    disk = _disk(left, jobs, figures)
    sampled, prompt = sum(t[1] for t in tokens.values()), sum(t[0] for t in tokens.values())
    counted = Counter({f"software {n}": 1 for n in software})
    return {
        "run": name,
        "jobs": {
            "left": dict(Counter(j.rule for j in left) + counted),
            "total": dict(Counter(j.rule for j in jobs.all) + counted),
        },
        "episodes": {
            when: {p: sum(jobs.episodes(j) for j in some if j.purpose == p) for p in ("train", "eval")}
            for when, some in (("left", missing), ("total", rollouts))
        },
        "prompt_tokens": _both(prompt, spent.prompt_tokens),
        "sampled_tokens": _both(sampled, spent.response_tokens),
        "hours": _both((sum(seconds.values()) + building) / 3600, sum(done.values()) / 3600),
        "disk_bytes": _both(disk, size([jobs.run_dir])),
        "gpu_hours": _both(gpu_left / 3600, gpu_done / 3600),
        "figures": [asdict(f) for f in figures.used.values()],
    }


def _both(left: float, so_far: float) -> dict[str, float]:
    return {"left": left, "total": left + so_far}


def _seconds(job: Job, jobs: Jobs, figures: Figures) -> float:
    if job.rule == "rollout":
        return jobs.episodes(job) * figures.rollout_seconds(job)
    return figures.train_seconds() if job.rule == "train" else figures.job_seconds(job.rule)


def _gpus(job: Job, jobs: Jobs) -> int:
    """GPUs that a job holds."""
    if job.rule == "rollout":
        server = policies.server(jobs.config, jobs.cell(job))
        return server.tensor_parallel_size if server.device == "gpu" and server.url is None else 0
    if job.rule == "train" and isinstance(jobs.config, RunConfig):
        trainer = jobs.config.trainer
        return trainer.world_size if trainer.device == "gpu" else 0
    return 0


def _disk(left: list[Job], jobs: Jobs, figures: Figures) -> float:
    """Bytes that what is left adds for good."""
    rules = Counter(j.rule for j in left)
    checkpoints = rules["train"] + rules["prepare"] + rules["prepare_policy"]
    states = 0
    if isinstance(jobs.config, RunConfig) and rules["train"]:
        # The newest one, and those that are kept besides.
        kept = min(jobs.config.iterations, jobs.config.trainer.max_actor_ckpt_to_keep + 1)
        states = max(0, kept - len(full_states(jobs.run_dir)))
    episodes = sum(jobs.episodes(j) for j in left if j.rule == "rollout")
    added = checkpoints * figures.checkpoint_bytes() if checkpoints else 0.0
    added += states * figures.state_bytes() if states else 0.0
    return added + (episodes * figures.episode_bytes() if episodes else 0.0)


def text(found: Mapping[str, Any]) -> str:
    """The outlook as a person reads it."""
    jobs, episodes = found["jobs"], found["episodes"]
    lines = [("", "left", "in all")]

    def line(name: str, of: Callable[[str], str]) -> None:
        lines.append((name, of("left"), of("total")))

    line("jobs", lambda w: str(sum(jobs[w].values())))
    lines += [(f"  {rule}", str(jobs["left"].get(rule, 0)), str(n)) for rule, n in jobs["total"].items()]
    line("episodes, train", lambda w: str(episodes[w]["train"]))
    line("episodes, eval", lambda w: str(episodes[w]["eval"]))
    line("prompt tokens", lambda w: _count(found["prompt_tokens"][w]))
    line("sampled tokens", lambda w: _count(found["sampled_tokens"][w]))
    line("hours", lambda w: f"{found['hours'][w]:.2f}")
    line("disk of results", lambda w: said(found["disk_bytes"][w]))
    line("GPU-hours", lambda w: f"{found['gpu_hours'][w]:.2f}")
    out = [f"{found['run']}: jobs one after another, on this machine or one like it", ""]
    out += [f"{name:24}{left:>12}{total:>12}" for name, left, total in lines]
    figures = [(f["name"], _figure(f), f["basis"], f["source"]) for f in found["figures"]]
    if figures:
        wide = [max(len(f[i]) for f in figures) for i in range(3)]
        out += ["", "made of"]
        out += [
            "  " + "  ".join((f[0].ljust(wide[0]), f[1].rjust(wide[1]), f[2].ljust(wide[2]), f[3])) for f in figures
        ]
    return "\n".join(out)


def _figure(figure: Mapping[str, Any]) -> str:
    if figure["unit"].startswith("bytes"):
        return f"{said(figure['value'])}{figure['unit'].removeprefix('bytes')}"
    return f"{figure['value']:.{0 if figure['value'] >= 100 else 2}f} {figure['unit']}"


def _count(value: float) -> str:
    for unit in ("", " k", " M", " G"):
        if value < 1000:
            return f"{value:.0f}{unit}" if not unit or value >= 100 else f"{value:.1f}{unit}"
        value /= 1000
    return f"{value:.1f} T"
