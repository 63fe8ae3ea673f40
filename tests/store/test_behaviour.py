"""Measures of behaviour on episodes written by hand, with values counted by hand."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import made_run
import pytest

from openforge import store
from openforge import tables as t
from openforge.behaviour import FAILED

Json = dict[str, Any]


def tool(name: str) -> Json:
    return {"type": "function", "function": {"name": name, "parameters": {}}}


class Episode:
    """An episode whose agent makes one call a turn; each step is (tool, arguments, result)."""

    def __init__(self, task_id: str, harness: str, steps: list[tuple[str, Any, str | None]], offered: list[str],
                 own: list[str] = ()) -> None:  # fmt: skip
        raw = made_run.task(task_id, "copy", "heldout")
        payload = json.dumps({"tools": [{"name": n} for n in own]})
        self.rollout = {**made_run.rollout(raw, "eval", "c", None, 0), "payload": payload, "harness": harness}
        self.episode = {**made_run.episode(self.rollout, "completed"), "harness": harness}
        tools = json.dumps([tool(n) for n in offered]).encode()
        self.blob = {"sha256": hashlib.sha256(tools).hexdigest(), "mime": "application/json", "width": None,
                     "height": None, "bytes": tools}  # fmt: skip
        self.calls = []
        new: list[Json] = [{"role": "user", "content": "do it"}]
        for i, (name, arguments, result) in enumerate(steps):
            text = arguments if isinstance(arguments, str) else json.dumps(arguments)
            made = {"id": f"id{i}", "type": "function", "function": {"name": name, "arguments": text}}
            self.add(new, {"role": "assistant", "content": None, "tool_calls": [made]}, bool(offered))
            new = [] if result is None else [{"role": "tool", "tool_call_id": f"id{i}", "content": result}]
        self.add(new, {"role": "assistant", "content": "I am done."}, bool(offered))

    def add(self, messages: list[Json], response: Json, tools: bool) -> None:
        row = made_run.call(self.episode, len(self.calls))
        self.calls.append(
            row
            | {
                "messages": json.dumps(messages),
                "response": json.dumps(response),
                "tools_sha256": self.blob["sha256"] if tools else None,
            }
        )


def run(folder: Path, *episodes: Episode) -> Path:
    run_dir = folder / "results" / "eval_x"

    def write(table: t.Table, rows: list[Json], shard: int | None = None) -> None:
        t.write_table(run_dir / t.partition_path(table.name, "eval", "c", None, shard), table, rows)

    write(t.ROLLOUTS, [e.rollout for e in episodes])
    write(t.EPISODES, [e.episode for e in episodes], 1)
    write(t.CALLS, [c for e in episodes for c in e.calls], 1)
    write(t.BLOBS, [e.blob for e in episodes], 1)
    write(t.SCORES, [made_run.score(e.episode, 1.0) for e in episodes])
    return run_dir


def measured(folder: Path, *episodes: Episode) -> list[Json]:
    rows = store.rows(run(folder, *episodes), "select * from behaviour")
    by_task = {r["task_id"]: r for r in rows}
    return [by_task[e.rollout["task_id"]] for e in episodes]


def test_one_episode_counted_by_hand(tmp_path: Path) -> None:
    """Offered 4 tools, used 3; 5 calls, 3 of the shell; 2 failed, one of which succeeded later; checked at its end."""
    steps = [
        ("bash", {"command": "cat missing.txt"}, "cat: missing.txt\n\nCommand exited with code 1"),
        ("read", {"path": "a.txt"}, "one"),
        ("bash", {"command": "python3 sum.py"}, "Traceback\nCommand exited with code 1"),
        ("write", {"path": "b.txt", "content": "1"}, "Successfully wrote 1 bytes"),
        ("bash", {"command": "cd out && cat b.txt"}, "1"),
    ]
    (got,) = measured(tmp_path, Episode("x", "pi", steps, ["read", "bash", "edit", "write"]))
    assert (got["tools_offered"], got["tools_used"], got["tool_coverage"]) == (4, 3, 0.75)
    assert (got["tool_calls"], got["shell_calls"], got["shell_share"]) == (5, 3, 0.6)
    # cat failed and later succeeded; python3 never did.
    assert (got["failed_calls"], got["recovered_calls"], got["error_recovery"]) == (2, 1, 0.5)
    assert (got["writes"], got["self_verified"], got["passed"]) == (1, True, True)


@pytest.mark.parametrize(
    ("steps", "verified"),
    [
        # Read before the write, not after it.
        ([("read", {"path": "a"}, "x"), ("write", {"path": "a"}, "ok")], False),
        ([("write", {"path": "a"}, "ok"), ("read", {"path": "a"}, "x")], True),
        # The look back failed.
        ([("write", {"path": "a"}, "ok"), ("read", {"path": "a"}, "Error: no such file")], False),
        # One line that writes, and then looks.
        ([("bash", {"command": "echo 1 > a; cat a"}, "1")], True),
        ([("bash", {"command": "cat b > a"}, "")], False),
        ([("bash", {"command": "sed -i s/a/b/ f && git diff"}, "")], True),
        ([("bash", {"command": "grep -q x f && sed -i s/x/y/ f"}, "")], False),
        # Nothing was written: there is nothing to verify.
        ([("bash", {"command": "ls 2>/dev/null"}, ""), ("bash", {"command": "wc -l a 2>&1"}, "3")], None),
        # A write that failed is none.
        ([("write", {"path": "/etc/a"}, "Error: not allowed")], None),
        ([("bash", {"command": "FOO=1 python3 fix.py"}, ""), ("edit", {"path": "a"}, "ok"),
          ("bash", {"command": "python3 -m pytest -q"}, "1 failed\nCommand exited with code 1"),
          ("bash", {"command": "pytest -q"}, "2 passed")], True),
    ],
)  # fmt: skip
def test_self_verification(tmp_path: Path, steps: list[Any], verified: bool | None) -> None:
    (got,) = measured(tmp_path, Episode("x", "pi", steps, ["read", "bash", "edit", "write"]))
    assert got["self_verified"] is verified


def test_the_same_behaviour_in_the_words_of_other_harnesses(tmp_path: Path) -> None:
    """Each fails to list, then lists, writes and looks at a file: 4 calls, 1 of 1 recovered, verified."""

    def script(name: str, key: str, failure: str, wrap: Any = lambda c: c) -> list[tuple[str, Any, str | None]]:
        lines = [("ls nowhere", failure), ("ls", "a"), ("echo 1 > b", ""), ("cat b", "1")]
        return [(name, {key: wrap(line)}, result) for line, result in lines]

    episodes = [
        Episode("claude", "claude_code", script("Bash", "command", "Exit code 2\nls: no such file"), ["Bash", "Read"]),
        Episode("codex", "codex", script("exec_command", "cmd", "Process exited with code 2"), ["exec_command"]),
        Episode("old", "codex", script("shell", "command", '{"output":"","metadata":{"exit_code":2}}',
                lambda c: ["bash", "-lc", c]), ["shell", "apply_patch"]),
        Episode("qwen", "qwen_code", script("run_shell_command", "command", "Command: ls\nExit Code: 2"),
                ["run_shell_command"]),
        Episode("mini", "mini_swe_agent", script("bash", "command", '{"returncode": 2, "output": "no"}'), ["bash"]),
    ]  # fmt: skip
    for got in measured(tmp_path, *episodes):
        assert (got["tool_calls"], got["shell_share"]) == (4, 1.0), got["task_id"]
        assert (got["failed_calls"], got["recovered_calls"]) == (1, 1), got["task_id"]
        assert (got["writes"], got["self_verified"]) == (1, True), got["task_id"]
    (all_of_them,) = store.rows(tmp_path / "results" / "eval_x", "select count(*) n from behaviour_by_cell")
    assert all_of_them["n"] == 4  # claude_code, codex, qwen_code, mini_swe_agent


def test_a_tasks_own_tools_however_a_harness_calls_them(tmp_path: Path) -> None:
    own = ["mail_list", "mail_send", "notes_add"]
    mcp = [
        ("mcp__claw__mail_send", {"to": "x"}, "Error: unknown recipient"),
        ("mcp__claw__mail_send", {"to": "a@b"}, "sent"),
        ("mcp__claw__mail_list", {}, "[]"),
    ]
    offered = ["Bash", *(f"mcp__claw__{n}" for n in own)]
    command = [
        ("bash", {"command": 'tool mail_send \'{"to": "x"}\''}, "Error: unknown recipient"),
        ("bash", {"command": 'tool mail_send \'{"to": "a@b"}\''}, "sent"),
        ("bash", {"command": "tool mail_list '{}'"}, "[]"),
    ]
    by_mcp, by_command = measured(
        tmp_path, Episode("a", "claude_code", mcp, offered, own), Episode("b", "pi", command, ["bash"], own)
    )
    for got in (by_mcp, by_command):
        # bash and three of the task's are offered, two of the task's used; none of the calls is a generic shell's.
        assert (got["tools_offered"], got["tools_used"], got["shell_share"]) == (4, 2, 0.0)
        assert (got["failed_calls"], got["recovered_calls"], got["self_verified"]) == (1, 1, True)


def test_a_services_own_answer_counts_more_than_its_words(tmp_path: Path) -> None:
    steps = [("mcp__claw__mail_send", {"to": "x"}, "no"), ("mcp__claw__mail_send", {"to": "y"}, "error: of the past")]
    made = Episode("a", "claude_code", steps, ["mcp__claw__mail_send"], ["mail_send"])
    made.episode["dispatches"] = [
        {"tool": "mail_send", "endpoint": "http://localhost:1/mail/send", "arguments": "{}", "status": status,
         "response": "{}", "latency": 0.1, "time": "2026-01-01T00:00:00Z"}
        for status in (500, 200)
    ]  # fmt: skip
    (got,) = measured(tmp_path, made)
    assert (got["failed_calls"], got["recovered_calls"]) == (1, 1)


def test_commands_in_an_answers_text(tmp_path: Path) -> None:
    """mini-swe-agent's text mode: no tools are declared, a block or a line is the command."""
    made = Episode("x", "mini_swe_agent", [], [])
    made.calls = []
    made.add([{"role": "user", "content": "do"}], {"role": "assistant", "content": "cat a"}, False)
    text = "I write.\n```mswea_bash_command\necho 1 > b\n```"
    made.add([{"role": "user", "content": "<returncode>1</returncode>"}], {"role": "assistant", "content": text}, False)
    made.add([{"role": "user", "content": "<returncode>0</returncode>"}],
             {"role": "assistant", "content": "cat b"}, False)  # fmt: skip
    (got,) = measured(tmp_path, made)
    assert (got["tool_calls"], got["shell_calls"], got["tools_offered"]) == (3, 3, 0)
    assert (got["failed_calls"], got["recovered_calls"]) == (1, 0)
    assert (got["writes"], got["self_verified"], got["tool_coverage"]) == (1, True, None)


