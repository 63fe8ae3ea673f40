def previous_scores(wildcards):
    """plan(k) waits for score(k-1): at most one training rollout is in flight."""
    k = number(wildcards.k)
    if wildcards.purpose != "train" or k == 1:
        return []
    if finished(wildcards.run, k - 1):
        return []
    return (
        f"results/{wildcards.run}/scores/purpose=train/cell=train/iteration={k - 1:04d}"
        "/scores.parquet"
    )


rule plan:
    input:
        tasks="results/{run}/tasks.parquet",
        scores=previous_scores,
    output:
        "results/{run}/rollouts/purpose={purpose}/cell={cell}/iteration={k}/rollouts.parquet",
    log:
        "logs/{run}/plan-{purpose}-{cell}-{k}.log",
    script:
        "../scripts/plan.py"
