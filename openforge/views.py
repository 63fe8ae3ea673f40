"""Views and macros of the store that build on the tables' own, in SQL; `openforge.store` makes them.

The store is read by older DuckDB clients too: no new syntax where an old one says the same.
"""

from __future__ import annotations

from openforge import behaviour

# In the order in which they build on one another. These need the tables episodes and scores alone.
EPISODES = {
    "latest_scores": """
SELECT * FROM scores
QUALIFY row_number() OVER (PARTITION BY episode_id ORDER BY scored_at DESC, scorer_version DESC) = 1
""",
    "episodes": """
SELECT e.*, s.scorer_version, s.status AS score_status, s.reward, s.passed, s.components
FROM all_episodes e LEFT JOIN latest_scores s USING (episode_id)
WHERE e.final
""",
    # Calls of tasks' own tools, one row a call; `dispatch` counts from 0 within an episode.
    "dispatches": """
SELECT episode_id, d.i::INTEGER AS dispatch, d.v.tool AS tool, d.v.arguments::JSON AS arguments, d.v.status AS status,
       d.v.status >= 400 AS is_error, d.v.response::JSON AS response, d.v.endpoint AS endpoint, d.v.latency AS latency,
       d.v.time::TIMESTAMPTZ AS time
FROM (SELECT episode_id, unnest(list_transform(dispatches, lambda v, i: {'v': v, 'i': i - 1})) AS d FROM all_episodes)
""",
}
JOINED = {
    **EPISODES,
    # One row a task of an evaluation: its trials in their order, a missing one as NULL.
    "task_trials": """
SELECT r.cell, r.iteration, r.benchmark, r.policy, r.harness, r.task_id, any_value(r.tags[1]) AS kind,
       list(e.passed ORDER BY r.draw, r.sample) AS trials, count(*) AS n, count(*) FILTER (e.passed) AS c,
       count(*) FILTER (e.passed IS NULL) AS missing
FROM rollouts r LEFT JOIN episodes e ON e.rollout_id = r.rollout_id
WHERE r.purpose = 'eval' AND NOT r.reserve
GROUP BY r.cell, r.iteration, r.benchmark, r.policy, r.harness, r.task_id
""",
    **behaviour.VIEWS,
}

# Table macros by their head. `FROM pass_k(3)`: one row an evaluation, means over its tasks with k trials or more
# (`tasks`; `too_few` have less); a missing trial is a failed one and counted in `missing`. openforge/eval/estimate.py
# has the same four formulas and their sources.
MACROS = {
    "pass_k(k)": """
WITH whole AS (SELECT * FROM task_trials WHERE n >= k),
each AS (
    SELECT t.cell, t.iteration, t.benchmark, t.policy, t.harness, t.task_id, t.n, t.c, t.missing,
           bool_and(coalesce(t.trials[i + 1], false)) AS all_k,
           1 - product((t.n - t.c - i)::DOUBLE / (t.n - i)) AS pass_at,
           product((t.c - i)::DOUBLE / (t.n - i)) AS draw
    FROM whole t, range(k) r(i)
    GROUP BY ALL
),
shares AS (
    SELECT cell, iteration, benchmark, policy, harness, count(*) AS tasks, avg(pass_at) AS pass_at,
           avg(all_k::INTEGER) AS pass_hat_all_k, avg(pow(c / n, k)) AS pass_hat_power, avg(draw) AS pass_hat_draw
    FROM each GROUP BY ALL
)
SELECT a.cell, a.iteration, a.benchmark, a.policy, a.harness, k AS k, coalesce(s.tasks, 0) AS tasks,
       a.tasks - coalesce(s.tasks, 0) AS too_few, a.trials, a.missing,
       s.pass_at, s.pass_hat_all_k, s.pass_hat_power, s.pass_hat_draw
FROM (
    SELECT cell, iteration, benchmark, policy, harness, count(*) AS tasks, sum(n)::BIGINT AS trials,
           sum(missing)::BIGINT AS missing
    FROM task_trials GROUP BY ALL
) a
LEFT JOIN shares s
       ON s.cell = a.cell AND s.iteration IS NOT DISTINCT FROM a.iteration AND s.benchmark = a.benchmark
      AND s.policy = a.policy AND s.harness = a.harness
ORDER BY a.benchmark, a.cell, a.iteration, a.policy
""",
}
