"""Services beside the agent: ready, reset, called, audited, out of reach; and every way in which one can fail."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from service_setup import MAIL, NOTES, service, setup
from stub_harness import End

from openforge.environments.claw_eval import services as module
from openforge.environments.claw_eval import setup as setups
from openforge.sandboxes import SandboxError
from openforge.sandboxes.protocol import SandboxLost

# Prints what the evidence says.
TELL = """
import json, pathlib, sys
at = pathlib.Path(sys.argv[1])
seen = {p.name: p.read_text() for p in at.iterdir()}
print(json.dumps({"score": 1, "passed": True, "seen": seen}))
"""
COMMAND = ("python3", "-I", "verify.py", "{evidence}")


def seen(result: Any) -> dict[str, str]:
    assert result.status == "completed", (result.status, result.message)
    found: dict[str, str] = json.loads(result.verifier_output)["seen"]
    return found


async def test_calls_are_dispatched_recorded_and_audited(episode: Any) -> None:
    agent = """set -x
tool mail_add '{"text": "hello"}' && tool mail_list && tool notes_add '{"text": "n"}'
tool mail_find '{"text": "ell"}'; tool mail_text
"""
    done = await episode(agent, TELL, command=COMMAND, setup=setup())
    files = seen(done)
    assert set(files) == {"episode.json", "messages.json", "dispatches.jsonl", "audit.json", "snapshot.json", "answer"}
    assert '{"items": ["first", "hello"]}' in done.answer and "plain words" in done.answer
    assert json.loads(files["audit.json"]) == {
        "mail": {"calls": ["add", "list"], "items": ["first", "hello"]},
        "notes": {"calls": ["add"], "items": ["first", "n"]},
    }
    assert done.audit is not None and json.loads(done.audit) == json.loads(files["audit.json"])
    calls = [json.loads(line) for line in files["dispatches.jsonl"].splitlines()]
    assert [(c["tool_name"], c["response_status"]) for c in calls] == [
        ("mail_add", 200),
        ("mail_list", 200),
        ("notes_add", 200),
        ("mail_find", 200),
        ("mail_text", 200),
    ]
    assert calls[0]["request_body"] == {"text": "hello"} and calls[0]["response_body"] == {"id": 2}
    assert calls[0]["endpoint_url"] == f"http://localhost:{MAIL}/mail/add"
    assert calls[3]["response_body"] == {"found": ["hello"]} and calls[4]["response_body"] == "plain words"
    assert len({c["tool_use_id"] for c in calls}) == 5 and all(c["latency_ms"] > 0 for c in calls)
    assert done.dispatches is not None
    assert [(d["tool"], json.loads(d["arguments"]), d["status"]) for d in done.dispatches[:2]] == [
        ("mail_add", {"text": "hello"}, 200),
        ("mail_list", {}, 200),
    ]
    assert json.loads(files["episode.json"])["episode_id"] == "e1"


async def test_the_agent_reaches_neither_services_nor_their_files(episode: Any) -> None:
    agent = f"""
