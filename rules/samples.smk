rule samples:
    input:
        episodes=shard_files("episodes"),
        calls=shard_files("calls"),
        blobs=shard_files("blobs"),
        # How the model sees images, where it does.
        base=lambda w: settled(marker(w.run, 0)),
        scores="results/{run}/scores/purpose={purpose}/cell={cell}/iteration={k}/scores.parquet",
    output:
        samples="results/{run}/samples/purpose={purpose}/cell={cell}/iteration={k}/samples.parquet",
        report="results/{run}/samples/purpose={purpose}/cell={cell}/iteration={k}/report.json",
    log:
        "logs/{run}/samples-{purpose}-{cell}-{k}.log",
    script:
        "../scripts/samples.py"
