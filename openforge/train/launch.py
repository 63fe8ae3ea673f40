"""Start the training job in its software environment, follow it, and end it with us."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections import deque
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq

from openforge import machine, tables
from openforge.config_training import Trainer
from openforge.policy.weights import check_kept
from openforge.software import ROOT, python_of
from openforge.train.checkpoint import carry_over, check_room, check_state, prune_states
from openforge.train.checks import check_model
from openforge.train.job import PROGRESS, REFUSED, Job, TrainError
from openforge.train.slurm import torchrun_nodes

Progress = Callable[[str], None]


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def train(job: Job, progress: Progress = _print, root: Path = ROOT) -> None:
    """Train iteration k: checkpoint k, state k and the iteration's metrics are written, or nothing is.

    Where the samples table is empty (every group was degenerate), checkpoint k is checkpoint k-1 under its
    own name.

    Raises:
        TrainError: inputs that do not fit, or a job that failed, with the last lines of its log.
        CheckpointError: the weights of checkpoint k-1 were pruned.
        SoftwareMissing: the train environment is not built.
    """
    trainer = job.typed.trainer
    check_kept(Path(job.checkpoint_in))
    if job.base is not None:
        check_kept(Path(job.base))
    tables.check_file(job.samples, tables.SAMPLES)
    if trainer.device == "gpu" and not machine.gpus():
        raise TrainError(machine.no_gpu("trainer.device is gpu"))
    if pq.read_metadata(job.samples).num_rows == 0:
        reason = "no sample to train on: every group was dropped"
        version = carry_over(job, reason)
        figures = {"training/rows": 0.0, **job.counted()}
        rows = [{"iteration": job.iteration, "step": -1, "name": k, "value": float(v)} for k, v in figures.items()]
        tables.write_table(job.metrics_out, tables.METRICS, rows)
        progress(f"iteration {job.iteration}: {reason}; {version} carries the weights on")
        return
    if job.state_in is not None:
        check_state(Path(job.state_in), Path(job.checkpoint_in), job.typed)
    check_model(job.typed, Path(job.checkpoint_in))
    check_room(job)
    python = python_of(f"train-{trainer.device}", root)
    out = Path(job.checkpoint_out)
    # Beside the checkpoint, which every node sees.
    spec = out.with_name(f".{out.name}.{uuid.uuid4().hex[:8]}.job.json")
    argv = command(python, spec, trainer)
    job.write(spec)
    try:
        _follow(argv, environment(trainer.threads, trainer.nnodes), progress)
    finally:
        spec.unlink(missing_ok=True)
    # State k-1 stays until k+1 is trained: an interrupt right here must leave something to train k from
    # again.
    prune_states(Path(job.state_out).parent, job.iteration, trainer.max_actor_ckpt_to_keep)


def command(python: Path, spec: Path, trainer: Trainer) -> list[str]:
    """The job's command line: plain Python (quicker to start) for one process, torchrun for several, and where they are
    on several nodes, one torchrun a node that srun starts.

    Raises:
        TrainError: several nodes are asked for, and this is no SLURM job of as many.
    """
    module = ["-m", "openforge.train.epoch", str(spec)]
    torchrun = [str(python), "-m", "torch.distributed.run", f"--nproc-per-node={trainer.nproc_per_node}"]
    if trainer.nnodes > 1:
        srun, rendezvous = torchrun_nodes(trainer.nnodes, os.environ)
        return [*srun, *torchrun, *rendezvous, *module]
    if trainer.nproc_per_node > 1:
        return [*torchrun, "--standalone", *module]
    return [str(python), *module]


def environment(threads: int, nodes: int = 1) -> dict[str, str]:
    """The job's environment: this package on its path, its threads, nothing of a hub."""
    package_root = Path(__file__).resolve().parents[2]
    paths = [str(package_root), os.environ.get("PYTHONPATH", "")]
    # Several processes of one machine talk over loopback, whatever its host name resolves to.
    network = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")} if nodes == 1 else {}
    return {
        **os.environ,
        **network,
        "PYTHONPATH": os.pathsep.join(p for p in paths if p),
        "OMP_NUM_THREADS": str(threads),
        # Set by Snakemake, and it would win over OMP_NUM_THREADS in torch.
        "MKL_NUM_THREADS": str(threads),
        # A spinning thread starves the other on a machine that does something else as well.
        "OMP_WAIT_POLICY": "passive",
        # Large tensors come from the heap and stay there: mapped anew each time, a tenth goes on page faults.
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(2**34),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _follow(argv: list[str], env: dict[str, str], progress: Progress) -> None:
    """Run a command, hand its progress lines on, and raise with its last lines when it fails."""
    tail: deque[str] = deque(maxlen=25)
    refused: list[str] = []
    # A session of its own: an interrupt reaches the job through us alone, and one signal reaches all of it.
    child = subprocess.Popen(
        argv,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert child.stdout is not None
    try:
        for line in child.stdout:
            if line.startswith(PROGRESS):
                progress(line.removeprefix(PROGRESS).rstrip())
            elif line.startswith(REFUSED):
                refused.append(line.removeprefix(REFUSED).rstrip())
            tail.append(line.rstrip())
        code = child.wait()
    except BaseException:
        _end(child)
        raise
    if refused:
        raise TrainError(refused[0])
    if code in (-signal.SIGKILL, 128 + signal.SIGKILL):
        raise TrainError(
            "the training job was killed (signal 9): by someone, or by the kernel for want of memory; what it had "
            "written is kept, type the command again"
        )
    if code:
        raise TrainError(f"the training job ended with code {code}; its last lines:\n" + "\n".join(tail))


def _end(child: subprocess.Popen[str], seconds: float = 20.0) -> None:
    """Ask the job to end (torchrun passes it on to its workers), then kill what is left of its session."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, sign)
        except ProcessLookupError:
            return
        try:
            child.wait(seconds)
            return
        except subprocess.TimeoutExpired:
            continue
