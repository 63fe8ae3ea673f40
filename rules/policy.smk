# Checkpoint 0: the prepared base model. An evaluation's foreign policy stands beside it under its own name.
def policy_input(wildcards):
    """The checkpoint that an evaluation samples from. RUN@k is read where it stands and never plans its training."""
    c = RUNS[wildcards.run]
    if isinstance(c, typed.RunConfig):
        return settled(marker(wildcards.run, int(wildcards.k)))
    ref = policies.reference(c)
    if ref.kind == "url":
        return []
    if ref.kind == "checkpoint":
        # Under its absolute name no rule can make it: an evaluation never plans a training job.
        return str(policies.checkpoint_file(ref, Path(workflow.basedir)).resolve())
    return settled(f"results/{wildcards.run}/policies/{ref.slug}/checkpoint.json")


rule prepare:
    input:
        lambda w: software(marker(w.run, 0), "serve-cpu"),
    output:
        "results/{run}/checkpoints/0000/checkpoint.json",
    log:
        "logs/{run}/prepare.log",
    script:
        "../scripts/prepare.py"


rule prepare_policy:
    input:
        lambda w: software(
            f"results/{w.run}/policies/{w.slug}/checkpoint.json", "serve-cpu"
        ),
    output:
        "results/{run}/policies/{slug}/checkpoint.json",
    log:
        "logs/{run}/prepare-{slug}.log",
    script:
        "../scripts/prepare.py"