def test_without_a_denominator_there_is_no_measure(tmp_path: Path) -> None:
    quiet = Episode("x", "pi", [], ["bash"])
    broken = Episode("y", "pi", [("bash", '{"command": "ls', "Error: no JSON"), ("bash", "{}", None)], ["bash"])
    silent, bad = measured(tmp_path, quiet, broken)
    assert (silent["tool_calls"], silent["shell_share"], silent["error_recovery"]) == (0, None, None)
    assert (silent["self_verified"], silent["tool_coverage"]) == (None, 0.0)
    assert (bad["tool_calls"], bad["shell_calls"], bad["failed_calls"], bad["recovered_calls"]) == (2, 2, 1, 0)


def test_calls_that_no_harness_took_do_not_count(tmp_path: Path) -> None:
    made = Episode("x", "pi", [("bash", {"command": "ls"}, "a"), ("bash", {"command": "ls"}, "a")], ["bash"])
    made.calls[1]["delivery"] = "sent"
    (got,) = measured(tmp_path, made)
    assert got["tool_calls"] == 1


def test_what_is_no_json_counts_for_nothing(tmp_path: Path) -> None:
    made = Episode("x", "mini_swe_agent", [("bash", {"command": "ls"}, "a")], ["bash"])
    made.calls[0]["messages"] = "no json"
    made.calls[1]["response"] = "{"
    made.rollout["payload"] = "none"
    bad = Episode("y", "pi", [("bash", {"command": "ls"}, "a")], ["read"])
    bad.blob["bytes"] = b"\xff no json"
    got, other = measured(tmp_path, made, bad)
    assert (got["tool_calls"], got["tools_offered"]) == (1, 1)
    assert (other["tool_calls"], other["tools_offered"]) == (1, 0)


