"""One episode by hand and its replay, over real sandboxes and the real proxy; harness and policy server are stubs."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from aiohttp import web
from policy_thread import Policy
from proxy_stub import Json, completion
from stub_harness import StubHarness

from openforge import cli, harnesses, plan, tables
from openforge.config import Cell, EvalConfig, Server, Tasks
from openforge.environments.claw_eval.folder import make_verifier
from openforge.harnesses import Context
from openforge.proxy import lineage
from openforge.rollout import by_hand, replay

CONFIG = "model: tiny-random\niterations: 1\ntasks: {source: tiny}\ncells: [{name: by_hand}]\n"
# Talks to the policy: a system text, a tool, what note.txt says, and then each answer with a question after it. Its
# last request leaves the middle out, as a harness does that shortens its history.
TALK = """
cat > /tmp/talk.py <<'PY'
import json, os, urllib.request
def ask(messages):
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    body = json.dumps({"model": "m", "messages": messages, "tools": tools}).encode()
    head = {"authorization": "Bearer " + os.environ["KEY"], "content-type": "application/json"}
    url = os.environ["BASE"] + "/v1/chat/completions"
    answer = json.load(urllib.request.urlopen(urllib.request.Request(url, body, head)))
    return answer["choices"][0]["message"]["content"]
print("harness begins", flush=True)
said = []
history = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": open("note.txt").read()}]
for i in range(2):
    said.append(ask(history))
    history += [{"role": "assistant", "content": said[-1]}, {"role": "user", "content": f"and {i}?"}]
said.append(ask([history[0], history[-1]]))
open("said.txt", "w").write(" ".join(said))
PY
python3 /tmp/talk.py
"""
JUDGE = """
import json
said = open("/workspace/said.txt").read()
print(json.dumps({"score": 0.5, "passed": said == "one two three", "words": len(said.split())}))
"""


class Agent(StubHarness):
    def env(self, ctx: Context) -> dict[str, str]:
        return {"KEY": ctx.api_key, "BASE": ctx.base_url}


@pytest.fixture
def policy() -> Iterator[Policy]:
    one = Policy()
    one.says("one", "two", "three")
    yield one
    one.close()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with the configuration r."""
    (tmp_path / "Snakefile").touch()
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "r.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(harnesses._KINDS, "stub", Agent)
    return tmp_path


def rollout(agent: str = TALK, judge: str = JUDGE, note: str = "hello") -> Json:
    """A row as plan makes it, driven by the stub."""
    task = {
        "task_id": "t",
        "environment": "claw_eval",
        "split": "train",
        "instruction": agent,
        "payload": "{}",
        "files": [{"path": "note.txt", "content": note.encode(), "mode": 0o644}],
        "verifier": make_verifier(
            "v", ["python3", "-I", "v.py"], [{"path": "v.py", "content": judge.encode(), "mode": 0o644}], 30.0
        ),
        "task_limits": {"turns": 9, "tokens": None, "seconds": 30.0},
        "tags": [],
        "source": "s",
        "source_revision": "",
    }
    cell = Cell(name="by_hand", split="train")
    (row,) = plan.eval_table("r", config(), [task], cell, None, "p")
    return row | {"harness": "stub"}


def config() -> EvalConfig:
    return EvalConfig(model="tiny-random", tasks=Tasks(source="tiny"), cells=(Cell(name="by_hand"),))


def drive(root: Path, policy: Policy, row: Json, keep: bool = False, say: Callable[[str], None] | None = None) -> Any:
    lines: list[str] = []
    server = Server(url=f"{policy.url}/v1")
    outcome = by_hand.run(row, config(), None, server, root, keep=keep, say=say or lines.append)
    # Nothing is left: no process, and of files what was asked for.
    assert psutil.Process().children() == []
    left = list((root / "results" / ".episodes").iterdir())
    assert left == ([outcome.kept] if outcome.kept else [])
    return outcome, lines


