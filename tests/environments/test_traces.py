"""`openforge export claweval`: traces that the format's own reader takes, and that grade to the same score again.

The reader and the grader are the stand-in package's (samples/), whose events refuse unknown members.
"""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import made_run
import pytest

from openforge import cli, tables
from openforge.environments.claw_eval import checkout, traces

CHECKOUT = Path(__file__).parent / "samples" / "claweval_checkout"
# What `claw-eval grade` does: read the events by type, load the task's grader, grade.
GRADE = """
import importlib.util, json, sys
from pathlib import Path
root, folder, file = map(Path, sys.argv[1:])
sys.path.insert(0, str(root / "src"))
sys.dont_write_bytecode = True
from claw_eval.models import trace
from claw_eval.models.task import TaskDefinition
kinds = {c.model_fields["type"].default: c for c in vars(trace).values()
         if isinstance(c, type) and issubclass(c, trace.Event) and c is not trace.Event}
events = [kinds[json.loads(line)["type"]].model_validate_json(line) for line in file.read_text().splitlines()]
of = lambda kind: [e for e in events if e.type == kind]
spec = importlib.util.spec_from_file_location("grader", folder / "grader.py")
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
audit = {e.service_name: e.audit_data for e in of("audit_snapshot")}
task = TaskDefinition.from_yaml(folder / "task.yaml")
scores = module.InvoiceGrader().grade(of("message"), of("tool_dispatch"), task, audit)
print(json.dumps([[e.type for e in events], scores.completion, scores.robustness, scores.safety]))
"""


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with three trials of one task: solved, half done, and one whose sandbox was lost."""
    root = tmp_path / "project"
    (root / "config").mkdir(parents=True)
    (root / "Snakefile").touch()
    monkeypatch.chdir(root)
    run = root / "results" / made_run.RUN
    task = checkout.read_task(CHECKOUT / "tasks" / "T001zh_invoice_reply", "claw-eval")
    rollouts = [made_run.rollout(task, "eval", "test", None, i) | {"policy": "http://x/v1#m"} for i in range(3)]
    ends = ("completed", "completed", "sandbox_lost")
    episodes = [made_run.episode(r, status, turns=2) for r, status in zip(rollouts, ends, strict=True)]
    dispatches = [
        dispatch("mail_list", {}, 200, {"messages": []}),
        dispatch("mail_send", {"to": "billing@vendor.example", "body": "INV-77"}, 200, {"status": "sent"}),
    ]
    sent = [{"to": "billing@vendor.example", "body": "INV-77"}]
    line = {"passed": True, "communication": 0.0, "robustness": 1.0, "safety": 1.0, "judge_calls": []}
    episodes[0] |= {
        "verifier_output": json.dumps(line | {"score": 1.0, "task_score": 1.0, "completion": 1.0}),
        "dispatches": dispatches,
        "audit": json.dumps({"mail": {"calls": [], "sent": sent}, "todo": {"calls": []}}),
    }
    episodes[1] |= {
        "verifier_output": json.dumps(line | {"score": 0.36, "passed": False, "completion": 0.2}),
        "dispatches": dispatches[:1],
        "audit": json.dumps({"mail": {"calls": [], "sent": []}}),
        "status": "agent_timeout",
    }
    calls = [made_run.call(e, i) for e in episodes[:2] for i in range(2)]
    for call in calls:
        call["tools_sha256"], call["system_sha256"] = "tools", "system"
    title = made_run.call(episodes[0], 2) | {"prefix_of": None, "messages": '[{"role": "user", "content": "title?"}]'}

    def write(table: str, rows: list[dict[str, Any]], shard: int | None = None) -> None:
        tables.write_table(run / tables.partition_path(table, "eval", "test", None, shard), tables.TABLES[table], rows)

    write("rollouts", rollouts)
    write("episodes", episodes, 1)
    write("calls", [*calls, title], 1)
    blob = {"sha256": "system", "mime": "text/plain", "width": None, "height": None, "bytes": b"Be brief."}
    write("blobs", [blob], 1)
    write("scores", [made_run.score(e, 1.0) for e in episodes])
    return run


def dispatch(tool: str, arguments: Any, status: int, response: Any) -> dict[str, Any]:
    return {
        "tool": tool,
        "endpoint": "http://localhost:9100/x",
        "arguments": json.dumps(arguments),
        "status": status,
        "response": json.dumps(response),
        "latency": 0.125,
        "time": "2026-01-02T03:04:06+00:00",
    }


def exported(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], *more: str) -> Path:
    assert cli.main(["export", "claweval", run_dir.name, str(tmp_path / "out"), *more]) == 0
    (folder,) = (tmp_path / "out").iterdir()
    assert capsys.readouterr().out == f"{folder}: 3 traces\n"
    return folder


def test_traces_are_read_and_graded_again_to_the_same_score(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = exported(run_dir, tmp_path, capsys)
    assert folder.name == "http_x_v1_m_mini_swe_agent_26-01-02-03-04"
    results = json.loads((folder / "batch_results.json").read_text())
    files = [t["trace"] for t in results[0]["trials"] if "trace" in t]
    assert len(list(folder.glob("T001zh_invoice_reply_*.jsonl"))) == 3 and len(files) == 2
    expected = [
        (["tool_dispatch"] * 2 + ["audit_snapshot"] * 2, 1.0),
        (["tool_dispatch", "audit_snapshot"], 0.2),
    ]
    for file, (middle, completion) in zip(files, expected, strict=True):
        task = CHECKOUT / "tasks" / "T001zh_invoice_reply"
        command = [sys.executable, "-c", GRADE, str(CHECKOUT), str(task), file]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        types = ["trace_start", *["message"] * 4, *middle, "trace_end", "grading_result"]
        assert json.loads(done.stdout) == [types, completion, 1.0, 1.0]


def test_a_trace_says_what_the_episode_s_row_says(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = exported(run_dir, tmp_path, capsys, "--cell", "test")
    trial = json.loads((folder / "batch_results.json").read_text())[0]["trials"][1]
    events = [json.loads(line) for line in Path(trial["trace"]).read_text().splitlines()]
    start, end, grading = events[0], events[-2], events[-1]
    assert (start["task_id"], start["model"]) == ("T001zh_invoice_reply", "http://x/v1#m")
    assert start["timestamp"] == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC).isoformat()
    said = [(e["message"]["role"], e["message"]["content"][0]["text"]) for e in events if e["type"] == "message"]
    hostile = made_run.HOSTILE
    # The main thread: the system's text, what each call added, the last answer. The title's call is not in it.
    assert said == [
        ("system", "Be brief."),
        ("user", f"message 0 {hostile}"),
        ("user", f"message 1 {hostile}"),
        ("assistant", f"answer 1 {hostile}"),
    ]
    (called,) = [e for e in events if e["type"] == "tool_dispatch"]
    assert (called["request_body"], called["response_body"]) == ({}, {"messages": []})
    assert called["latency_ms"] == 125.0
    (audit,) = [e for e in events if e["type"] == "audit_snapshot"]
    assert (audit["service_name"], audit["audit_url"]) == ("mail", "http://localhost:9100/mail/audit")
    # 2 turns of 10 and 3 tokens; 2 s of the agent of which two calls of 0.25 s and one tool's 0.125 s.
    told = {
        "total_turns": 2,
        "model_input_tokens": 20,
        "model_output_tokens": 6,
        "total_tokens": 26,
        "model_time_s": 0.5,
        "tool_time_s": 0.125,
        "other_time_s": 1.375,
        "wall_time_s": 2.0,
        "task_score": 0.36,
        "passed": False,
        "failure_modes": ["agent_timeout"],
    }
    assert {k: end[k] for k in told} == told
    assert (grading["task_score"], grading["passed"], grading["scores"]["completion"]) == (0.36, False, 0.2)


def test_batch_results_count_as_claweval_s_do(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (result,) = json.loads((exported(run_dir, tmp_path, capsys) / "batch_results.json").read_text())
    trials = result.pop("trials")
    # Two trials are left, scores 1.0 and 0.36: mean 0.68, one of two passed, (1/2)^2.
    assert result == {
        "task_id": "T001zh_invoice_reply",
        "task_name": "回复发票邮件",
        "difficulty": "medium",
        "error": None,
        "avg_score": pytest.approx(0.68),
        "pass_at_1": 0.5,
        "pass_hat_k": 0.25,
        "avg_passed": False,
    }
    assert trials[2] == {
        "trial": 2,
        "error": f"it ended {made_run.HOSTILE}",
        "task_score": 0.0,
        "passed": False,
    }
    assert (trials[0]["tokens"], trials[0]["completion"], trials[0]["passed"]) == (26, 1.0, True)
    assert traces.result("t", {}, [trials[2]])["error"] == trials[2]["error"]


def test_nothing_is_overwritten_and_an_unknown_cell_is_one_sentence(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = exported(run_dir, tmp_path, capsys)
    assert cli.main(["export", "claweval", run_dir.name, str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == f"error: {folder} exists already; name another folder, or remove it\n"
    assert cli.main(["export", "claweval", run_dir.name, str(tmp_path / "b"), "--cell", "no"]) == 2
    assert "run made has no episodes of cell 'no' of environment claw_eval; its cells: test" in capsys.readouterr().err
    assert cli.main(["export", "claweval", "nosuch", str(tmp_path / "b")]) == 2
