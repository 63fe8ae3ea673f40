# `snakemake serve_RUN` hosts a run's newest checkpoint until Ctrl-C; another one: openforge serve RUN@k.
for name in RUNS:
    if not name.startswith("eval_"):

        rule:
            name:
                f"serve_{name}"
            localrule: True
            params:
                policy=name,
            script:
                "../scripts/serve.py"
