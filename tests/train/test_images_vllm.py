"""Screenshots from end to end: a harness shows them to a real vLLM through the proxy, samples puts them into rows, and
the training job sees the same: its log-probs are the sampler's, and its gradient goes through the vision tower."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from proxy_rig import SECRET
from screenshots import png

from openforge import blobs, tables
from openforge.config import RunConfig
from openforge.config import Server as ServerConfig
from openforge.policy.models import prepare
from openforge.policy.server import Server
from openforge.policy.weights import read_checkpoint
from openforge.proxy.client import start_proxy
from openforge.proxy.lineage import call_rows, prompt_ids
from openforge.samples.build import Result, build
from openforge.samples.images import Shown, Vision
from openforge.software import python_of
from openforge.train import launch
from openforge.train.job import Job

pytestmark = pytest.mark.slow
Json = dict[str, Any]
HERE = Path(__file__).parent
WINDOW = 2048
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_tokens": 12}
SCREENS = (png(640, 360, 1), png(512, 256, 2), png(300, 180, 3, transparent=True), png(250, 390, 4))
# What each episode of a group sees, turn by turn; one sees nothing.
SEEN = ([SCREENS[0], SCREENS[1]], [SCREENS[2]], [SCREENS[3], SCREENS[2], SCREENS[0]], [])
# Squares of 32 x 32 pixels, by hand: 20 x 11, 16 x 8, 11 x 7 (scaled up to 65536 pixels), 8 x 12.
TOKENS = dict(zip(SCREENS, (220, 128, 77, 96), strict=True))
REWARDS = (1.0, 0.0, 0.5, 0.0)


def shown(data: bytes) -> Json:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(data).decode()}"}}


async def harness(base: str, screens: list[bytes]) -> None:
    """A turn a screen, the first a user's and the others tools' results, and one more."""
    messages: list[Json] = [{"role": "user", "content": [{"type": "text", "text": "go"}, *map(shown, screens[:1])]}]
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {SECRET}"}) as http:
        for turn in range(len(screens) + 1):
            async with http.post(f"{base}/v1/chat/completions", json={"model": "m", "messages": messages}) as r:
                answer = await r.json()
                assert r.status == 200, answer
            messages.append({k: answer["choices"][0]["message"][k] for k in ("role", "content")})
            result = {"role": "tool", "tool_call_id": "c", "content": [*map(shown, screens[turn + 1 : turn + 2])]}
            messages.append(result if result["content"] else {"role": "user", "content": "and now?"})


async def played(server: Server, journal: Path) -> tuple[list[Json], list[Json]]:
    """Rows of calls and of blobs (each once) of the episodes e0, e1, ..."""
    proxy = await start_proxy(f"http://127.0.0.1:{server.port}", journal, upstream_key=server.api_key, port=0)
    try:
        names = [f"e{i}" for i in range(len(SEEN))]
        for i, name in enumerate(names):
            await proxy.open_session(
                name,
                secret=SECRET,
                sampling=SAMPLING,
                limits={},
                deadline_seconds=300,
                policy_version=server.version or "",
                context_window=WINDOW,
                seed=i,
            )
        base = f"http://127.0.0.1:{proxy.port}/s"
        await asyncio.gather(*(harness(f"{base}/{n}", screens) for n, screens in zip(names, SEEN, strict=True)))
        rows = [call_rows((await proxy.close_session(n, harness_exited=True)).records) for n in names]
        return [c for calls, _ in rows for c in calls], list({b["sha256"]: b for _, bs in rows for b in bs}.values())
    finally:
        await proxy.stop()


class Recorded:
    """A prepared model, its running server, and the tables of what was played."""

    def __init__(self, folder: Path, server: Server) -> None:
        self.folder, self.server, self.base = folder, server, folder / "checkpoints/0000"
        self.calls, rows = asyncio.run(played(server, folder))
        self.blobs = folder / "blobs.parquet"
        tables.write_table(self.blobs, tables.BLOBS, rows)

    def samples(self, name: str, config: RunConfig) -> tuple[Path, Result]:
        at = datetime(2026, 1, 1, tzinfo=UTC)
        episodes = [
            {"episode_id": f"e{i}", "rollout_id": f"r{i}", "group_id": "g", "status": "completed", "iteration": 1}
            | {"final": True}
            for i in range(len(SEEN))
        ]
        scores = [
            {"episode_id": f"e{i}", "status": "scored", "reward": r, "passed": r > 0, "components": "{}"}
            | {"scored_at": at}
            for i, r in enumerate(REWARDS)
        ]
        shows = Shown(Vision.of(self.base), blobs.sizes([self.blobs]))
        result = build(episodes, scores, self.calls, config, (), shows)
        tables.write_table(self.folder / f"{name}.parquet", tables.SAMPLES, result.samples)
        return self.folder / f"{name}.parquet", result

    def job(self, name: str, config: RunConfig, samples: Path, **changes: Any) -> Job:
        out = self.folder / name
        places = {"checkpoint_out": out / "checkpoints/0001", "state_out": out / "state/0001", "metrics_out": out / "m"}
        return Job(
            run=name,
            iteration=1,
            checkpoint_in=str(self.base),
            state_in=None,
            samples=str(samples),
            **{k: str(v) for k, v in places.items()},
            config=config.model_dump(mode="json"),
            config_digest="d",
            blobs=[str(self.blobs)],
            **changes,
        )

    def oracle(self, samples: Path) -> Json:
        argv = [
            str(python_of("train-cpu")),
            str(HERE / "images_oracle.py"),
            *map(str, (self.base, samples, self.blobs)),
        ]
        done = subprocess.run(argv, env=launch.environment(1), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        found: Json = json.loads(done.stdout)
        return found


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    folder = tmp_path_factory.mktemp("images")
    prepare("tiny-random-vl", folder / "checkpoints/0000")
    version = read_checkpoint(folder / "checkpoints/0000")["policy_version"]
    cfg = ServerConfig(max_model_len=WINDOW, max_num_seqs=8)
    server = Server.start(cfg, folder / "checkpoints/0000", version, log=folder / "vllm.log")
    try:
        yield Recorded(folder, server)
    finally:
        server.stop()


def config(**changes: Any) -> RunConfig:
    data: Json = {
        "model": "tiny-random-vl",
        "iterations": 1,
        "tasks": {"source": "tiny"},
        "trainer": {"threads": 1},
        "algorithm": {},
        "actor": {"optim": {"lr": 1e-3, "weight_decay": 0.0}, "ppo_max_token_len_per_gpu": 1024},
    }
    for section, values in changes.items():
        data[section] = data[section] | values
    return RunConfig.model_validate(data)


def metrics(path: str) -> dict[tuple[int, str], float]:
    return {(m["step"], m["name"]): m["value"] for m in tables.read_rows(path, tables.METRICS)}


def test_recorded_calls_hold_the_trainers_image_tokens(recorded: Recorded) -> None:
    image = json.loads((recorded.base / "config.json").read_text())["image_token_id"]
    sizes = {hashlib.sha256(data).hexdigest(): n for data, n in TOKENS.items()}
    assert [c["reason"] for c in recorded.calls] == [None] * 10
    for i, screens in enumerate(SEEN):
        calls = [c for c in recorded.calls if c["episode_id"] == f"e{i}"]
        for c in calls:
            expected = [sizes[s] for s in c["images"]]
            assert len(expected) == min(c["call"] + 1, len(screens))
            assert prompt_ids(calls, c["call"]).count(image) == sum(expected)
    _, result = recorded.samples("counted", config())
    counted = result.report["calls"]
    # The policy may well sample a placeholder: it is as random as all of its tokens.
    assert counted["dropped"].keys() <= {"image_token_sampled"} and counted["trained"] >= 5


def test_grpo_sees_what_the_sampler_saw_and_trains_the_vision_tower(recorded: Recorded) -> None:
    settings = config()
    samples, _ = recorded.samples("grpo", settings)
    job = recorded.job("grpo", settings, samples)
    launch.train(job, lambda _: None)
    found, oracle = metrics(job.metrics_out), recorded.oracle(samples)
    # The server, plain PyTorch and veRL agree; with the same pictures in negative they would not.
    assert oracle["apart"] < 1e-5 and found[0, "training/logprob_diff_max"] < 1e-5 < 0.01 < oracle["other_images"]
    assert found[-1, "training/images"] >= 4
    # At a ratio of 1 the gradient is that of advantage times log-prob.
    assert found[0, "grad_norm"] == pytest.approx(oracle["grad_norm"], rel=1e-4)
    assert oracle["vision_norm"] > 0.01
    # The trained weights are served after a swap, which the probe checks.
    out = Path(job.checkpoint_out)
    recorded.server.swap(out, read_checkpoint(out)["policy_version"])
    assert recorded.server.probe(out, "1") < 1e-4


def test_sft_on_the_same_rows_in_two_processes(recorded: Recorded) -> None:
    settings = config(
        algorithm={"adv_estimator": "sft", "rollout_correction": {"bypass_mode": True}},
        actor={"policy_loss": {"loss_mode": "gpg"}, "model": {"enable_gradient_checkpointing": True}},
        trainer={"nproc_per_node": 2},
    )
    samples, result = recorded.samples("sft", settings)
    assert result.report["episodes"]["dropped"] == {"not_passed": 2}
    job = recorded.job("sft", settings, samples)
    launch.train(job, lambda _: None)
    found, oracle = metrics(job.metrics_out), recorded.oracle(samples)
    assert found[0, "loss"] == pytest.approx(oracle["loss"], rel=1e-5)
    assert found[0, "grad_norm"] == pytest.approx(oracle["grad_norm"], rel=1e-4)
    assert oracle["vision_norm"] > 0.01


REFUSED = """
import json, sys
from pathlib import Path
from openforge.policy.weights import read_checkpoint
from openforge.train.images import load
from openforge.train.rows import row_of
from openforge import tables
from dataclasses import replace
base, samples, *blobs = sys.argv[1:]
rows = [row_of(s) for s in tables.read_rows(samples, tables.SAMPLES)]
row = max(rows, key=lambda r: len(r.images))
(Path(base).parent / "text").mkdir()
(Path(base).parent / "text/config.json").write_text("{}")
said = []
for images, files, folder in (
    (row.images[::-1], blobs, base), (row.images[1:], blobs, base), ((), blobs, base), (("00",), blobs, base),
    (row.images, [], base), (row.images, blobs, str(Path(base).parent / "text")),
):
    try:
        load(Path(folder), [replace(row, images=images)], files, "TABLE")
    except Exception as e:
        said.append(f"{type(e).__name__}: {e}".replace(row.sample_id, "S"))
print(json.dumps(said))
"""


def test_images_that_do_not_fit_their_row_are_refused(recorded: Recorded) -> None:
    samples, _ = recorded.samples("refused", config())
    argv = [str(python_of("train-cpu")), "-c", REFUSED, *map(str, (recorded.base, samples, recorded.blobs))]
    done = subprocess.run(argv, env=launch.environment(1), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout)
    tokens = "TrainError: TABLE: sample S: its image tokens are not those of its images"
    assert all(line.startswith(tokens) and "\n" not in line for line in said[:3])
    assert said[3] == "TrainError: TABLE: sample S shows image 00, which is not in the iteration's blobs"
    assert len(said) == 6 and said[4].endswith("which is not in the iteration's blobs")
    assert said[5].endswith("is a language model") and said[5].startswith("TrainError: TABLE: sample S shows images")
