rule tasks:
    output:
        "results/{run}/tasks.parquet",
    log:
        "logs/{run}/tasks.log",
    script:
        "../scripts/tasks.py"
