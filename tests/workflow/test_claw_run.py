"""One iteration of a harness mix with every real part: mini-swe-agent, codex, claude and pi, vLLM, veRL.

Then the checkpoint is served by the workflow's target and ended by a signal.
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).resolve().parents[2]
MIX = {"mini_swe_agent", "codex", "claude_code", "pi"}
# The random model's tokens are bytes: the prompts of these harnesses need a window of their own.
WINDOW = 16384
CONFIG = """\
model: model
iterations: 1
tasks: {source: tiny, train: 4, heldout: 1}
data: {train_batch_size: 4}
rollout: {n: 2, shards: 4, concurrency: 4}
harness_mix:
  - {name: mini_swe_agent, config: config/harness/tiny.yaml}
  - {name: codex, instructions: config/harness/claw_small.md}
  - {name: claude_code, bare: true}
  - {name: pi}
limits: {seconds: 120}
sampling: {max_tokens: 16}
server:
  max_model_len: 16384
  kv_cache_gb: 2
  tool_call_parser: hermes
  chat_template: config/templates/plain_or_tools.jinja
actor: {optim: {lr: 1e-3, weight_decay: 0.0}, ppo_mini_batch_size: 16}
trainer: {threads: 1}
cells: [{name: pi, harness: {name: pi}, sampling: {max_tokens: 16}, at: last}]
"""

pytestmark = pytest.mark.slow


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "snakemake", "--nocolor", *words]


def environ() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("OPENFORGE_")}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A clone after `snakemake train_mixed`; it shares the built software environments."""
    root = tmp_path_factory.mktemp("mixed")
    for part in ("Snakefile", "rules", "scripts", "config", "profiles", "envs", "openforge"):
        src = ROOT / part
        (shutil.copytree if src.is_dir() else shutil.copy)(src, root / part)
    (root / ".software").symlink_to(ROOT / ".software")
    (root / "config" / "mixed.yaml").write_text(CONFIG)
    make = "import sys; from pathlib import Path; from openforge.policy.tiny import tiny; tiny(Path(sys.argv[1]))"
    python = ROOT / ".software" / "serve-cpu" / "bin" / "python"
    env = {**environ(), "PYTHONPATH": str(root)}
    subprocess.run([str(python), "-c", make, str(root / "model")], env=env, check=True, timeout=120)
    file = root / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": WINDOW}))
    done = subprocess.run(command("train_mixed"), cwd=root, env=environ(), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    yield root


def rows(root: Path, table: str) -> list[dict[str, Any]]:
    return [
        r
        for f in sorted(root.glob(f"results/mixed/{table}/purpose=train/**/{table}.parquet"))
        for r in pq.ParquetFile(f).read().to_pylist()
    ]


def test_every_harness_of_the_mix_has_its_group_and_is_trained_on(root: Path) -> None:
    groups = {r["group_id"]: r["harness"] for r in rows(root, "rollouts")}
    assert sorted(groups.values()) == sorted(MIX)
    episodes = rows(root, "episodes")
    assert len(episodes) == 8
    harness = {e["episode_id"]: groups[e["group_id"]] for e in episodes}
    # The random model's answers are cut off: codex takes that for an error, and claude asks on beyond its turns.
    ends = {harness[e["episode_id"]]: e["status"] for e in episodes}
    assert ends == dict.fromkeys(MIX, "completed") | {"codex": "agent_error", "claude_code": "budget_exhausted"}
    scores = rows(root, "scores")
    assert len(scores) == 8 and {s["status"] for s in scores} == {"scored"}
    rewards: dict[str, set[float]] = {}
    for s in scores:
        rewards.setdefault(harness[s["episode_id"]], set()).add(s["reward"])
    # A group whose rewards differ is trained on, whichever harness it had.
    varied = {name for name, values in rewards.items() if len(values) > 1}
    assert varied
    assert {harness[s["episode_id"]] for s in rows(root, "samples")} == varied
    cards = [
        json.loads((root / f"results/mixed/checkpoints/{k}/checkpoint.json").read_text()) for k in ("0000", "0001")
    ]
    assert cards[0]["sha256"] != cards[1]["sha256"]
    cell = json.loads((root / "results/mixed/eval/cell=pi/iteration=0001/eval.json").read_text())
    assert (cell["harness"], cell["policy"], cell["episodes"], cell["missing"]) == ("pi", "mixed@1", 1, 0)


def test_the_checkpoint_is_served_until_a_signal(root: Path) -> None:
    served = subprocess.Popen(
        command("serve_mixed"),
        cwd=root,
        env=environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert served.stdout is not None
    said, deadline = "", time.monotonic() + 300
    try:
        while "  model     " not in said:
            assert time.monotonic() < deadline and served.poll() is None, said
            if select.select([served.stdout], [], [], 1.0)[0]:
                said += os.read(served.stdout.fileno(), 65536).decode()
        assert "mixed@1 (" in said
        url, key, model = (re.search(rf"{k} +(\S+)", said)[1] for k in ("base URL", "API key", "model  "))  # type: ignore[index]
        ask = {"model": model, "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 4}
        answer = httpx.post(f"{url}/chat/completions", json=ask, headers={"Authorization": f"Bearer {key}"}, timeout=60)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4
        assert httpx.post(f"{url}/chat/completions", json=ask, timeout=60).status_code == 401
    finally:
        # As Ctrl-C does: to the whole group of the terminal.
        os.killpg(served.pid, signal.SIGINT)
        served.communicate(timeout=120)
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, timeout=10)
