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
        last = c.iterations
        points = [
            (cell.name, f"{k:04d}")
            for cell in c.cells
            for k in policies.evaluated(cell, last)
        ]
    return [
        f"results/{wildcards.run}/eval/cell={cell}/iteration={k}/eval.json"
        for cell, k in points
    ]
