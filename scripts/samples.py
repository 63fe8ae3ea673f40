"""Training rows of an iteration, and what became of every episode."""

import json

from openforge import tables
from openforge.job import job
from openforge.samples.build import build

with job("samples", snakemake) as j:  # noqa: F821
    paths = snakemake.input  # noqa: F821
    result = build(
        tables.read_rows(list(paths.episodes), tables.EPISODES),
        tables.read_rows(paths.scores, tables.SCORES),
        tables.read_rows(list(paths.calls), tables.CALLS),
        j.train_config,
    )
    tables.write_table(snakemake.output.samples, tables.SAMPLES, result.samples)  # noqa: F821
    tables.write_beside(snakemake.output.report, json.dumps(result.report, indent=1) + "\n")  # noqa: F821
    j.say(json.dumps(result.report))
