"""Training over several nodes of a SLURM job: what it asks of SLURM, and how torchrun is started on each node."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

from openforge.config_training import Trainer
from openforge.train.job import TrainError

# Below the ports that Linux hands out to outgoing connections (32768 and up).
FIRST_PORT, PORTS = 15000, 10000
# Cores a GPU: for loading, the network, and what a step leaves to the CPU.
CORES_A_GPU = 8


def resources(trainer: Trainer) -> dict[str, int | str]:
    """What a training job asks of SLURM, by the names of snakemake-executor-plugin-slurm.

    Of several nodes the job has one task each, which is its torchrun. `mpi`, even empty, leaves starting them to the
    job: without it the plugin would run the job's script inside an srun of its own, and a step in a step waits for
    cores that the outer one holds.
    """
    gpu = trainer.device == "gpu"
    several = trainer.nnodes > 1
    return {
        "nodes": trainer.nnodes,
        "tasks": trainer.nnodes,
        # The plugin would take `tasks` for tasks a GPU.
        "tasks_per_gpu": 0,
        "mpi": "torchrun" if several else "",
        "cpus_per_task": trainer.nproc_per_node * (CORES_A_GPU if gpu else trainer.threads),
        "gres": f"gpu:{trainer.nproc_per_node}" if gpu else "",
    }


def torchrun_nodes(nodes: int, env: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """srun's words, and torchrun's options to meet at the first node; `env` is that of a SLURM job.

    Raises:
        TrainError: this is no SLURM job of as many nodes.
    """
    hosts = _hosts(nodes, env)
    job = env["SLURM_JOB_ID"]
    srun = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    if env.get("SLURM_CPUS_PER_TASK"):
        # Since 22.05 a step does not inherit it.
        srun.append(f"--cpus-per-task={env['SLURM_CPUS_PER_TASK']}")
    rendezvous = [
        f"--nnodes={nodes}",
        "--rdzv-backend=c10d",
        f"--rdzv-id={job}",
        # Two jobs that share a node must not meet.
        f"--rdzv-endpoint={hosts[0]}:{FIRST_PORT + int(job) % PORTS}",
    ]
    return srun, rendezvous


def _hosts(nodes: int, env: Mapping[str, str]) -> list[str]:
    compressed = env.get("SLURM_JOB_NODELIST")
    if not compressed or "SLURM_JOB_ID" not in env:
        raise TrainError(
            f"trainer.nnodes is {nodes}, but this is no SLURM job (SLURM_JOB_ID and SLURM_JOB_NODELIST are not set): "
            "run it with --profile profiles/slurm, or set trainer.nnodes to 1"
        )
    command = ["scontrol", "show", "hostnames", compressed]
    try:
        done = subprocess.run(command, env=dict(env), capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except OSError as e:
        raise TrainError(f"trainer.nnodes is {nodes}, but scontrol, which names them, cannot be run: {e}") from None
    hosts = done.stdout.split()
    if done.returncode or len(hosts) != nodes:
        raise TrainError(
            f"trainer.nnodes is {nodes}, but job {env['SLURM_JOB_ID']} has the nodes {' '.join(hosts) or 'none'} "
            f"({compressed}{': ' + done.stderr.strip() if done.stderr.strip() else ''}); set trainer.nnodes to their "
            "number"
        )
    return hosts
