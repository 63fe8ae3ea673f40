"""summary.json and the report page of a run."""

from openforge import report
from openforge.job import job

with job("report", snakemake) as j:  # noqa: F821
    report.write_report(j.run_dir, j.config, j.root)
    j.say("report/index.html")