for port in {MAIL} {NOTES}; do (exec 3<>/dev/tcp/127.0.0.1/$port) 2>/dev/null && echo reached $port; done
ls /srv 2>/dev/null; ls /tmp; echo done
"""
    done = await episode(agent, TELL, command=COMMAND, setup=setup())
    seen(done)
    assert done.answer == "done\n"


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        ("mail_add '{}'", 400, "the arguments of mail_add do not fit its schema: 'text' is a required property"),
        ("mail_add '{\"text\": 3}'", 400, "do not fit its schema: text: 3 is not of type 'string'"),
        ("mail_add '[1]'", 400, "must be a JSON object, not [1]"),
        ("mail_add '{\"text\": '", 400, "must be a JSON object"),
        ("no_such '{}'", 404, "there is no tool 'no_such'; tools: mail_list, mail_add,"),
    ],
)
async def test_a_call_that_does_not_fit_is_an_answer_and_a_dispatch(
    episode: Any, words: str, status: int, told: str
) -> None:
    done = await episode(f"tool {words} 2>&1; echo code $?", TELL, command=COMMAND, setup=setup())
    assert told in done.answer and done.answer.endswith("code 1\n")
    (call,) = (json.loads(line) for line in seen(done)["dispatches.jsonl"].splitlines())
    assert call["response_status"] == status and told in call["response_body"]["error"]
    # It never came to the service.
    assert json.loads(done.audit)["mail"] == {"calls": [], "items": ["first"]}


async def test_the_command_lists_the_tools_and_the_instruction_names_them(episode: Any) -> None:
    done = await episode("tool --list; cat $HOME/task.md; tool", TELL, command=COMMAND, setup=setup())
    assert "mail_add: add of mail_add\n" in done.answer and '"required": ["text"]' in done.answer
    assert "- mail_add(text): add of mail_add\n" in done.answer
    assert done.harness_exit == 2 and "usage: tool --list" in done.answer


async def test_errors_of_a_service_reach_the_agent_and_are_recorded(episode: Any) -> None:
    one = setup(service("mail", MAIL, "errors"))
    done = await episode('tool mail_add \'{"text": "x"}\' 2>&1 || true', TELL, command=COMMAND, setup=one)
    assert "try again" in done.answer
    (call,) = (json.loads(line) for line in seen(done)["dispatches.jsonl"].splitlines())
    assert (call["response_status"], call["response_body"]) == (500, {"error": "try again"})


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("dies", r"service 'mail' ended with exit code 3 before it was ready; it said: cannot find my fixtures"),
        ("never-ready", r"service 'mail' was not ready in 1 s: its health check answers 503; it said: .*503"),
        ("silent", r"service 'mail' was not ready in 1 s: nobody listens on its port; it printed nothing"),
        ("no-reset", r"service 'mail' could not be reset at http://localhost:9100/mail/reset: it answered 500"),
    ],
)
async def test_a_service_that_does_not_get_ready_is_an_error_of_the_set_up(
    episode: Any, monkeypatch: pytest.MonkeyPatch, mode: str, message: str
) -> None:
    monkeypatch.setattr(module, "READY_LEAST", 1.0)
    one = setup(service("mail", MAIL, mode, ready_timeout=0.5), service("notes", NOTES))
    with pytest.raises(SandboxError, match=re.compile(message, re.DOTALL)) as failure:
        await episode("true", TELL, setup=one)
    assert not isinstance(failure.value, SandboxLost)


async def test_a_port_that_answers_already_is_an_error(backend: Any) -> None:
    sandbox = await backend.create("e1", network="none")
    await sandbox.exec(
        "python3 -m http.server 9100 --bind 127.0.0.1 >/dev/null 2>&1 & "
        "until (exec 3<>/dev/tcp/127.0.0.1/9100) 2>/dev/null; do :; done",
        timeout=30,
    )
    one = module.Services(sandbox, [service("mail", MAIL)], "/")
    with pytest.raises(SandboxError, match=r"service 'mail': port 9100 answers before the service was started"):
        await one.start()


async def test_a_service_that_takes_anothers_port_is_named(episode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READY_LEAST", 1.0)
    squatter = service("squat", 9199, ready_timeout=1.0, env={"NAME": "squat", "PORT": str(MAIL)})
    with pytest.raises(SandboxError, match=r"service '(mail|squat)' (ended with exit code 1|was not ready)"):
        await episode("true", TELL, setup=setup(squatter, service("mail", MAIL), tools=()))


async def test_a_service_that_dies_under_the_agent_is_no_reward(episode: Any) -> None:
    with pytest.raises(
        SandboxLost, match=r"service 'mail' ended with exit code 7 during the episode; it said: (.|\n)*out of"
    ):
        await episode("tool mail_crash; tool mail_list; true", TELL, setup=setup())


async def test_a_service_without_its_audit_is_no_reward(episode: Any) -> None:
    with pytest.raises(SandboxLost, match=r"service 'mail' gives no audit at http://localhost:9100/mail/audit: 200"):
        await episode("true", TELL, setup=setup(service("mail", MAIL, "no-audit")))


async def test_a_tree_that_has_changed_since_the_import_is_named(episode: Any) -> None:
    whole = setup()
    tree = (setups.Tree(whole.tree[0].host, "services/mock_service.py", "0" * 16),)
    with pytest.raises(SandboxError, match="is not what the task was imported with"):
        await episode("true", TELL, setup=setups.Setup(services=whole.services, tree=tree))


async def test_nothing_is_left_of_an_episode(episode: Any, backend: Any) -> None:
    done = await episode("tool mail_list", TELL, command=COMMAND, setup=setup())
    seen(done)
    assert set(backend.sandboxes.values()) == {done.sandbox}, "the companion went before the verifier"
    with pytest.raises(SandboxError):
        await episode("true", TELL, setup=setup(service("mail", MAIL, "dies")))
    assert len(backend.sandboxes) == 2 and all(s.network == "proxy" for s in backend.sandboxes.values())


async def test_the_conversation_is_evidence(episode: Any) -> None:
    said = ({"role": "user", "content": "do it"}, {"role": "assistant", "content": "done"})
    files = seen(await episode("true", TELL, command=COMMAND, end=End(said=said)))
    assert [m["role"] for m in json.loads(files["messages.json"])] == ["user", "assistant"]
    assert files["audit.json"] == "{}" and files["dispatches.jsonl"] == "" and files["snapshot.json"] == "null"
