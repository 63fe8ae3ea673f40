"""Rewards of an iteration or evaluation, and its quorum."""

from pathlib import Path

from openforge import score, tables
from openforge.job import job
from openforge.rollout import reopen
from openforge.score.again import scorer

with job("score", snakemake) as j:  # noqa: F821
    files = [Path(f) for f in snakemake.input.episodes]  # noqa: F821
    episodes = tables.read_rows(files, tables.EPISODES)
    rollouts = tables.read_rows(snakemake.input.rollouts, tables.ROLLOUTS)  # noqa: F821
    with scorer(j.config, j.root) as s:
        # Read for a judge alone: they are most of a run.
        calls = tables.read_rows(snakemake.input.calls, tables.CALLS) if s.judge else []  # noqa: F821
        rows = s.score_all(episodes, rollouts, calls)
    try:
        j.say(score.check_quorum(episodes, rows, j.config.rollout.quorum))
    except score.QuorumError as e:
        # Not before the executor's last attempt: the others read these files.
        again = reopen.reopen(j.run_dir, files) if j.last_attempt else 0
        if again:
            raise score.QuorumError(f"{e}. The same command runs the {again} failed rollouts once more") from None
        raise
    # First: a kill in between costs nothing, and leaves nothing.
    reopen.settle(j.run_dir, files)
    tables.write_table(snakemake.output[0], tables.SCORES, rows)  # noqa: F821