def test_the_means_of_a_cell(tmp_path: Path) -> None:
    one = Episode("a", "pi", [("write", {"path": "a"}, "ok"), ("read", {"path": "a"}, "x")], ["read", "write"])
    two = Episode("b", "pi", [("bash", {"command": "echo 1 > a"}, ""), ("bash", {"command": "nope"},
                  "Command exited with code 127")], ["bash", "read"])  # fmt: skip
    three = Episode("c", "pi", [], ["bash", "read"])
    run_dir = run(tmp_path, one, two, three)
    (got,) = store.rows(run_dir, "select * from behaviour_by_cell")
    assert (got["episodes"], got["tool_calls"]) == (3, 4)
    assert got["tool_coverage"] == pytest.approx((1 + 0.5 + 0) / 3)
    assert (got["self_verification"], got["error_recovery"], got["shell_share"]) == (0.5, 0.0, 0.5)


def test_an_older_client_reads_the_same(tmp_path: Path) -> None:
    steps = [("bash", {"command": "echo 1 > a; cat a"}, "1"), ("bash", {"command": "nope"}, "Exit code 127")]
    run_dir = run(tmp_path, Episode("x", "pi", steps, ["bash", "read"]))
    sql = "select tool_coverage, self_verified, error_recovery, shell_share from behaviour"
    ours = store.rows(run_dir, sql)
    command = [Path(sys.executable).parent / "duckdb", "-readonly", "-json", run_dir / store.STORE, sql]
    done = subprocess.run(command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
    assert json.loads(done.stdout) == ours
    assert ours == [{"tool_coverage": 0.5, "self_verified": True, "error_recovery": 0.0, "shell_share": 1.0}]


@pytest.mark.parametrize(
    ("result", "failed"),
    [
        ("Exit code: 0\nWall time: 0.1 seconds\nOutput:\nexit", False),
        ("Process exited with code 0", False),
        ('{"returncode": 0, "output": "errors: none"}', False),
        ("the word error stands in a file", False),
        ("(Command exited with code 1)", True),
        ('{"content": [], "isError": true}', True),
        ('{"error": "there is no such message"}', True),
        ("<tool_use_error>File has not been read yet</tool_use_error>", True),
        ("Command: x\nExit Code: -9", True),
    ],
)
def test_what_is_a_failure(tmp_path: Path, result: str, failed: bool) -> None:
    (tmp_path / "r").mkdir()
    (row,) = store.rows(tmp_path / "r", f"select regexp_matches($${result}$$, '{FAILED}') as failed")
    assert row["failed"] is failed
