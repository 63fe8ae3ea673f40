"""Raw tasks of a run."""

from collections import Counter

from openforge import config_paths, tables
from openforge.job import job
from openforge.tasks import check_splits, configured, raw_tasks

with job("tasks", snakemake) as j:  # noqa: F821
    rows = raw_tasks(j.config.tasks, j.config.environment, j.run_dir / "tasks", j.root, configured(j.config))
    check_splits(rows, j.config)
    config_paths.freeze(j.config, j.run_dir)
    tables.write_table(snakemake.output[0], tables.TASKS, rows)  # noqa: F821
    j.say(", ".join(f"{n} {split}" for split, n in sorted(Counter(r["split"] for r in rows).items())) + " tasks")