def record(root: Path, outcome: by_hand.Outcome, row: Json) -> str:
    """Write an episode as run r's, with the row that it is a rollout of; its id."""
    calls, blobs = lineage.call_rows(outcome.records)
    row = row | {"rollout_id": outcome.episode["rollout_id"]}
    for table, rows, shard in (
        (tables.ROLLOUTS, [row], None),
        (tables.EPISODES, [outcome.episode], 1),
        (tables.CALLS, calls, 1),
        (tables.BLOBS, blobs, 1),
    ):
        path = tables.partition_path(table.name, "eval", "by_hand", None, shard)
        tables.write_table(root / "results" / "r" / path, table, rows)
    return str(outcome.episode["episode_id"])


class Recorded(NamedTuple):
    """An episode of TALK and what the policy was sent."""

    outcome: by_hand.Outcome
    bodies: list[Json]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(harnesses._KINDS, "stub", Agent)
        policy = Policy()
        policy.says("one", "two", "three")
        outcome, _ = drive(tmp_path_factory.mktemp("recorded"), policy, rollout())
        yield Recorded(outcome, policy.bodies)
        policy.close()


# ---- an episode ------------------------------------------------------------------------------------------------
def test_what_happens_is_printed_while_it_happens(root: Path, policy: Policy) -> None:
    """Each answer waits for a line about what came before it: were they printed at the end, none would come."""
    lines: list[str] = []
    awaited = ["harness: harness begins", "turn 1:", "turn 2:"]
    seen = [asyncio.Event() for _ in awaited]

    def say(line: str) -> None:
        lines.append(line)
        for start, event in zip(awaited, seen, strict=True):
            if line.startswith(start):
                policy.loop.call_soon_threadsafe(event.set)

    policy.script.clear()
    for text, event in zip(("one", "two", "three"), seen, strict=True):

        async def reply(body: Json, text: str = text, event: asyncio.Event = event) -> web.StreamResponse:
            await event.wait()
            return web.json_response(completion(body, text))

        policy.script.append(reply)
    outcome, _ = drive(root, policy, rollout(), say=say)
    assert outcome.episode["status"] == "completed" and outcome.reward == 0.5
    # The stub's tokenizer has an id a byte, one at each end of a message, and one at the end of an answer.
    size = len("system\nBe brief.") + 2 + len("user\nhello") + 2 + len("assistant\n") + 1
    assert lines[1].startswith(f"turn 1: {size} tokens in, 4 out, ") and lines[1].endswith(" s, stop: one")
    assert [line.split(":")[0] for line in lines] == ["harness", "turn 1", "turn 2", "turn 3"]
    last = by_hand.summary(outcome)
    assert last[0] == 'verifier: {"score": 0.5, "passed": true, "words": 3}'
    assert last[1:3] == ["status: completed", "reward: 0.5"]
    assert all(f"{phase} " in last[3] for phase in ("setup", "agent", "verify", "total")) and " 3 turns" in last[3]


def test_the_record_has_the_requests_whole(root: Path, policy: Policy) -> None:
    outcome, _ = drive(root, policy, rollout())
    written = json.loads(outcome.text())
    assert [c["messages"] for c in written["calls"]] == [b["messages"] for b in policy.bodies]
    assert [c["response"]["content"] for c in written["calls"]] == ["one", "two", "three"]
    assert written["reward"] == 0.5 and written["episode"]["verifier_output"] == outcome.episode["verifier_output"]


def test_the_work_folder_is_kept_on_request(root: Path, policy: Policy) -> None:
    (root / "secret").write_text("outside")
    outcome, _ = drive(
        root, policy, rollout(agent=TALK + f"mkdir d; ln -s ../note.txt d/in; ln -s {root}/secret out"), True
    )
    assert (outcome.kept / "said.txt").read_text() == "one two three"
    assert os.readlink(outcome.kept / "d" / "in") == "../note.txt" and not (outcome.kept / "out").exists()
    assert by_hand.summary(outcome)[-1] == f"work folder: {outcome.kept}"


def test_an_episode_without_a_verdict_has_no_reward(root: Path, policy: Policy) -> None:
    outcome, _ = drive(root, policy, rollout(judge="raise SystemExit('no')"))
    assert (outcome.episode["status"], outcome.reward) == ("verifier_failed", None)
    assert by_hand.summary(outcome)[:3] == [
        "verifier: no verdict",
        "status: verifier_failed (the verifier exited with code 1: no)",
        "reward: none",
    ]


