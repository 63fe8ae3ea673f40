"""report/index.html and the pages of its trajectories: offline, no script, what agents wrote escaped."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from openforge import store
from openforge.config import EvalConfig, RunConfig
from openforge.config_docs import flatten
from openforge.eval.evaluate import NO_POLICY
from openforge.report import charts
from openforge.report.summary import GREEDY, SAMPLED, summary
from openforge.report.trajectories import chosen, trajectory
from openforge.rollout.status import ENDS
from openforge.samples.reasons import meaning
from openforge.tables import write_beside

HERE = Path(__file__).parent


def write_report(run_dir: Path, config: RunConfig | EvalConfig, root: Path) -> dict[str, Any]:
    """Write summary.json, report/episodes/*.html and, last, report/index.html; returns the summary.

    Raises:
        ReportError, StoreError: see `openforge.report.summary`.
    """
    figures = summary(run_dir, config, root)
    write_beside(run_dir / "summary.json", json.dumps(figures, indent=1) + "\n")
    env = _environment()
    with store.reader(run_dir) as tables:
        episodes = chosen(tables)
        _write_trajectories(run_dir, env, tables, [e["episode_id"] for e in episodes])
        kinds = _kinds(tables, figures)
        behaviour = tables.rows("SELECT * FROM behaviour_by_cell WHERE tool_calls > 0")
    text = env.get_template("index.html.jinja").render(
        run=run_dir.name,
        summary=figures,
        headline=_headline(figures),
        curve=_curve(figures),
        kinds=kinds,
        cells=_cells(figures),
        matrix=_matrix(figures),
        behaviour=behaviour,
        time=_time(figures),
        statuses=_statuses(figures),
        fates=[_fates(figures, what) for what in ("episodes", "groups", "calls")],
        episodes=episodes,
        config=flatten(config.model_dump(mode="json")),
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
    write_beside(run_dir / "report" / "index.html", text)
    return figures


def _write_trajectories(run_dir: Path, env: jinja2.Environment, tables: store.Reader, episode_ids: list[str]) -> None:
    """Write the pages of these episodes and remove those of an earlier report."""
    folder = run_dir / "report" / "episodes"
    template = env.get_template("episode.html.jinja")
    for episode_id in episode_ids:
        text = template.render(run=run_dir.name, **trajectory(tables, episode_id))
        write_beside(folder / f"{episode_id}.html", text)
    for old in folder.glob("*.html"):
        if old.stem not in episode_ids:
            old.unlink()


def _environment() -> jinja2.Environment:
    env = jinja2.Environment(
        # By file name it would escape .html only; agents' output is hostile.
        autoescape=True,
        loader=jinja2.FileSystemLoader(HERE),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.globals["style"] = Markup((HERE / "style.css").read_text())
    env.filters["number"] = lambda v, digits=3: "–" if v is None else f"{v:.{digits}f}"
    env.filters["seconds"] = _duration
    return env


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


def _headline(figures: Mapping[str, Any]) -> list[dict[str, Any]]:
    """(name, before, after) of the held-out figures that both checkpoints have."""
    held = figures.get("heldout", {"before": {}, "after": {}})
    names = {"pass_at_1": "pass@1 at temperature 1", "greedy": "pass@1 greedy", "pass_at_8": "pass@8"}
    rows = []
    for key, name in names.items():
        before, after = held["before"].get(key), held["after"].get(key)
        if before or after:
            rows.append({"name": name, "before": before, "after": after})
    return rows


def _curve(figures: Mapping[str, Any]) -> Markup:
    points = [
        charts.Point(r["iteration"], r["p"], r["low"], r["high"])
        for r in figures["learning_curve"]
        if r["p"] is not None
    ]
    return charts.curve(points, "Mean reward of training episodes by iteration, with 95 % intervals")


def _kinds(tables: store.Reader, figures: Mapping[str, Any]) -> list[dict[str, Any]]:
    """pass@1 by kind, before and after: of the cell `heldout`, else of a cell that has the kind."""
    sql = "SELECT DISTINCT tags[1] AS kind FROM rollouts WHERE purpose = 'train'"
    trained = {r["kind"] for r in tables.rows(sql)}
    cells = figures["cells"]
    rows: dict[str, dict[str, Any]] = {}
    for cell in sorted(cells, key=lambda c: (c != SAMPLED, c == GREEDY)):
        before, after = _ends(cells[cell], training="heldout" in figures)
        for kind in before | after:
            b, a = before.get(kind), after.get(kind)
            row = {
                "kind": kind,
                "cell": cell,
                "n": (after | before)[kind]["n"],
                "before": b,
                "after": a,
                "chart": charts.dumbbell(_point(b), _point(a), f"pass@1 of {kind} before and after"),
                "new": bool(trained) and kind not in trained,
            }
            rows.setdefault(kind, row)
    return [rows[kind] for kind in sorted(rows)]


def _ends(by_iteration: Mapping[str, Any], training: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """by_kind of a cell at checkpoint 0 and at the last one.

    Checkpoint 0 of a training run is `before` even while it stands alone; a suite has no before.
    """
    *_, latest = by_iteration
    before = by_iteration["0"]["by_kind"] if training and "0" in by_iteration else {}
    after = {} if training and latest == "0" else by_iteration[latest]["by_kind"]
    return before, after


def _point(figure: Mapping[str, Any] | None) -> charts.Point | None:
    return _at(figure) if figure else None


def _cells(figures: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [result for by_iteration in figures["cells"].values() for result in by_iteration.values()]


def _matrix(figures: Mapping[str, Any]) -> list[tuple[str, Markup]]:
    """A chart of pass@1 by harness and checkpoint for each suite; none for a single evaluation of it."""
    found: dict[str, list[tuple[str, charts.Point]]] = {}
    for r in _cells(figures):
        name = r["harness"] if r["policy"] == NO_POLICY else f"{r['harness']} · {r['policy'].rpartition('/')[2]}"
        # Two cells of one harness differ in something that their names tell.
        cell = r["cell"].partition(".")[0]
        found.setdefault(r["benchmark"], []).append((name if cell in name else f"{cell}: {name}", _at(r)))
    label = "pass@1 by harness and checkpoint, with intervals"
    return [(suite, charts.ranges(rows, label)) for suite, rows in found.items() if len(rows) > 1]


def _at(figure: Mapping[str, Any]) -> charts.Point:
    return charts.Point(0, figure["p"], figure["low"], figure["high"])


def _time(figures: Mapping[str, Any]) -> Markup:
    parts = sorted(figures["seconds_by_part"].items(), key=lambda x: -x[1])
    return charts.bars([(name, s, _duration(s)) for name, s in parts], "Seconds by stage, summed over jobs")


def _statuses(figures: Mapping[str, Any]) -> list[dict[str, Any]]:
    by = figures["statuses"]
    found = {s for statuses in by.values() for s in statuses}
    known = [s for s in ENDS if s in found] + sorted(found - set(ENDS))
    return [
        {
            "status": s,
            "meaning": ENDS[s].meaning if s in ENDS else "",
            "train": by.get("train", {}).get(s, 0),
            "eval": by.get("eval", {}).get(s, 0),
        }
        for s in known
    ]


def _fates(figures: Mapping[str, Any], what: str) -> dict[str, Any]:
    """What became of an iteration's training episodes (or groups, or calls): trained, or left out for which reason.

    Reasons by how often they came; `rows` hold iteration, total, trained and a count a reason, the last one their sums.
    """
    counted = {k: r[what] for k, r in figures["samples_by_iteration"].items() if what in r}
    reasons = Counter[str]()
    for c in counted.values():
        reasons.update(c["dropped"])
    names = [name for name, _ in reasons.most_common()]
    rows = [[k, c["total"], c["trained"], *(c["dropped"].get(n, 0) for n in names)] for k, c in counted.items()]
    sums = ["all", *(sum(column) for column in zip(*(r[1:] for r in rows), strict=True))]
    return {
        "what": what,
        "reasons": names,
        "meanings": [(n, meaning(n)) for n in names if meaning(n)],
        "rows": [*rows, sums] if len(rows) > 1 else rows,
    }
