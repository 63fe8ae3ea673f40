"""Rewards of an iteration or evaluation, and its quorum."""

from openforge import score, tables
from openforge.job import job

with job("score", snakemake) as j:  # noqa: F821
    episodes = tables.read_rows(list(snakemake.input), tables.EPISODES)  # noqa: F821
    rows = score.score_all(episodes)
    j.say(score.check_quorum(episodes, rows, j.config.rollout.quorum))
    tables.write_table(snakemake.output[0], tables.SCORES, rows)  # noqa: F821
