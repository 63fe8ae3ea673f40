rule score:
    input:
        shard_files("episodes"),
    output:
        "results/{run}/scores/purpose={purpose}/cell={cell}/iteration={k}/scores.parquet",
    log:
        "logs/{run}/score-{purpose}-{cell}-{k}.log",
    resources:
        attempt=attempt_of,
    script:
        "../scripts/score.py"
