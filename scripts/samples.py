"""Training rows of an iteration, and what became of every episode."""

import json
from pathlib import Path

from openforge import blobs, condition, tables
from openforge.job import job
from openforge.samples.build import build
from openforge.samples.images import Shown, Vision

with job("samples", snakemake) as j:  # noqa: F821
    paths, config = snakemake.input, j.train_config  # noqa: F821
    filtered: frozenset[str] = frozenset()
    if config.data.filter is not None:
        files = {"episodes": list(paths.episodes), "calls": list(paths.calls), "scores": [paths.scores]}
        filtered = condition.failing(config.data.filter, files)
    result = build(
        tables.read_rows(list(paths.episodes), tables.EPISODES),
        tables.read_rows(paths.scores, tables.SCORES),
        tables.read_rows(list(paths.calls), tables.CALLS),
        config,
        filtered,
        Shown(Vision.of(Path(paths.base).parent), blobs.sizes(list(paths.blobs))),
    )
    tables.write_table(snakemake.output.samples, tables.SAMPLES, result.samples)  # noqa: F821
    tables.write_beside(snakemake.output.report, json.dumps(result.report, indent=1) + "\n")  # noqa: F821
    j.say(json.dumps(result.report))
