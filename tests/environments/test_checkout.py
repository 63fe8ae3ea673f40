"""ClawEval checkouts: a stand-in with every field of the format is read in place; what is wrong with one is named."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from openforge import tables
from openforge.config import Tasks
from openforge.environments.claw_eval import checkout, setup
from openforge.environments.claw_eval.keys import FolderError, Unsupported
from openforge.tasks import TasksError, raw_tasks, sources

SAMPLES = Path(__file__).parent / "samples"
CHECKOUT = SAMPLES / "claweval_checkout"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return Path(shutil.copytree(CHECKOUT, tmp_path / "checkout"))


def task(base: Path, name: str) -> dict[str, Any]:
    return checkout.read_task(base / "tasks" / name, "claw-eval")


def change(base: Path, name: str, **keys: Any) -> None:
    file = base / "tasks" / name / "task.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | keys, allow_unicode=True))


def test_a_checkout_is_a_source_whose_tasks_are_told_apart_by_what_they_need(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = raw_tasks(Tasks(source=str(base)), "claw_eval", tmp_path / "unused", tmp_path)
    assert [r["task_id"] for r in rows] == [
        "M002_logo",
        "T001zh_invoice_reply",
        "T002_invoice_reply",
        "T100_count_lines",
    ]
    assert {(r["split"], r["source"]) for r in rows} == {("test", "checkout")}
    tables.TASKS.arrow(rows)
    told = capsys.readouterr().err.splitlines()
    assert sorted(line.partition(" tasks are left out: ")[2] for line in told) == [
        "they need a judge, and none is configured",
        "they need a library of its grader (numpy)",
        "they need files that are not in the checkout (M001_video/fixtures/film.mp4)",
        "they need the live web",
    ]
    assert len(raw_tasks(Tasks(source=str(base)), "claw_eval", tmp_path / "u", tmp_path, {"judge"})) == 5
    assert len(raw_tasks(Tasks(source=str(base)), "claw_eval", tmp_path / "u", tmp_path, {"judge", "user"})) == 6


def test_services_tools_and_what_they_run_from_are_in_the_row(base: Path) -> None:
    row = task(base, "T002_invoice_reply")
    found = setup.of(row)
    mail, todo = found.services
    assert (mail.name, mail.command, mail.port) == ("mail", "python mock_services/mail/server.py", 9100)
    assert (mail.health_check, mail.health_check_method) == ("http://localhost:9100/mail/messages", "POST")
    assert mail.reset_endpoint == "http://localhost:9100/mail/reset"
    assert mail.env == {"MAIL_FIXTURES": "tasks/T002_invoice_reply/fixtures/mail/inbox.json"}
    # The format's 10 s are for an idle machine; both get a minute.
    assert (mail.ready_timeout, todo.ready_timeout) == (60.0, 60.0)
    assert todo.health_check_method == "POST" and todo.env["PORT"] == "9102"
    assert [(t.name, t.url, t.method) for t in found.tools] == [
        ("mail_list", "http://localhost:9100/mail/messages", "POST"),
        ("mail_send", "http://localhost:9100/mail/send", "POST"),
        ("todo_list", "http://localhost:9102/todo/tasks", "POST"),
    ]
    assert found.tools[1].input_schema["required"] == ["to", "body"]
    # Read in place: services, the package, the task, and the peer that the English variant inherits from.
    assert {t.path for t in found.tree} == {
        "mock_services",
        "src/claw_eval",
        "tasks/T001zh_invoice_reply/grader.py",
        "tasks/T002_invoice_reply",
    }
    assert all(Path(t.host) == base.resolve() / t.path and t.changed() is None for t in found.tree)
    assert (found.cwd, found.software, found.grading, found.needs) == ("/srv/tree", "tasks-claweval", "companion", ())
    # The format lists the services' data as fixtures; an agent that could read them would need no tool.
    assert row["files"] == []
    assert row["task_limits"] == {"turns": 12, "tokens": None, "seconds": 120.0}
    assert row["tags"] == ["communication", "general"]
    assert json.loads(row["payload"])["expected_actions"] == [
        {"service": "mail", "action_key": "sent", "required": True}
    ]


def test_files_before_and_after_the_agent_and_the_snapshot_are_in_the_row(base: Path) -> None:
    row = task(base, "T100_count_lines")
    found = setup.of(row)
    assert [(f["path"], f["content"]) for f in row["files"]] == [("fixtures/log.txt", b"a\nb\nc\n")]
    assert found.snapshot == setup.Snapshot(
        ("python /workspace/fixtures/verify_count.py", "test -f /workspace/count.txt && echo EXISTS || echo MISSING"),
        ("/workspace/*.txt",),
        20.0,
    )
    assert (found.late, found.local) == (("fixtures/verify_count.py",), ("fixtures/truth.txt",))
    files = {f["path"]: f["content"] for f in row["verifier"]["files"]}
    assert files["local/fixtures/truth.txt"] == b"3\n" and b"RIGHT" in files["late/fixtures/verify_count.py"]
    assert setup.of(task(base, "M002_logo")).attachments == ("fixtures/note.txt",)
    assert [f["path"] for f in task(base, "M002_logo")["files"]] == ["fixtures/note.txt"]


def test_a_user_and_a_judge_are_needs(base: Path) -> None:
    found = setup.of(task(base, "C01en_haggle"))
    assert found.user == setup.User(
        "You have a plan A and a plan B, and say what they are only when you are asked.", 4, ""
    )
    assert found.needs == ("judge", "user")
    assert task(base, "T050_report")["verifier"]["command"][-1] == "--judged"
    # The English variant inherits what its peer asks for.
    peer = base / "tasks" / "T001zh_invoice_reply" / "grader.py"
    peer.write_text(peer.read_text() + "\n\ndef late(judge):\n    return judge.evaluate('', '', '', '')\n")
    assert setup.of(task(base, "T002_invoice_reply")).needs == ("judge",)


def test_a_verifier_s_version_follows_what_it_runs_from(base: Path) -> None:
    before = task(base, "T002_invoice_reply")
    found = setup.of(before)
    peer = base / "tasks" / "T001zh_invoice_reply" / "grader.py"
    peer.write_text(peer.read_text().replace("INV-77", "INV-78"))
    after = task(base, "T002_invoice_reply")
    assert after["verifier"]["version"] != before["verifier"]["version"]
    assert after["source_revision"] != before["source_revision"]
    told = {t.path: t.changed() for t in found.tree}
    assert re.match(
        r".*/grader.py is not what the task was imported with", told.pop(f"tasks/{peer.parent.name}/grader.py") or ""
    )
    assert set(told.values()) == {None}
    peer.unlink()
    with pytest.raises(Unsupported) as e:
        task(base, "T002_invoice_reply")
    assert e.value.what == "the grader of T001zh_invoice_reply, which is not in the checkout"
    assert next(c for t in found.tree if (c := t.changed())).endswith("cannot be read: No such file or directory")


SERVICE = {"name": "a", "command": "python mock_services/todo/server.py", "port": 9102}
SERVICE |= {"health_check": "http://localhost:9102/todo/tasks"}
TOOL = {"name": "t", "description": "", "input_schema": {"type": "object"}}
ENDPOINT = {"tool_name": "t", "url": "http://localhost:9102/todo/tasks"}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"services": ["mail"]}, r"key 'services' is \['mail'\]; it must be a list of mappings"),
        ({"services": [{**SERVICE, "port": None}]}, r"key 'services\[0\].port' is required \(a port\)"),
        ({"services": [{**SERVICE, "port": "9102"}]}, r"key 'services\[0\].port' is '9102'; it must be a whole number"),
        ({"services": [{**SERVICE, "command": 3}]}, r"key 'services\[0\].command' is 3; it must be a text"),
        (
            {"services": [{**SERVICE, "command": "python 'x"}]},
            r"key 'services\[0\].command' .* it must be a command line",
        ),
        ({"services": [SERVICE, SERVICE]}, r"key 'services\[1\].name' is 'a', as another service's; they must differ"),
        (
            {"services": [SERVICE, {**SERVICE, "name": "b"}]},
            r"key 'services\[1\].port' is 9102, as another service's; they must differ",
        ),
        (
            {"services": [{**SERVICE, "health_check": "http://localhost:9103/x"}]},
            r"key 'services\[0\].health_check' is 'http://localhost:9103/x'; it must be an http URL .*, port 9102",
        ),
        (
            {"services": [{**SERVICE, "reset_endpoint": "http://elsewhere:9102/x"}]},
            r"key 'services\[0\].reset_endpoint' is .* it must be an http URL of localhost, port 9102",
        ),
        (
            {"services": [{**SERVICE, "env": {"PORT": "1"}}]},
            r"key 'services\[0\].env.PORT' is '1', but 'services\[0\].port' is 9102",
        ),
        ({"services": [{**SERVICE, "env": {"A": []}}]}, r"key 'services\[0\].env.A' is \[\]; it must be a text"),
        ({"services": [SERVICE], "tools": [TOOL]}, r"tool 't' has no entry in 'tool_endpoints'"),
        (
            {"services": [SERVICE], "tool_endpoints": [ENDPOINT]},
            r"key 'tool_endpoints\[0\].tool_name' is 't', which is no tool of 'tools'",
        ),
        (
            {"services": [SERVICE], "tools": [TOOL], "tool_endpoints": [{**ENDPOINT, "url": "http://localhost:1/x"}]},
            r"key 'tool_endpoints\[0\].url' is 'http://localhost:1/x'; it must be an http URL of localhost, port 9102",
        ),
        (
            {"tools": [TOOL], "tool_endpoints": [ENDPOINT]},
            r"key .* it must be an http URL of localhost, port of a service",
        ),
        (
            {"services": [SERVICE], "tools": [TOOL, TOOL], "tool_endpoints": [ENDPOINT]},
            r"key 'tools\[1\].name' is 't'; it must be 1 to 64 letters, digits, _ and -, and no other tool's",
        ),
        (
            {
                "services": [SERVICE],
                "tools": [{**TOOL, "input_schema": {"type": "array"}}],
                "tool_endpoints": [ENDPOINT],
            },
            r"key 'tools\[0\].input_schema' is .* it must be a JSON schema of type object",
        ),
        ({"user_agent": {"enabled": "yes"}}, r"key 'user_agent.enabled' is 'yes'; it must be true or false"),
        ({"user_agent": {"enabled": True, "max_rounds": 0}}, r"key 'user_agent.max_rounds' is 0; it must be a whole"),
        ({"env_snapshot_commands": "ls"}, r"key 'env_snapshot_commands' is 'ls'; it must be a list of texts"),
        ({"environment": {"max_turns": 1.5}}, r"key 'environment.max_turns' is 1.5; it must be a whole number"),
        ({"prompt": {"language": "en"}}, r"key 'prompt.text' is required"),
        ({"prompt": "do it"}, r"key 'prompt' is 'do it'; it must be a mapping"),
    ],
)
def test_what_does_not_fit_is_one_sentence_with_file_and_key(base: Path, keys: dict[str, Any], message: str) -> None:
    change(base, "M002_logo", **keys)
    file = re.escape(str(base / "tasks" / "M002_logo" / "task.yaml"))
    with pytest.raises(FolderError, match=f"^{file}: {message}"):
        task(base, "M002_logo")


def test_what_is_not_in_the_tree_is_named(base: Path) -> None:
    (base / "tasks" / "T002_invoice_reply" / "fixtures" / "todo.json").unlink()
    with pytest.raises(
        Unsupported, match=r"files that are not in the checkout \(T002_invoice_reply/fixtures/todo.json\)"
    ):
        task(base, "T002_invoice_reply")
    change(base, "T001zh_invoice_reply", environment={"max_turns": 3})
    (base / "tasks" / "T001zh_invoice_reply" / "fixtures" / "todo.json").unlink()
    what = r"files that are not in the checkout \(tasks/T001zh_invoice_reply/fixtures/todo.json\)"
    with pytest.raises(Unsupported, match=what):
        task(base, "T001zh_invoice_reply")
    (base / "tasks" / "M002_logo" / "grader.py").unlink()
    with pytest.raises(FolderError, match=r"M002_logo/grader.py does not exist; every task has a grader"):
        task(base, "M002_logo")
    grader = base / "tasks" / "T100_count_lines" / "grader.py"
    grader.write_text("def grade(:\n")
    with pytest.raises(FolderError, match=r"T100_count_lines/grader.py, line 1: this is no Python"):
        task(base, "T100_count_lines")
    late = base / "tasks" / "T100_count_lines" / "fixtures" / "verify_count.py"
    grader.write_text((CHECKOUT / "tasks" / "T100_count_lines" / "grader.py").read_text())
    late.write_text("import playwright.sync_api\n")
    with pytest.raises(Unsupported, match=r"a library in the sandbox \(playwright\)"):
        task(base, "T100_count_lines")


def test_two_tasks_of_one_id_are_refused(base: Path) -> None:
    shutil.copytree(base / "tasks" / "M002_logo", base / "tasks" / "M003_copy")
    with pytest.raises(TasksError, match=r"task_id 'M002_logo' stands in several folders \(M002_logo, M003_copy\)"):
        sources.read_all(base, "x")


def test_a_folder_of_a_checkout_alone_says_what_it_lacks(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sources.read_all(base / "tasks", "x") == []
    assert "9 tasks are left out: they need the ClawEval checkout around its grader.py" in capsys.readouterr().err


def test_reading_leaves_the_checkout_as_it_is(base: Path) -> None:
    before = setup.digest(base)
    sources.read_all(base, "x", {"judge", "user"})
    assert setup.digest(base) == before and not list(base.rglob("__pycache__"))