def test_a_terminal_gets_printable_lines() -> None:
    assert by_hand.shortened("\x1b[31mred\x1b[0m\x07 two\nlines\n") == "red  two\\nlines"
    assert by_hand.shortened("x" * 300) == "x" * by_hand.SHOWN + "... (300 characters)"


# ---- a replay --------------------------------------------------------------------------------------------------
def replayed(capsys: pytest.CaptureFixture[str], episode: str) -> tuple[int, list[str]]:
    code = cli.main(["episode", "--replay", episode, "--run", "r"])
    return code, capsys.readouterr().out.splitlines()


def test_a_replay_sends_the_same_requests_and_gets_the_same_verdict(
    root: Path, recorded: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines = replayed(capsys, record(root, recorded.outcome, rollout()))
    assert code == 0
    assert [line for line in lines if line.startswith("request ")] == [f"request {i}: as recorded" for i in (1, 2, 3)]
    assert lines[-2:] == ["requests: all 3 came the same", "verdict: the same: completed, reward 0.5, passed"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            # One request more, and another verifier: another version is named too.
            {"agent": TALK.replace("said.append(ask([", "ask(history); said.append(ask(["), "judge": JUDGE + "#"},
            [
                # What it was sent in place of a history that was shortened.
                "requests: request 3 of 3 is the first that differs, at messages[1:][0][role], from character 0 on: "
                "recorded 'user', now 'assistant'",
                "verdict: recorded completed, reward 0.5, passed, now policy_failed without a verdict",
            ],
        ),
        (
            {"judge": JUDGE.replace("0.5", "0.25")},
            [
                "requests: all 3 came the same",
                "verdict: recorded completed, reward 0.5, passed, now completed, reward 0.25, passed",
            ],
        ),
    ],
)
def test_a_replay_says_what_differs(
    root: Path, recorded: Recorded, capsys: pytest.CaptureFixture[str], change: dict[str, str], told: list[str]
) -> None:
    row = rollout(**change)
    then = recorded.outcome.episode["verifier_version"]
    code, lines = replayed(capsys, record(root, recorded.outcome, row))
    now = row["verifier"]["version"]
    assert code == 1 and then != now
    assert lines[-3:] == [*told, f"another version: verifier_version: recorded {then!r}, now {now!r}"]


Change = Callable[[list[Json]], object]


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda b: None, "all 3 came the same"),
        (lambda b: b.pop(), "only 2 of the 3 recorded ones came, the same as then"),
        (
            lambda b: b.append(b[0]),
            "the 3 recorded ones came and another one after them, which the record has no answer to",
        ),
        (
            lambda b: b[0]["messages"][1].update(content="hellish"),
            "request 1 of 3 is the first that differs, at messages[0][content], from character 4 on: "
            "recorded 'hello', now 'hellish'",
        ),
        (
            lambda b: b[1]["messages"][2].update(content="1"),
            "request 2 of 3 is the first that differs, at messages[1][content], from character 0 on: "
            "recorded 'one', now '1'",
        ),
        (
            lambda b: b[1]["messages"].pop(1),
            "request 2 of 3 is the first that differs, at messages[0][role], from character 0 on: "
            "recorded 'user', now 'assistant'",
        ),
        (
            lambda b: b[1]["messages"].pop(),
            "request 2 of 3 is the first that differs, at messages: recorded 3 of them, now 2",
        ),
        (
            lambda b: b[1]["messages"][0].update(content="Be long."),
            "request 2 of 3 is the first that differs, at system text, from character 3 on: "
            "recorded 'Be brief.', now 'Be long.'",
        ),
        (
            lambda b: b[2].pop("tools"),
            "request 3 of 3 is the first that differs, at tools: recorded "
            '"[{\\"type\\":\\"function\\",\\"function\\":{\\"name\\":\\"look\\",\\"p..., now null',
        ),
        (
            lambda b: b[2]["messages"][1].update(content="and?"),
            "request 3 of 3 is the first that differs, at messages[0:][0][content], from character 3 on: "
            "recorded 'and 1?', now 'and?'",
        ),
    ],
)
def test_the_first_difference_is_named(recorded: Recorded, change: Change, where: str) -> None:
    calls, blobs = lineage.call_rows(recorded.outcome.records)
    # The second prompt extends the first; the third, shortened, begins as the others do.
    assert calls[1]["prefix_len"] >= calls[0]["prompt_tokens"] > calls[2]["prefix_len"] > 0
    texts = {b["sha256"]: b["bytes"].decode() for b in blobs}
    upstream = replay.Upstream(replay.Record(recorded.outcome.episode, {}, calls, texts), 99, lambda line: None)
    bodies = copy.deepcopy(recorded.bodies)
    change(bodies)
    answers = [upstream.answer(b) for b in bodies]
    assert upstream.verdict() == where and upstream.same == where.startswith("all")
    assert [status for status, _ in answers] == [200, 200, 200, 404][: len(bodies)]
    # The answers are the recorded ones, token by token, in the shape that the proxy reads.
    for (_, got), body, text in zip(answers, recorded.bodies, ("one", "two", "three"), strict=False):
        then = completion(body, text)
        assert got["prompt_token_ids"] == then["prompt_token_ids"]
        assert got["choices"][0]["token_ids"] == then["choices"][0]["token_ids"]
        assert got["choices"][0]["message"]["content"] == text
        logprobs = [[t["logprob"] for t in a["choices"][0]["logprobs"]["content"]] for a in (got, then)]
        assert logprobs[0] == logprobs[1]


