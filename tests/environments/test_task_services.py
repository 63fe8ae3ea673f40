"""Folders of one's own with services, tools, a user, attachments, a snapshot; the evidence that graders are given."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from openforge import tables
from openforge.environments.claw_eval import setup
from openforge.environments.claw_eval.evidence import DISPATCH, Evidence, messages_of
from openforge.environments.claw_eval.folder import FolderError, make_verifier, read_folder, write_folder

TASK = """\
task_id: mail-1
split: train
prompt: {text: Answer the mail., attachments: [letter.txt]}
services:
  - name: mail
    command: python3 ../services/mail/server.py --quiet
    port: 9100
    health_check: http://localhost:9100/mail/health
    health_check_method: GET
    ready_timeout: 90
    env: {MAIL_FIXTURES: fixtures/inbox.json, ERROR_RATE: 0.25}
tools:
  - name: mail_list
    description: List the inbox.
    input_schema: {type: object, properties: {}}
tool_endpoints:
  - {tool_name: mail_list, url: "http://127.0.0.1:9100/mail/list"}
user_agent: {enabled: true, persona: Brief., max_rounds: 2, system_prompt_suffix: Ask if in doubt.}
environment: {fixtures: [fixtures/inbox.json, notes.txt], env_snapshot_timeout: 5}
env_snapshot_commands: [python3 check.py]
env_snapshot_files: ["out/*.txt"]
sandbox_grader_files: [check.py]
local_grader_files: [truth.txt]
verifier:
  command: [python3, -I, verify.py, "{workspace}", "{answer}", "{evidence}"]
  files: [verify.py]
  timeout_seconds: 5
