"""What agents do, as SQL over the recorded calls: views of the store. docs/behaviour.md says what each measure means.

Harnesses name their tools differently and tell a failure in words only, so the measures rest on the literal tables
here: a tool's kind by its name, a shell command's by its program, a failure by the words of its result. Whoever brings
a harness with other words adds them here.
"""

from __future__ import annotations

# Tools by which a harness runs any command.
SHELL = (
    *("bash", "shell", "shell_command", "local_shell", "exec", "exec_command", "container.exec"),
    *("run_shell_command", "run_terminal_cmd", "execute_command", "terminal"),
)
# Tools of harnesses that change files, and that look at something; names in lower case.
WRITE = (
    *("write", "edit", "multiedit", "notebookedit", "apply_patch", "write_file", "edit_file", "replace"),
    *("create_file", "str_replace_editor", "str_replace_based_edit_tool"),
)
CHECK = (
    *("read", "read_file", "read_many_files", "view", "ls", "list", "list_directory", "glob", "find", "grep"),
    *("search_file_content", "grep_search"),
)
# Programs that change something, and that look at or test something.
WRITING = (
    *("mv", "cp", "rm", "mkdir", "rmdir", "touch", "tee", "ln", "chmod", "dd", "patch", "truncate", "install"),
    *("unzip", "tar", "gzip", "gunzip", "rsync"),
)
CHECKING = (
    *("cat", "head", "tail", "less", "more", "ls", "find", "grep", "rg", "diff", "cmp", "wc", "stat", "test", "["),
    *("file", "sort", "jq", "awk", "sed", "sha256sum", "md5sum", "od", "xxd", "tree", "du", "column", "tac", "nl"),
    *("python", "python3", "node", "pytest", "make", "npm", "cargo", "go", "bash", "sh", "git", "sqlite3"),
)
# Verbs of a task's own tools that look at something; every other one changes something.
LOOKING = "(^|_)(get|list|read|search|show|find|view|check|query|fetch|count|lookup|history|status)(_|$)"
# Words of results by which the harnesses tell a failure: an exit code that is not 0, or an error's first words.
FAILED = (
    r"(?i)(exit(ed with)? code:? ?-?[1-9]|exit_?code\\?\"?: ?-?[1-9]|returncode\\?\"?(>|: ?)-?[1-9]"
    r"|\\?\"is_?error\\?\": ?true)|^\s*(error\b|err:|<tool_use_error>|traceback \(|\{\s*\"error\":)"
)
# Between the commands of a line; one of a pipe counts by its first program.
BETWEEN = r"\s*(?:&&|\|\||;|\n)\s*"
# What may stand before a command's program.
BEFORE = r"^(?:[A-Za-z_][A-Za-z0-9_]*=\S*\s+|sudo\s+|env\s+|time\s+|timeout\s+\S+\s+|then\s+|do\s+)*"


def _names(names: tuple[str, ...]) -> str:
    return "(" + ", ".join(f"'{n}'" for n in names) + ")"


