from openforge.policy.weights import CheckpointError, check_kept


rule eval:
    input:
        rollouts="results/{run}/rollouts/purpose=eval/cell={cell}/iteration={k}/rollouts.parquet",
        episodes=lambda w: shard_files("episodes")(Eval(w)),
        scores="results/{run}/scores/purpose=eval/cell={cell}/iteration={k}/scores.parquet",
    output:
        "results/{run}/eval/cell={cell}/iteration={k}/eval.json",
    log:
        "logs/{run}/eval-{cell}-{k}.log",
    script:
        "../scripts/eval.py"


class Eval:
    """The wildcards of an evaluation, with the purpose that its paths spell out."""

    def __init__(self, wildcards):
        self.run, self.cell, self.k, self.purpose = (
            wildcards.run,
            wildcards.cell,
            wildcards.k,
            "eval",
        )


def evaluations(wildcards):
    """Every evaluation that a run's report needs."""
    c = RUNS[wildcards.run]
    if isinstance(c, typed.EvalConfig):
        ref = policies.reference(c)
        points = [
            (cell.name if ref.slug == "base" else f"{cell.name}.{ref.slug}", ref.k)
            for cell in c.cells
        ]
    else:
        # A run that has gone further than `iterations` says now ends where it stands.
        last = max(c.iterations, config_paths.last_finished(run_dir(wildcards.run)))
        points = [
            (cell.name, f"{k:04d}")
            for cell in c.cells
            for k in policies.evaluated(cell, last)
        ]
    files = []
    for cell, k in points:
        file = f"results/{wildcards.run}/eval/cell={cell}/iteration={k}/eval.json"
        files.append(settled(file))
        if not Path(file).exists() and wildcards.run in named_runs():
            check_sampled(c, wildcards.run, k)
    return files


def check_sampled(c, run, k):
    """Refuse an evaluation of a checkpoint whose weights were pruned.

    Called while the rules are read: Snakemake takes an error of an input function for a file that nothing makes.
    """
    ref = policies.reference(c) if isinstance(c, typed.EvalConfig) else None
    if ref is None:
        policy = Path(marker(run, int(k)))
    elif ref.kind == "checkpoint":
        policy = policies.checkpoint_file(ref, Path(workflow.basedir))
    else:
        return
    try:
        check_kept(policy.parent)
    except CheckpointError as e:
        refuse(e)
