"""What comes from outside, together: a table of one's own and a plain endpoint, through the real proxy and sandboxes
to the result of the evaluation. The verifier is the example of docs/your-own-tasks.md."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from plain_stub import PlainStub
from shard_rig import make_shard
from stub_harness import StubHarness

from openforge import plan, score, tables
from openforge.config import Cell, ConfigError, EvalConfig
from openforge.config_sandbox import Artifacts, Sandbox
from openforge.eval import evaluate, policies
from openforge.harnesses import Context
from openforge.policy.endpoint import Endpoint
from openforge.proxy.client import KeptProxy, start_proxy
from openforge.rollout import engine
from openforge.rollout.rows import Book, evidence
from openforge.rollout.shard import check_sampling
from openforge.sandboxes import LocalBackend, Owner
from openforge.tasks import raw_tasks

KEEP_ONE = Sandbox(artifacts=Artifacts(most=1))
ROOT = Path(__file__).resolve().parents[2]
# Asks the policy with its instruction and all that it finds in the environment of any process, and does what it says.
AGENT = """
cat > ask.py <<'PY'
import glob, json, os, sys, urllib.request
seen = sys.argv[1] + json.dumps(dict(os.environ))
for path in glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/cmdline"):
    try:
        seen += path + "=" + open(path, errors="replace").read()
    except OSError as e:
        seen += f"{path} refused: {e.strerror};"
body = json.dumps({"model": os.environ["MODEL"], "messages": [{"role": "user", "content": seen}]}).encode()
head = {"authorization": "Bearer " + os.environ["KEY"], "content-type": "application/json"}
url = os.environ["BASE"] + "/v1/chat/completions"
answer = json.load(urllib.request.urlopen(urllib.request.Request(url, body, head)))
open("answer.txt", "w").write(answer["choices"][0]["message"]["content"])
print(os.environ["KEY"])
PY
python3 ask.py "$TASK"
"""


class Agent(StubHarness):
    def files(self, ctx: Context) -> dict[str, bytes]:
        return {"task.sh": AGENT.encode()}

    def env(self, ctx: Context) -> dict[str, str]:
        return {"KEY": ctx.api_key, "BASE": ctx.base_url, "MODEL": ctx.model, "TASK": ctx.instruction}


@pytest.fixture
async def stub() -> AsyncIterator[PlainStub]:
    one = PlainStub()
    await one.start()
    yield one
    await one.stop()


async def run(tmp_path: Path, stub: PlainStub) -> tuple[engine.Shard, list[dict[str, Any]], EvalConfig]:
    """The rollouts of an evaluation of the stub, run; its tasks are the example's."""
    (text,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "your-own-tasks.md").read_text(), re.S)
    (tmp_path / "squares").mkdir()
    (tmp_path / "squares" / "verify.py").write_text(text)
    rows = [{"id": i, "question": f"the square of {n}", "answer": str(n * n)} for i, n in enumerate((12, 31))]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "squares.parquet")
    columns = {"task_id": "id", "instruction": "question"}
    config = EvalConfig.model_validate(
        {
            "model": "tiny-random",
            "policy": stub.url,
            "server": {"model": "gpt-x"},
            "tasks": {"source": "squares.parquet", "columns": columns, "verifier": "squares/verify.py"},
            "cells": [{"name": "a", "split": "train"}],
        }
    )
    tasks = raw_tasks(config.tasks, config.environment, tmp_path / "unused", tmp_path)
    cell: Cell = config.cells[0]
    policy = policies.name("eval_r", config, None)
    table = tables.ROLLOUTS.arrow(plan.eval_table("eval_r", config, tasks, cell, None, policy)).to_pylist()
    partial = tmp_path / "partial"
    endpoint = Endpoint(stub.url, "sk-canary", "gpt-x", 4096, f"none@{stub.url}", "openai")
    proxy = KeptProxy(
        lambda: start_proxy(stub.url, partial / "d" / "journal", upstream_key="sk-canary", model="gpt-x", api="openai")
    )
    try:
        async with LocalBackend(tmp_path / "sandboxes", "r", Owner.current()) as backend:
            one = {"endpoint": endpoint, "concurrency": 1, "attempts": 1, "sandbox": KEEP_ONE, "harness": Agent()}
            book = Book(table, "1", f"none@{stub.url}", None, "artifacts/shard=0001.zip")
            shard = make_shard(partial, stub.url, proxy, backend, table, book=book, **one)
            await shard.run()
    finally:
        await proxy.stop()
    return shard, table, config


async def test_an_endpoint_is_evaluated_on_a_table_of_ones_own(tmp_path: Path, stub: PlainStub) -> None:
    stub.says = ["144"]
    shard, table, _ = await run(tmp_path, stub)
    episodes = shard.book.finished(shard.partial)
    calls, _ = evidence(episodes, shard.partial)
    episodes, calls = tables.EPISODES.arrow(episodes).to_pylist(), tables.CALLS.arrow(calls).to_pylist()
    result = evaluate(episodes, score.Scorer().score_all(episodes, [], []), table)
    assert (result["p"], result["n"], result["missing"]) == (0.5, 2, 0)
    assert result["policy"] == f"{stub.url}#gpt-x" and result["policy_versions"] == [f"none@{stub.url}"]
    assert {(c["trainable"], c["reason"]) for c in calls} == {(False, "no_token_ids")} and len(calls) == 2
    # The stub's usage: 7 and 3 tokens a call.
    assert [(e["prompt_tokens"], e["response_tokens"], e["turns"]) for e in episodes] == [(7, 3, 1)] * 2
    # The harness asks for `policy` whatever is asked upstream.
    assert {b["model"] for b in stub.bodies} == {"gpt-x"} and {c["model"] for c in calls} == {"policy"}


def test_sampling_that_an_endpoint_cannot_take_stops_the_shard() -> None:
    rows = [{"cell": "a", "sampling": {"temperature": 1.0, "top_k": 5}}]
    plain = Endpoint("http://h/v1", "", "m", 4096, "none@http://h/v1", "openai")
    with pytest.raises(ConfigError, match=r"cell a: sampling\.top_k is 5, for which an OpenAI-compatible endpoint has"):
        check_sampling(rows, plain)
    check_sampling(rows, replace(plain, api="vllm"))


async def test_no_secret_of_ours_is_seen_inside_and_no_key_is_kept(
    tmp_path: Path, stub: PlainStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNRELATED_SECRET", "canary-of-the-shell")
    monkeypatch.setenv("MY_KEY", "sk-canary")
    shard, _, _ = await run(tmp_path, stub)
    seen = [b["messages"][0]["content"] for b in stub.bodies]
    assert len(seen) == 2 and set(stub.heads) == {"Bearer sk-canary"}
    keys = [re.search(r'"KEY": "([\w-]{32})"', text) for text in seen]
    for text, key in zip(seen, keys, strict=True):
        # The agent did look: it sees its own key, and the other processes of its sandbox.
        assert key is not None and "/proc/1/environ" in text and "ask.py" in text and "spawner.py" in text
        assert "canary" not in text
    episodes = shard.book.finished(shard.partial)
    calls, blobs = evidence(episodes, shard.partial)
    kept = b"".join(p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())
    kept += repr([episodes, calls, blobs]).encode()
    assert b"canary" not in kept
    for key in keys:
        assert key is not None and key[1].encode() not in kept
    assert kept.count(b"[session key]") >= 2
    (log,) = shard.partial.artifacts.iterdir()
    assert log.read_text().strip() == "[session key]"