def test_components_of_a_verdict_are_compared(recorded: Recorded) -> None:
    then = recorded.outcome.episode
    now = then | {"verifier_output": '{"score": 0.5, "passed": true, "words": 4}'}
    assert replay.ends(then, now) == (False, "verdict[3][words]: recorded 3, now 4")


def test_ctrl_c_ends_everything_and_says_what_is_kept(root: Path, recorded: Recorded) -> None:
    episode = record(root, recorded.outcome, rollout(agent="echo begun > work.txt; echo harness begins; sleep 600"))
    here = Path(__file__).resolve()
    path = os.pathsep.join(
        map(str, (here.parents[2], here.parent, *(here.parents[1] / n for n in ("proxy", "environments"))))
    )
    script = "import sys, test_by_hand as t; t.harnesses._KINDS['stub'] = t.Agent; sys.exit(t.cli.main(sys.argv[1:]))"
    argv = [sys.executable, "-c", script, "episode", "--replay", episode, "--run", "r", "--keep"]
    # pytest may run in the background, where SIGINT is ignored.
    argv = ["env", "--default-signal=INT", *argv]
    child = subprocess.Popen(
        argv, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert child.stdout is not None
    with child:
        lines = []
        for line in child.stdout:
            lines.append(line.rstrip())
            if lines[-1] == "harness: harness begins":
                inside = [p.pid for p in psutil.Process(child.pid).children(recursive=True)]
                assert inside
                # As a terminal does: to every process in the foreground.
                os.killpg(child.pid, signal.SIGINT)
    assert child.returncode == 130
    assert lines[-2] == "interrupted: the episode, its sandbox and proxy, and a server started for it have ended"
    (kept,) = (root / "results" / ".episodes").iterdir()
    assert lines[-1] == f"work folder: {kept}" and (kept / "work.txt").read_text() == "begun\n"
    for pid in inside:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).wait(10)


def test_what_a_killed_one_left_is_swept_and_a_living_ones_is_not(root: Path) -> None:
    episodes = root / "results" / ".episodes"
    dead, alive = episodes / ".scratch-4194304:1", episodes / f".scratch-{by_hand.process.identity(os.getppid())}"
    for folder in (dead, alive):
        (folder / "partial").mkdir(parents=True)
    by_hand._sweep(episodes)
    assert list(episodes.iterdir()) == [alive]


def test_an_episode_without_calls_cannot_be_replayed(
    root: Path, recorded: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = recorded.outcome.episode | {"status": "verifier_failed", "verifier_output": None}
    episode = record(root, dataclasses.replace(recorded.outcome, episode=failed, records=[]), rollout())
    assert cli.main(["episode", "--replay", episode, "--run", "r"]) == 2
    told = (
        f"episode {episode} of run r has no recorded calls (it ended as verifier_failed), so there is nothing to replay"
    )
    assert capsys.readouterr().err.endswith(f"error: {told}\n")
