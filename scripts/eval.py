"""pass@k of one cell at one checkpoint."""

from datetime import UTC, datetime

from openforge import manifest
from openforge.config import EvalConfig
from openforge.eval import evaluate_run, headline
from openforge.job import job

with job("eval", snakemake) as j:  # noqa: F821
    began = datetime.now(UTC)
    r = evaluate_run(j.run_dir, j.part["cell"], j.iteration)
    # A run's own evaluations are told of by the iterations that they evaluate.
    if isinstance(j.config, EvalConfig):
        about = manifest.evaluated(j.part["cell"], j.iteration, r["policy"], r["policy_versions"])
        manifest.append(j.run_dir, j.config, j.root, began, about)
    j.say(headline(r))
