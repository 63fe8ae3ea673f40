from types import SimpleNamespace

from openforge.train.job import needs_base
from openforge.train.slurm import resources


def trained_from(wildcards):
    return settled(marker(wildcards.run, int(wildcards.k) - 1))


def state_before(wildcards):
    """State of k-1; checkpoint 0 has none."""
    k = int(wildcards.k)
    if k == 1:
        return []
    state = f"results/{wildcards.run}/state/{k - 1:04d}/state.json"
    # Lost, it cannot be had back by training a finished iteration once more.
    return (
        str(Path(workflow.basedir, state).resolve())
        if finished(wildcards.run, k - 1)
        else state
    )


def base_of(wildcards):
    """Checkpoint 0, where training reads it beside k-1."""
    return settled(marker(wildcards.run, 0)) if needs_base(RUNS[wildcards.run]) else []


def of_slurm(name):
    """A resource of the training job, which only an executor of a cluster looks at."""
    return lambda wildcards: resources(RUNS[wildcards.run].trainer)[name]


def blobs_of(wildcards):
    """What holds the images of the iteration's samples."""
    part = SimpleNamespace(
        run=wildcards.run, purpose="train", cell="train", k=wildcards.k
    )
    return shard_files("blobs")(part)


rule train:
    input:
        samples="results/{run}/samples/purpose=train/cell=train/iteration={k}/samples.parquet",
        report="results/{run}/samples/purpose=train/cell=train/iteration={k}/report.json",
        blobs=blobs_of,
        policy=trained_from,
        state=state_before,
        base=base_of,
        software=lambda w: software(
            marker(w.run, int(w.k)), f"train-{RUNS[w.run].trainer.device}"
        ),
    output:
        # Markers written last: the folders beside them are renamed into place whole, and are not Snakemake's to delete.
        policy="results/{run}/checkpoints/{k}/checkpoint.json",
        state="results/{run}/state/{k}/state.json",
        metrics="results/{run}/metrics/purpose=train/cell=train/iteration={k}/metrics.parquet",
    log:
        "logs/{run}/train-{k}.log",
    wildcard_constraints:
        k=r"(?!0000)\d{4}",
    threads: training_cores
    resources:
        nodes=of_slurm("nodes"),
        tasks=of_slurm("tasks"),
        tasks_per_gpu=of_slurm("tasks_per_gpu"),
        mpi=of_slurm("mpi"),
        cpus_per_task=of_slurm("cpus_per_task"),
        gres=of_slurm("gres"),
    script:
        "../scripts/train.py"
