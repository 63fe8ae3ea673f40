"""The rollout table of an iteration or evaluation."""

from openforge import plan, tables
from openforge.eval import policies
from openforge.job import job

with job("plan", snakemake) as j:  # noqa: F821
    raw = tables.read_rows(snakemake.input.tasks, tables.TASKS)  # noqa: F821
    if j.part["purpose"] == "train":
        rows = plan.train_table(j.run, j.train_config, raw, int(j.part["k"]))
    else:
        policy = policies.name(j.run, j.config, j.iteration)
        rows = plan.eval_table(j.run, j.config, raw, j.cell(), j.iteration, policy, j.part["cell"])
    tables.write_table(snakemake.output[0], tables.ROLLOUTS, rows)  # noqa: F821
    j.say(f"{len(rows)} rollouts in {len({r['group_id'] for r in rows})} groups")