"""
FILES = {
    "letter.txt": "a",
    "notes.txt": "b",
    "check.py": "c",
    "truth.txt": "d",
    "fixtures/inbox.json": "[]",
    "verifier/verify.py": "e",
    "../services/mail/server.py": "f",
    "../services/base.py": "g",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    base = tmp_path / "suite" / "mail-1"
    for name, text in FILES.items():
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_text(text)
    (base / "task.yaml").write_text(TASK)
    return base


def test_a_folder_s_set_up_is_in_its_row(folder: Path) -> None:
    row = read_folder(folder)
    (again,) = tables.TASKS.arrow([row]).to_pylist()
    found = setup.of(again)
    root = folder.parent
    assert found == setup.Setup(
        services=(
            setup.Service(
                "mail",
                "python3 ../services/mail/server.py --quiet",
                9100,
                "http://localhost:9100/mail/health",
                "GET",
                90.0,
                None,
                {"MAIL_FIXTURES": "fixtures/inbox.json", "ERROR_RATE": "0.25"},
            ),
        ),
        tools=(
            setup.Tool(
                "mail_list",
                "List the inbox.",
                {"type": "object", "properties": {}},
                "http://127.0.0.1:9100/mail/list",
                "POST",
            ),
        ),
        tree=tuple(
            setup.Tree(str(root / p), p, setup.digest(root / p))
            for p in ("mail-1/fixtures/inbox.json", "mail-1/task.yaml", "services")
        ),
        cwd="/srv/tree/mail-1",
        user=setup.User("Brief.", 2, "Ask if in doubt."),
        attachments=("letter.txt",),
        snapshot=setup.Snapshot(("python3 check.py",), ("out/*.txt",), 5.0),
        late=("check.py",),
        local=("truth.txt",),
        needs=("user",),
    )
    assert found.tree[2].bind().inside == "/srv/tree/services"
    # The services' own data is not the agent's; what is attached is.
    assert [f["path"] for f in row["files"]] == ["notes.txt", "letter.txt"]
    assert [f["path"] for f in row["verifier"]["files"]] == [
        "verify.py",
        "check.py",
        "late/check.py",
        "local/truth.txt",
    ]


def test_what_is_placed_only_where_it_is_named(folder: Path) -> None:
    data = yaml.safe_load(TASK) | {"sandbox_files": ["fixtures/inbox.json"]}
    (folder / "task.yaml").write_text(yaml.safe_dump(data))
    assert [f["path"] for f in read_folder(folder)["files"]] == ["fixtures/inbox.json", "letter.txt"]


def test_a_folder_without_services_round_trips_with_attachments_and_snapshot(folder: Path, tmp_path: Path) -> None:
    data = yaml.safe_load(TASK)
    for key in ("services", "tools", "tool_endpoints", "sandbox_grader_files", "local_grader_files"):
        del data[key]
    (folder / "task.yaml").write_text(yaml.safe_dump(data))
    row = read_folder(folder, source="mine")
    write_folder(tmp_path / "copy" / "mail-1", row)
    again = read_folder(tmp_path / "copy" / "mail-1", source="mine")
    assert setup.of(again) == setup.of(row) != setup.Setup()
    assert sorted(f["path"] for f in again["files"]) == sorted(f["path"] for f in row["files"])


def test_a_task_with_services_is_not_written_without_them(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        FolderError, match="'mail-1': it has services, whose programs stand in its source and not in the row"
    ):
        write_folder(tmp_path / "out", read_folder(folder))


def test_a_user_s_own_payload_is_no_set_up() -> None:
    verifier = make_verifier("v", ["true"], [], 1)
    for payload in ('{"services": [1], "tools": "x"}', "[]", '"text"', '{"openforge": "mine"}'):
        assert setup.of({"payload": payload, "verifier": verifier}) == setup.Setup()


SERVICE = yaml.safe_load(TASK)["services"][0]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"services": [SERVICE | {"comand": "x"}]}, r"unknown key 'services\[0\].comand'; did you mean .*command'\?"),
        ({"tools": [{"name": "a", "schema": {}}]}, r"unknown key 'tools\[0\].schema'; did you mean .*input_schema'\?"),
        ({"user_agent": {"enable": True}}, r"unknown key 'user_agent.enable'; did you mean 'user_agent.enabled'\?"),
        (
            {"services": [SERVICE | {"command": "python3 ../services/nail/server.py"}]},
            r"services\[0\].command: .*/services/nail/server.py does not exist",
        ),
        (
            {"services": [SERVICE | {"env": {"MAIL_FIXTURES": "fixtures/no.json"}}]},
            r"services\[0\].env.MAIL_FIXTURES: .*/fixtures/no.json does not exist",
        ),
        ({"prompt": {"text": "x", "attachments": ["no.txt"]}}, r"prompt.attachments: .*/no.txt does not exist"),
        ({"local_grader_files": ["no.txt"]}, r"local_grader_files: .*/no.txt does not exist"),
    ],
)
def test_what_does_not_fit_is_named_with_file_and_key(folder: Path, keys: dict[str, Any], message: str) -> None:
    (folder / "task.yaml").write_text(yaml.safe_dump(yaml.safe_load(TASK) | keys))
    with pytest.raises(FolderError, match=f"^{re.escape(str(folder / 'task.yaml'))}: {message}"):
        read_folder(folder)


def test_services_use_nothing_outside_of_the_suite(folder: Path) -> None:
    service = SERVICE | {"command": "python3 ../../outside.py"}
    (folder.parent.parent / "outside.py").write_text("")
    (folder / "task.yaml").write_text(yaml.safe_dump(yaml.safe_load(TASK) | {"services": [service]}))
    with pytest.raises(FolderError, match=r"outside.py lies outside of .*/suite; a task's services may use only what"):
        read_folder(folder)


# ---- evidence ------------------------------------------------------------------------------------
def test_a_chat_becomes_blocks_as_graders_read_them() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "mail_list", "arguments": '{"days": 7}'}}
    odd = {"id": "c2", "type": "function", "function": {"name": "run", "arguments": "ls"}}
    chat = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "assistant", "content": None, "tool_calls": [call, odd], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "[]"},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "x"}]},
        {"role": "assistant", "content": "Done."},
    ]
    assert messages_of(chat) == [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "tool_use", "id": "c1", "name": "mail_list", "input": {"days": 7}},
                {"type": "tool_use", "id": "c2", "name": "run", "input": {"arguments": "ls"}},
            ],
            "reasoning_content": "hm",
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c1",
                    "content": [{"type": "text", "text": "[]"}],
                    "is_error": False,
                },
                {
                    "type": "tool_result",
                    "tool_use_id": "c2",
                    "content": [{"type": "text", "text": "x"}],
                    "is_error": False,
                },
            ],
        },
        {"role": "assistant", "content": [{"type": "text", "text": "Done."}]},
    ]


def test_evidence_is_files_that_plain_json_reads() -> None:
    dispatch = {name: name for name in DISPATCH} | {"request_body": {"text": "a\nb\ud800"}}
    given = Evidence(
        "e1", "t1", "m", None, dispatches=[dispatch, dispatch], audit={"mail": {"calls": []}}, user_rounds=2
    )
    files = given.files()
    assert set(files) == {
        "episode.json",
        "messages.json",
        "dispatches.jsonl",
        "audit.json",
        "snapshot.json",
        "answer",
    }
    about = {"episode_id": "e1", "task_id": "t1", "model": "m", "answer": None, "user_rounds": 2}
    assert json.loads(files["episode.json"]) == about
    assert [json.loads(line) for line in files["dispatches.jsonl"].splitlines()] == [dispatch, dispatch]
    assert json.loads(files["audit.json"]) == {"mail": {"calls": []}}
    assert json.loads(files["snapshot.json"]) is None and files["answer"] == b""
    assert json.loads(files["messages.json"]) == []
    # An agent that asks no policy has an answer all the same.
    said = json.loads(Evidence("e1", "t1", "m", "42").files()["messages.json"])
    assert said == [{"role": "assistant", "content": [{"type": "text", "text": "42"}]}]
