"""summary.json and the report page of a run; then the weights that nothing needs any more go, where that is asked."""

import sys

from openforge import report, retention
from openforge.config import RunConfig
from openforge.eval import matrix
from openforge.job import job

with job("report", snakemake) as j:  # noqa: F821
    report.write_report(j.run_dir, j.config, j.root)
    j.say("report/index.html")
    if isinstance(j.config, RunConfig):
        retention.apply(j.run_dir, j.config, j.say)
    else:
        print(matrix.text(matrix.read(j.run_dir.parent, [j.run])), file=sys.stderr)
