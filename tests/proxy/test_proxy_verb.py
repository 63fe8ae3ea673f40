"""`openforge proxy` and `openforge sql --journal` as a person types them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import mock_vllm
import pytest
from aiohttp import web
from proxy_rig import Rig, chat

from openforge import cli
from openforge.proxy.journal import read

ROOT = Path(__file__).resolve().parent.parent.parent


@contextlib.contextmanager
def running(app: web.Application) -> Iterator[str]:
    """A MOCK policy server in a thread; its URL."""
    loop, url = asyncio.new_event_loop(), list[str]()
    up = threading.Event()

    runner = web.AppRunner(app)

    async def start() -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        up.set()

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    up.wait()
    yield url[0]
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


@pytest.fixture(scope="module")
def vllm() -> Iterator[str]:
    with running(mock_vllm.app("m", root="/models/m")) as url:
        yield url


class Verb:
    """`openforge proxy` as a process, once it has said that it listens."""

    def __init__(self, *words: str, **env: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "openforge", "proxy", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={k: v for k, v in os.environ.items() if k != "OPENFORGE_PROXY_KEY"} | {"PYTHONPATH": str(ROOT)} | env,
        )
        assert self.process.stdout is not None
        self.lines = [self.process.stdout.readline() for _ in range(3 if "--session" in words else 2)]
        found = re.match(r"open a session: POST (\S+)/sessions with Authorization: Bearer (\S+)\n", self.lines[1])
        assert found is not None, (self.lines, self.process.communicate()[1])
        self.base, self.key = found.groups()

    def end(self, sig: signal.Signals = signal.SIGTERM) -> tuple[int, str, str]:
        self.process.send_signal(sig)
        out, err = self.process.communicate(timeout=30)
        return self.process.returncode, out, err


def exported(path: Path) -> dict[str, str]:
    """The variables of an .env file, as a shell reads them."""
    script = f". '{path}'; env -0"
    out = subprocess.run(["sh", "-c", script], capture_output=True, env={}, check=True).stdout.decode()
    return dict(v.split("=", 1) for v in out.split("\0") if "=" in v)


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_two_lines_a_session_and_one_line_at_the_end(vllm: str, tmp_path: Path, sig: signal.Signals) -> None:
    journal = tmp_path / "my calls"
    verb = Verb("--upstream", vllm, "--port", "0", "--journal", str(journal), "--session", "try", "--max-tokens", "9")
    assert verb.lines[0] == f"recording m at {vllm}/v1 (vllm, 4096 tokens)\n"
    assert verb.lines[2] == f"session try is open: . '{journal}/try.env'\n"
    env = exported(journal / "try.env")
    assert stat.S_IMODE((journal / "try.env").stat().st_mode) == 0o600
    assert env["OPENAI_BASE_URL"] == f"{verb.base}/s/try/v1" and env["ANTHROPIC_BASE_URL"] == f"{verb.base}/s/try"
    assert env["OPENAI_API_KEY"] == env["ANTHROPIC_API_KEY"] == env["ANTHROPIC_AUTH_TOKEN"]
    headers = {"authorization": f"Bearer {env['OPENAI_API_KEY']}"}
    body = {"model": "gpt-x", "messages": [{"role": "user", "content": "hi"}]}
    got = httpx.post(f"{env['OPENAI_BASE_URL']}/chat/completions", headers=headers, json=body).json()
    assert got["choices"][0]["message"]["content"] == "echo hi"
    opened = httpx.post(f"{verb.base}/sessions", headers={"authorization": f"Bearer {verb.key}"})
    assert opened.status_code == 201
    assert verb.end(sig) == (0, f"ended; calls recorded: 1; journal: {journal}\n", "")
    first, call, _, second, *closes = read(journal)
    assert (first["episode_id"], first["policy_version"], first["context_window"]) == ("try", "m@/models/m", 4096)
    assert (call["response"]["content"], call["sampling"]["max_tokens"]) == ("echo hi", 9)
    assert second["episode_id"] == opened.json()["episode_id"]
    # Nobody closed them: they are as if their agents had been killed.
    assert {(r["record"], r["episode_id"], r["harness_exited"], r["policy_failed"]) for r in closes} == {
        ("close", episode_id, False, None) for episode_id in ("try", second["episode_id"])
    }
    assert len(closes) == 2


def test_a_session_that_was_closed_is_not_closed_again(vllm: str, tmp_path: Path) -> None:
    verb = Verb("--upstream", vllm, "--port", "0", "--journal", str(tmp_path), "--session", "try")
    headers = {"authorization": f"Bearer {verb.key}"}
    done = httpx.post(f"{verb.base}/sessions/try/close", headers=headers, json={"harness_exited": True})
    assert (done.status_code, verb.end()[0]) == (200, 0)
    assert [(r["record"], r.get("harness_exited")) for r in read(tmp_path)] == [("open", None), ("close", True)]


def test_a_key_of_ones_own_is_not_shown(vllm: str, tmp_path: Path) -> None:
    key = "a-key-of-my-own-12345"
    verb = Verb("--upstream", vllm, "--port", "0", "--journal", str(tmp_path), OPENFORGE_PROXY_KEY=key)
    assert verb.key == "$OPENFORGE_PROXY_KEY" and key not in "".join(verb.lines)
    assert httpx.get(f"{verb.base}/health", headers={"authorization": f"Bearer {key}"}).status_code == 200
    assert httpx.get(f"{verb.base}/health").status_code == 401
    assert verb.end()[0] == 0


def test_replicas_and_a_key_for_them(tmp_path: Path) -> None:
    apps = [mock_vllm.app("m", "sk-vllm", max_model_len=2000) for _ in range(2)]
    with running(apps[0]) as one, running(apps[1]) as two, socket.create_server(("127.0.0.1", 0)) as closed:
        dead = f"http://127.0.0.1:{closed.getsockname()[1]}"
        closed.close()
        words = [w for url in (dead, one, two) for w in ("--upstream", url)]
        verb = Verb(*words, "--port", "0", "--journal", str(tmp_path), "--key-env", "MY_KEY", MY_KEY="sk-vllm")
    assert verb.lines[0] == f"recording m at {dead}/v1, {one}/v1, {two}/v1 (vllm, 2000 tokens)\n"
    code, _, err = verb.end()
    assert code == 0 and f"--upstream {dead}: {dead}/v1/models cannot be reached" in err and "sk-vllm" not in err


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["proxy", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    return err.removeprefix("error: ")


def cards(*names: str, **card: Any) -> web.Application:
    """A MOCK server that lists models and does nothing else."""
    made = web.Application()

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": n, "owned_by": "someone"} | card for n in names]})

    made.router.add_get("/v1/models", models)
    return made


def test_what_cannot_be_started_is_one_sentence(
    vllm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENFORGE_PROXY_KEY", raising=False)
    journal = ("--port", "0", "--journal", str(tmp_path / "j"))
    dead = "http://127.0.0.1:9"
    assert refused(capsys, "--upstream", dead, *journal).startswith(
        f"--upstream {dead}: {dead}/v1/models cannot be reached"
    )
    for url in ("127.0.0.1:8000", "ftp://h", "http://", "http://u:sk-canary@h/v1", "http://h/v1?key=sk-canary"):
        told = refused(capsys, "--upstream", url, *journal)
        assert told.startswith("--upstream must be http://HOST:PORT/v1") and "canary" not in told
    one = ("--upstream", vllm, *journal)
    assert "--key-env names NO_SUCH_KEY, which is not set" in refused(capsys, *one, "--key-env", "NO_SUCH_KEY")
    assert "--max-tokens is 0; it must be 1 or more" in refused(capsys, *one, "--max-tokens", "0")
    assert "--tls-key has no effect without --tls-cert" in refused(capsys, *one, "--tls-key", "k.pem")
    assert "no TLS with c.pem: No such file" in refused(capsys, *one, "--tls-cert", "c.pem")
    assert "sampling.temperature is NaN" in refused(capsys, *one, "--temperature", "nan")
    assert "sampling.top_p is 0.0; it must be greater than 0" in refused(capsys, *one, "--top-p", "0")
    for option in ("--call-seconds", "--fsync"):
        for value in ("0", "-1", "nan", "inf"):
            told = refused(capsys, *one, option, value)
            assert told == f"{option} is {float(value)}; it must be a number of seconds above 0\n"
    told = refused(capsys, "--upstream", vllm, "--port", "99999", "--journal", str(tmp_path / "j"))
    assert told == "--port is 99999; it must be 65535 or less (0 takes a free one)\n"
    assert "key 'episode_id' is 'a/b'" in refused(capsys, *one, "--session", "a/b")
    monkeypatch.setenv("OPENFORGE_PROXY_KEY", "short")
    assert "OPENFORGE_PROXY_KEY must be at least 16" in refused(capsys, *one)
    monkeypatch.delenv("OPENFORGE_PROXY_KEY")
    monkeypatch.setenv("OPFORGE_VLLM_PROXY_PUBLIC_IP", "192.0.2.1")
    assert "OPFORGE_VLLM_PROXY_PUBLIC_PORT is not set" in refused(capsys, *one)
    monkeypatch.setenv("OPFORGE_VLLM_PROXY_PUBLIC_PORT", "8443")
    for name in ("OPFORGE_VLLM_PROXY_TLS_CERT", "OPFORGE_VLLM_PROXY_TLS_KEY"):
        monkeypatch.setenv(name, "c.pem")
        told = f"{name} has no effect without --tls-cert: give the files by --tls-cert and --tls-key\n"
        assert refused(capsys, *one) == told
        monkeypatch.delenv(name)
    monkeypatch.delenv("OPFORGE_VLLM_PROXY_PUBLIC_IP")
    monkeypatch.delenv("OPFORGE_VLLM_PROXY_PUBLIC_PORT")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        told = refused(capsys, "--upstream", vllm, "--port", port, "--journal", str(tmp_path / "k"))
        assert f"cannot listen on 127.0.0.1, port {port}: Address already in use" in told
    (tmp_path / "file").touch()
    assert f"{tmp_path}/file: " in refused(capsys, "--upstream", vllm, "--port", "0", "--journal", f"{tmp_path}/file")


def test_a_policy_that_is_left_open_is_one_sentence(
    vllm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = ("--port", "0", "--journal", str(tmp_path / "j"))
    with running(cards("a", "b")) as two, running(cards("m")) as plain, running(cards("n", owned_by="vllm")) as other:
        assert "lists several models (a, b); name the one to ask for in --model" in refused(
            capsys, "--upstream", two, *journal
        )
        told = refused(capsys, "--upstream", plain, *journal)
        assert told == f"--upstream {plain} does not tell the context window of m; give --context-window N\n"
        told = refused(capsys, "--upstream", plain, *journal, "--context-window", "9", "--top-k", "5")
        assert "sampling.top_k is 5, for which an OpenAI-compatible endpoint has no field" in told
        told = refused(capsys, "--upstream", vllm, "--upstream", other, *journal)
        assert told == f"--upstream {other} does not list m, which {vllm} serves\n"
        told = refused(capsys, "--upstream", vllm, "--upstream", plain, *journal)
        assert told == f"--upstream {vllm} and {plain} take other fields; replicas are alike, or name --api\n"


def test_replicas_with_other_weights_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENFORGE_PROXY_KEY", raising=False)
    card = {"owned_by": "vllm", "root": "/w/1", "max_model_len": 4096}
    with (
        running(cards("m", **card)) as one,
        running(cards("m", **card | {"root": "/w/2"})) as two,
        running(cards("m", **card | {"max_model_len": 2048})) as short,
    ):
        for url, key, value, first in ((two, "root", "/w/2", "/w/1"), (short, "max_model_len", "2048", "4096")):
            words = ("--upstream", one, "--upstream", url, "--port", "0", "--journal", str(tmp_path / "j"))
            assert refused(capsys, *words) == (
                f"--upstream {url} serves m with {key} {value}, {one} with {first}; replicas serve one policy\n"
            )
        # Who says which weights and which window they are is believed.
        verb = Verb("--upstream", one, "--upstream", two, "--port", "0", "--journal", str(tmp_path / "k"),
                    "--policy-version", "step-7")  # fmt: skip
        assert verb.end()[0] == 0
    assert not (tmp_path / "j").exists()


# ---- openforge sql --journal ---------------------------------------------------------------------
async def record(rig: Rig) -> None:
    """Two sessions: a two-call thread whose harness exited, and one call of a session that is still open."""
    rig.session("a")
    system = {"role": "system", "content": "be kind"}
    thread = [system, *chat("q", "ok 1", "r")["messages"]]
    assert (await rig.ask({"messages": thread[:2]}, episode_id="a"))[0] == 200
    assert (await rig.ask({"messages": thread}, episode_id="a"))[0] == 200
    rig.session("b")
    assert (await rig.ask({"messages": thread[:2]}, episode_id="b"))[0] == 200
    await rig.gate.sessions["a"].close(harness_exited=True)


def sql(capsys: pytest.CaptureFixture[str], folder: Path, query: str) -> Any:
    assert cli.main(["sql", "--journal", str(folder), query, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


async def test_sql_over_a_journal(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    await record(rig)
    query = "select episode_id, call, thread, parent, prompt_tokens, response_token_ids, trainable, reason from calls"
    rows = sql(capsys, rig.journal_folder, f"{query} order by 1, 2")
    # The mock's ids are the bytes of START role newline text END, and of the head of the answer.
    first = 1 + len("system\nbe kind") + 1 + 1 + len("user\nq") + 1 + 1 + len("assistant\n")
    second = first + len("ok 1") + 1 + 1 + len("user\nr") + 1 + 1 + len("assistant\n")
    assert [tuple(r.values()) for r in rows] == [
        ("a", 0, 0, None, first, [*b"ok 1", 257], True, None),
        ("a", 1, 0, 0, second, [*b"ok 2", 257], True, None),
        ("b", 0, 0, None, first, [*b"ok 3", 257], False, "unconfirmed"),
    ]
    joined = "select count(*) as n, any_value(decode(bytes)) as t from calls join blobs on system_sha256 = sha256"
    assert sql(capsys, rig.journal_folder, joined) == [{"n": 3, "t": "be kind"}]


async def test_sql_over_a_journal_that_is_none(rig: Rig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def told(*words: str) -> str:
        assert cli.main(["sql", *words]) == 2
        return capsys.readouterr().err

    assert f"{tmp_path} holds no journal" in told("--journal", str(tmp_path), "from calls")
    assert f"{tmp_path}/no holds no journal" in told("--journal", f"{tmp_path}/no", "from calls")
    assert "takes RUN and QUERY, or --journal DIR and QUERY" in told("demo", "from calls", "--journal", str(tmp_path))
    assert "takes RUN and QUERY, or --journal DIR and QUERY" in told("from calls")
    await record(rig)
    here = str(rig.journal_folder)
    assert "queries are read-only" in told("--journal", here, "drop view calls")
    assert "no_such" in told("--journal", here, "select no_such from calls")
    with open(rig.journal.path, "ab") as f:
        f.write(b"garbage\n")
    assert f"{rig.journal.path}, line " in told("--journal", here, "from calls")
