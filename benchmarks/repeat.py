"""How far two results folders of the same configuration and seeds are the same, table by table, timing columns apart.

    python benchmarks/repeat.py results/a results/b --json out.json

`rows` counts the rows of the first folder, `same` those that the second has too; a column that differs is counted under
`differ`. Names that hold the weights' digest differ wherever weights do.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from openforge import tables

# What a clock or a machine says, and no seed could repeat.
TIMING = {
    "episodes": {"seconds", "started", "isolation"},
    "calls": {"arrived", "latency"},
    "scores": {"scored_at"},
}
TIMED_METRICS = ("timing/", "perf/")


def rows_of(run: Path, table: tables.Table) -> dict[str, dict[str, Any]]:
    """Rows by position: their partition and what identifies them in it."""
    found: dict[str, dict[str, Any]] = {}
    for file in sorted(run.glob(f"{table.name}/**/{table.name}.parquet")) or sorted(run.glob(f"{table.name}.parquet")):
        counts: Counter[str] = Counter()
        for row in tables.read_rows(file, table):
            if table.name == "metrics" and row["name"].startswith(TIMED_METRICS):
                continue
            names = ("rollout_id", "episode_id", "attempt", "call", "task_id", "step", "name", "sha256")
            key = "/".join(str(row[n]) for n in names if n in row)
            counts[key] += 1
            where = file.parent.relative_to(run)
            dropped = TIMING.get(table.name, set())
            found[f"{where}/{key}/{counts[key]}"] = {k: v for k, v in row.items() if k not in dropped}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs=2, type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    out: dict[str, Any] = {}
    for table in tables.TABLES.values():
        a, b = (rows_of(run, table) for run in args.runs)
        differ: Counter[str] = Counter()
        for key in a.keys() & b.keys():
            differ.update(c for c in a[key] if a[key][c] != b[key][c])
        same = sum(a[k] == b.get(k) for k in a)
        out[table.name] = {"rows": len(a), "same": same, "only_in_one": len(a.keys() ^ b.keys()), "differ": differ}
    cards = [
        {f.parent.name: json.loads(f.read_text())["sha256"] for f in sorted(run.glob("checkpoints/*/checkpoint.json"))}
        for run in args.runs
    ]
    out["checkpoints"] = {k: cards[0][k] == cards[1].get(k) for k in cards[0]}
    text = json.dumps(out, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
