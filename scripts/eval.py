"""pass@k of one cell at one checkpoint."""

from openforge.eval import evaluate_run
from openforge.job import job

with job("eval", snakemake) as j:  # noqa: F821
    r = evaluate_run(j.run_dir, j.part["cell"], j.iteration)
    j.say(f"pass@1 {r['p']:.3f} [{r['low']:.3f}, {r['high']:.3f}] over {r['n']} tasks, {r['missing']} missing")
