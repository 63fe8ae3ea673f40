rule score:
    input:
        rollouts="results/{run}/rollouts/purpose={purpose}/cell={cell}/iteration={k}/rollouts.parquet",
        episodes=shard_files("episodes"),
        calls=shard_files("calls"),
    output:
        "results/{run}/scores/purpose={purpose}/cell={cell}/iteration={k}/scores.parquet",
    log:
        "logs/{run}/score-{purpose}-{cell}-{k}.log",
    resources:
        attempt=attempt_of,
    script:
        "../scripts/score.py"
