"""The view of calls of tasks' own tools, on a hand-made run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import made_run

from openforge import store
from openforge import tables as t


def dispatch(tool: str, status: int, second: int, **arguments: str) -> dict[str, object]:
    return {
        "tool": tool,
        "endpoint": f"http://localhost:9100/{tool}",
        "arguments": json.dumps(arguments),
        "status": status,
        "response": '"gone"' if status >= 400 else '{"id": 2}',
        "latency": 0.25,
        "time": f"2026-11-30T10:00:0{second}+00:00",
    }


def test_each_call_is_a_row_in_its_order(tmp_path: Path) -> None:
    run_dir = made_run.make(tmp_path / "results")
    path = run_dir / t.partition_path("episodes", "train", "train", 2, 1)
    first, second, *rest = t.read_rows(path, t.EPISODES)
    first["dispatches"] = [dispatch("mail_add", 500, 1, text="é"), dispatch("mail_add", 200, 2, text="é")]
    second["dispatches"] = []
    t.write_table(path, t.EPISODES, [first, second, *rest])
    rows = store.rows(
        run_dir,
        "SELECT dispatch, tool, status, is_error, arguments->>'$.text' AS text, time::VARCHAR AS time, latency "
        f"FROM dispatches WHERE episode_id = '{first['episode_id']}' ORDER BY dispatch",
    )
    assert [tuple(r.values()) for r in rows] == [
        (0, "mail_add", 500, True, "é", "2026-11-30 10:00:01+00", 0.25),
        (1, "mail_add", 200, False, "é", "2026-11-30 10:00:02+00", 0.25),
    ]
    assert store.rows(run_dir, "SELECT count(*) AS n FROM dispatches") == [{"n": 2}]
    # The older client reads it too.
    done = subprocess.run(
        [
            Path(sys.executable).parent / "duckdb",
            "-readonly",
            "-csv",
            "-noheader",
            str(run_dir / store.STORE),
            "SELECT count(*) FROM dispatches",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "2"
