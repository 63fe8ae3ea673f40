# OpenForge: raw tasks -> plan -> rollout (shards) -> score -> samples -> train -> checkpoint -> eval -> report.
# A run is one file, config/RUN.yaml: type `snakemake train_RUN` and results/RUN/ appears. docs/design.md explains.
from snakemake.utils import min_version

min_version("9.27")


include: "rules/common.smk"
include: "rules/software.smk"
include: "rules/tasks.smk"
include: "rules/policy.smk"
include: "rules/plan.smk"
include: "rules/rollout.smk"
include: "rules/score.smk"
include: "rules/samples.smk"
include: "rules/train.smk"
include: "rules/eval.smk"
include: "rules/report.smk"
include: "rules/serve.smk"


wildcard_constraints:
    run="|".join(RUNS) or "none",
    cell=r"[a-z0-9_.]+",
    k=r"\d{4}|none",
    shard=r"\d{4}",


for name in RUNS:

    rule:
        name:
            name if name.startswith("eval_") else f"train_{name}"
        default_target: name == "demo"
        input:
            target_files(name),
        localrule: True


if "demo" in RUNS:

    rule demo:
        input:
            run_files("demo"),
        localrule: True
