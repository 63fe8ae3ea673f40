# Software environments, built once from the exact pins in envs/.
SOFTWARE = sorted(
    p.stem for p in Path(workflow.basedir, "envs").glob("*-*.txt") if "." not in p.stem
)
DEVICES = {"serve-gpu", "train-gpu"}

for env in SOFTWARE:

    rule:
        name:
            f"software_{env.replace('-', '_')}"
        input:
            # All of envs/ENV.* and envs/ENV/: what openforge/software.py makes the environment from.
            sorted(
                str(p.relative_to(workflow.basedir))
                for pattern in (f"{env}.*", f"{env}/*")
                for p in Path(workflow.basedir, "envs").glob(pattern)
            ),
        output:
            f".software/{env}/ready.json",
        log:
            f"logs/software/{env}.log",
        params:
            env=env,
        script:
            "../scripts/software.py"


rule software:
    input:
        expand(
            ".software/{env}/ready.json", env=[e for e in SOFTWARE if e not in DEVICES]
        ),
    localrule: True