def _text(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


# In the order in which they build on one another.
VIEWS = {
    # Tools that an episode's agent was offered: those that its prompts declare, and the task's own.
    "tools_offered": """
WITH declared AS (
    SELECT DISTINCT c.episode_id, coalesce(t->>'$.function.name', t->>'$.name') AS tool
    FROM calls c
    JOIN (SELECT DISTINCT sha256, unnest(json_extract(CASE WHEN json_valid(text) THEN text END, '$[*]')) AS t
          FROM (SELECT sha256, TRY(decode(bytes)) AS text FROM blobs WHERE mime = 'application/json')) b
      ON b.sha256 = c.tools_sha256
),
own AS (
    SELECT e.episode_id,
           unnest(json_extract_string(CASE WHEN json_valid(r.payload) THEN r.payload END, '$.tools[*].name')) AS tool
    FROM episodes e JOIN rollouts r USING (rollout_id)
)
SELECT d.episode_id, coalesce(max(o.tool), d.tool) AS tool, max(o.tool) IS NOT NULL AS of_task
FROM declared d LEFT JOIN own o
  ON o.episode_id = d.episode_id AND (d.tool = o.tool OR ends_with(d.tool, '_' || o.tool))
WHERE d.tool IS NOT NULL
GROUP BY d.episode_id, d.tool
UNION
SELECT episode_id, tool, true FROM own
""",
    # What tools answered, by the call's id; in text, however it was written.
    "tool_results": """
SELECT c.episode_id, m->>'$.tool_call_id' AS id, min(c.call) AS told_in,
       arg_min(CASE WHEN json_type(m, '$.content') = 'ARRAY'
                    THEN array_to_string(json_extract_string(m, '$.content[*].text'), '')
                    ELSE m->>'$.content' END, c.call) AS result
FROM (SELECT episode_id, call, unnest(json_extract(CASE WHEN json_valid(messages) THEN messages END, '$[*]')) AS m
      FROM calls) c
WHERE m->>'$.role' = 'tool'
GROUP BY c.episode_id, id
""",
    # One row a tool call that the harness took. Without tools declared, a harness's shell command is in the text.
    "tool_calls": f"""
WITH native AS (
    SELECT episode_id, call, unnest(range(len(found))) AS place, unnest(found) AS t
    FROM (SELECT episode_id, call,
                 json_extract(CASE WHEN json_valid(response) THEN response END, '$.tool_calls[*]') AS found
          FROM calls WHERE delivery = 'confirmed')
),
told AS (
    SELECT n.episode_id, n.call, n.place, n.t->>'$.function.name' AS name, n.t->>'$.function.arguments' AS arguments,
           r.result
    FROM native n LEFT JOIN tool_results r ON r.episode_id = n.episode_id AND r.id = n.t->>'$.id'
),
typed AS (
    SELECT *, CASE WHEN json_valid(arguments) THEN arguments::JSON END AS a FROM told
),
commands AS (
    SELECT episode_id, call, place, name, arguments, result,
           CASE WHEN lower(name) IN {_names(SHELL)} THEN coalesce(
               a->>'$.cmd',
               CASE WHEN json_type(a, '$.command') = 'ARRAY' THEN a->>'$.command[#-1]' ELSE a->>'$.command' END,
               a->>'$.script', '') END AS command
    FROM typed
    UNION ALL
    SELECT c.episode_id, c.call, 0, 'shell', NULL,
           (SELECT m.last
            FROM (SELECT episode_id, call,
                         CASE WHEN json_valid(messages) THEN messages END->>'$[#-1].content' AS last
                  FROM calls) m
            WHERE m.episode_id = c.episode_id AND m.call = c.call + 1),
           coalesce(nullif(regexp_extract(c.said, '```[a-z_]*\\n(.*?)\\n?```', 1, 's'), ''),
                    regexp_extract(c.said, '^[^\\n]*'))
    FROM (SELECT *, CASE WHEN json_valid(response) THEN response END->>'$.content' AS said FROM calls) c
    JOIN all_episodes e USING (episode_id)
    WHERE e.harness = 'mini_swe_agent' AND c.tools_sha256 IS NULL AND c.delivery = 'confirmed' AND c.thread = 0
),
-- The command `tool NAME ...` is a call of the task's tool NAME.
named AS (
    SELECT *, nullif(regexp_extract(command, '^\\s*tool\\s+([A-Za-z0-9_.-]+)', 1), '') AS by_command FROM commands
),
owned AS (
    SELECT n.episode_id, n.call, n.place, any_value(n.name) AS name, any_value(n.by_command) AS by_command,
           any_value(n.arguments) AS arguments, any_value(n.command) AS command, any_value(n.result) AS result,
           arg_max(o.tool, length(o.tool)) AS of_task
    FROM named n LEFT JOIN tools_offered o
      ON o.episode_id = n.episode_id AND o.of_task
     AND (coalesce(n.by_command, n.name) = o.tool OR ends_with(n.name, '_' || o.tool))
    GROUP BY n.episode_id, n.call, n.place
),
-- What a task's service answered is known better than its words: the nth call of a tool is its nth dispatch.
counted AS (
    SELECT *, row_number() OVER (PARTITION BY episode_id, of_task ORDER BY call, place) AS nth FROM owned
),
answered AS (
    SELECT episode_id, tool, is_error, row_number() OVER (PARTITION BY episode_id, tool ORDER BY dispatch) AS nth
    FROM dispatches
)
SELECT w.episode_id, w.call, w.place, coalesce(of_task, name) AS tool,
       CASE WHEN of_task IS NOT NULL THEN 'task'
            WHEN command IS NOT NULL THEN 'shell'
            WHEN lower(name) IN {_names(WRITE)} THEN 'write'
            WHEN lower(name) IN {_names(CHECK)} THEN 'check'
            ELSE 'other' END AS kind,
       command, arguments, result, coalesce(d.is_error, regexp_matches(result, {_text(FAILED)})) AS failed
FROM counted w LEFT JOIN answered d ON d.episode_id = w.episode_id AND d.tool = w.of_task AND d.nth = w.nth
""",
    # What each did, a shell command cut into its parts: whether it changed something or looked at something.
    "tool_steps": f"""
WITH parts AS (
    SELECT episode_id, call, place, tool, kind, failed, unnest(range(len(cut))) AS part, unnest(cut) AS command
    FROM (SELECT *, regexp_split_to_array(trim(command), {_text(BETWEEN)}) AS cut FROM tool_calls WHERE kind = 'shell')
    UNION ALL
    SELECT episode_id, call, place, tool, kind, failed, 0, NULL FROM tool_calls WHERE kind <> 'shell'
),
programs AS (
    SELECT *, regexp_extract(regexp_replace(command, {_text(BEFORE)}, ''), '^(?:\\S*/)?([^\\s/]+)', 1) AS program,
           regexp_matches(command, '(^|[^0-9&>=-])>{{1,2}}\\s*[^&\\s>]')
               AND NOT regexp_matches(command, '>{{1,2}}\\s*/dev/null\\s*$') AS redirects
    FROM parts
)
SELECT episode_id, call, place, part, tool, kind, program, failed,
       CASE kind WHEN 'shell' THEN coalesce(redirects, false) OR program IN {_names(WRITING)}
                                   OR regexp_matches(command, 'sed\\s+(-\\S+\\s+)*-[a-zA-Z]*i')
                 WHEN 'task' THEN NOT regexp_matches(lower(tool), '{LOOKING}')
                 ELSE kind = 'write' END AS writes,
       CASE kind WHEN 'shell' THEN program IN {_names(CHECKING)} AND NOT coalesce(redirects, false)
                                   AND NOT regexp_matches(command, 'sed\\s+(-\\S+\\s+)*-[a-zA-Z]*i')
                 WHEN 'task' THEN regexp_matches(lower(tool), '{LOOKING}')
                 ELSE kind = 'check' END AS checks
FROM programs
WHERE kind <> 'shell' OR program <> ''
""",
    # One row a final episode. A measure is NULL where it has no denominator.
    "behaviour": """
WITH purposes AS (
    SELECT c.*, CASE WHEN c.kind = 'shell' THEN 'shell ' || coalesce(p.program, '') ELSE c.tool END AS purpose
    FROM tool_calls c LEFT JOIN (
        SELECT episode_id, call, place, arg_min(program, part) AS program
        FROM tool_steps WHERE kind = 'shell' AND program <> 'cd' GROUP BY ALL
    ) p USING (episode_id, call, place)
),
recovered AS (
    SELECT f.*, EXISTS (
        SELECT 1 FROM purposes s
        WHERE s.episode_id = f.episode_id AND s.purpose = f.purpose AND s.failed = false
          AND (s.call > f.call OR (s.call = f.call AND s.place > f.place))
    ) AS again
    FROM purposes f
),
used AS (
    SELECT episode_id, count(*) AS tool_calls, count(*) FILTER (kind = 'shell') AS shell_calls,
           count(*) FILTER (failed) AS failed_calls, count(*) FILTER (failed AND again) AS recovered_calls
    FROM recovered GROUP BY episode_id
),
covered AS (
    SELECT o.episode_id, count(DISTINCT o.tool) AS tools_offered, count(DISTINCT c.tool) AS tools_used
    FROM tools_offered o LEFT JOIN tool_calls c ON c.episode_id = o.episode_id AND c.tool = o.tool
    GROUP BY o.episode_id
),
ends AS (
    SELECT episode_id, max((call, place, part)) FILTER (writes AND failed IS DISTINCT FROM true) AS last_write,
           max((call, place, part)) FILTER (checks AND failed IS DISTINCT FROM true) AS last_check,
           count(*) FILTER (writes AND failed IS DISTINCT FROM true) AS writes
    FROM tool_steps GROUP BY episode_id
)
SELECT e.episode_id, e.purpose, e.cell, e.iteration, e.benchmark, e.harness, e.task_id, e.kind, e.passed,
       coalesce(v.tools_offered, 0) AS tools_offered, coalesce(v.tools_used, 0) AS tools_used,
       v.tools_used / nullif(v.tools_offered, 0) AS tool_coverage,
       coalesce(u.tool_calls, 0) AS tool_calls, coalesce(u.shell_calls, 0) AS shell_calls,
       u.shell_calls / nullif(u.tool_calls, 0) AS shell_share,
       coalesce(u.failed_calls, 0) AS failed_calls, coalesce(u.recovered_calls, 0) AS recovered_calls,
       u.recovered_calls / nullif(u.failed_calls, 0) AS error_recovery,
       coalesce(n.writes, 0) AS writes,
       CASE WHEN n.last_write IS NOT NULL THEN coalesce(n.last_check > n.last_write, false) END AS self_verified
FROM episodes e
LEFT JOIN used u USING (episode_id)
LEFT JOIN covered v USING (episode_id)
LEFT JOIN ends n USING (episode_id)
""",
    # The same over the episodes of a cell: coverage is their mean, the others are counts over counts.
    "behaviour_by_cell": """
SELECT purpose, cell, iteration, benchmark, harness, count(*) AS episodes, sum(tool_calls)::BIGINT AS tool_calls,
       avg(tool_coverage) AS tool_coverage,
       count(*) FILTER (self_verified) / nullif(count(self_verified), 0) AS self_verification,
       sum(recovered_calls) / nullif(sum(failed_calls), 0) AS error_recovery,
       sum(shell_calls) / nullif(sum(tool_calls), 0) AS shell_share
FROM behaviour
GROUP BY purpose, cell, iteration, benchmark, harness
ORDER BY purpose, benchmark, cell, iteration
""",
}
