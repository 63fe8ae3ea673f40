"""The episodes of one shard."""

from pathlib import Path

from openforge import tables
from openforge.eval import policies
from openforge.job import job
from openforge.rollout.shard import run_shard

with job("rollout", snakemake) as j:  # noqa: F821
    paths, out = snakemake.input, snakemake.output  # noqa: F821
    rows = [r for r in tables.read_rows(paths.rollouts, tables.ROLLOUTS) if r["shard"] == int(j.part["shard"])]
    policy = Path(paths.policy).resolve().parent if paths.get("policy") else None
    cell = None if j.part["purpose"] == "train" else j.cell()
    # An executor's last attempt only writes down what there is: the quorum, not one dead job, decides.
    done = run_shard(rows, policy, policies.server(j.config, cell), j, seal=j.last_attempt and j.retries > 0)
    done.keep_artifacts()
    tables.write_table(out.blobs, tables.BLOBS, done.blobs)
    tables.write_table(out.calls, tables.CALLS, done.calls)
    tables.write_table(out.episodes, tables.EPISODES, done.episodes)
    done.close()
