rule rollout:
    input:
        rollouts="results/{run}/rollouts/purpose={purpose}/cell={cell}/iteration={k}/rollouts.parquet",
        policy=sampled_checkpoint,
        software=rollout_software,
    output:
        episodes="results/{run}/episodes/purpose={purpose}/cell={cell}/iteration={k}/shard={shard}/episodes.parquet",
        calls="results/{run}/calls/purpose={purpose}/cell={cell}/iteration={k}/shard={shard}/calls.parquet",
        blobs="results/{run}/blobs/purpose={purpose}/cell={cell}/iteration={k}/shard={shard}/blobs.parquet",
    log:
        "logs/{run}/rollout-{purpose}-{cell}-{k}-{shard}.log",
    threads: rollout_cores
    resources:
        attempt=attempt_of,
    script:
        "../scripts/rollout.py"
