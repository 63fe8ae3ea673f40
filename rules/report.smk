def iteration_files(wildcards):
    """Scores, samples and checkpoints of every iteration: the learning curve is part of a run's training."""
    c = RUNS[wildcards.run]
    if isinstance(c, typed.EvalConfig):
        return []
    part = "purpose=train/cell=train"
    files = []
    for k in range(1, c.iterations + 1):
        if finished(wildcards.run, k):
            files.append(settled(marker(wildcards.run, k)))
            continue
        files += [
            f"results/{wildcards.run}/scores/{part}/iteration={k:04d}/scores.parquet",
            f"results/{wildcards.run}/samples/{part}/iteration={k:04d}/samples.parquet",
            f"results/{wildcards.run}/metrics/{part}/iteration={k:04d}/metrics.parquet",
            marker(wildcards.run, k),
        ]
    return files


rule write_report:
    input:
        evaluations,
        iteration_files,
    output:
        page="results/{run}/report/index.html",
        summary="results/{run}/summary.json",
    log:
        "logs/{run}/report.log",
    script:
        "../scripts/report.py"


def run_files(run):
    """What a run's target asks for: the page, and every iteration and evaluation by name.

    The page alone would do on a fresh clone; but a finished page does not make Snakemake look for an iteration that was
    added since, as long as only mtimes re-plan.
    """

    class Run:
        pass

    w = Run()
    w.run = run
    return [f"results/{run}/report/index.html", *evaluations(w), *iteration_files(w)]


def target_files(run):
    """What a target asks for: its run, and the further suites of an evaluation whose tasks are there."""
    suites = [s for s in getattr(RUNS[run], "suites", ()) if s in RUNS]
    return [f for name in (run, *suites) for f in run_files(name)]
