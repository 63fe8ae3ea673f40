"""Engines over many GPUs: keys that do not fit, and what veRL and Megatron make of those that do.

compose.py does the second in one process of the train environment, with Megatron-Core, mbridge and transformers in the
versions of the GPU list; torch is the CPU environment's, and no model is built.
"""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest

from openforge import config as typed
from openforge.software import python_of
from openforge.train import launch
from openforge.train.checks import MEGATRON_MODELS, check_model
from openforge.train.job import TrainError

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FIXTURES = ("claw", "claw_dense", "computeruse")
TRAIN = "model: tiny-random\niterations: 2\ntasks: {source: tiny}\n"
Json = dict[str, Any]


def load(root: Path, text: str, name: str = "mine") -> typed.RunConfig:
    (root / "config").mkdir(exist_ok=True)
    (root / "config" / f"{name}.yaml").write_text(text)
    config = typed.load(name, root).config
    assert isinstance(config, typed.RunConfig)
    return config


def fixture(root: Path, name: str) -> typed.RunConfig:
    return load(root, (HERE / "scale" / f"{name}.yaml").read_text(), name)


ENGINES = [
    (
        "actor: {megatron: {tensor_model_parallel_size: 2}}",
        "key 'actor.megatron' has no effect while actor.strategy is",
    ),
    ("actor: {strategy: megatron}", "actor.strategy megatron needs trainer.device: gpu"),
    ("trainer: {device: gpu}\nactor: {strategy: megatron, fsdp_config: {}}", "key 'actor.fsdp_config' has no effect"),
    (
        "trainer: {device: gpu, nproc_per_node: 8, nnodes: 3}\nactor: {strategy: megatron, megatron: "
        "{tensor_model_parallel_size: 4, pipeline_model_parallel_size: 2, context_parallel_size: 2}}",
        "tensor_model_parallel_size x pipeline_model_parallel_size x context_parallel_size is 16, which does not "
        "divide the 24 processes (trainer.nnodes 3 x nproc_per_node 8)",
    ),
    (
        "trainer: {device: gpu, nproc_per_node: 8}\nactor: {strategy: megatron, megatron: "
        "{tensor_model_parallel_size: 2, expert_model_parallel_size: 8}}",
        "expert_model_parallel_size x expert_tensor_parallel_size x pipeline_model_parallel_size is 16, which does not",
    ),
    (
        "trainer: {device: gpu}\nactor: {strategy: megatron, megatron: {sequence_parallel: false}}",
        "key 'actor.megatron.sequence_parallel' has no effect while tensor_model_parallel_size is 1",
    ),
    (
        "trainer: {device: gpu}\nactor: {strategy: megatron, megatron: {expert_tensor_parallel_size: 1}}",
        "key 'actor.megatron.expert_tensor_parallel_size' has no effect while expert_model_parallel_size is 1",
    ),
    (
        "trainer: {device: gpu}\nactor: {strategy: megatron}\nalgorithm: {adv_estimator: gae}",
        "algorithm.adv_estimator gae has a critic, which is trained with actor.strategy fsdp2 only",
    ),
    (
        "trainer: {device: gpu}\nactor: {strategy: megatron, model: {lora_rank: 8}}",
        "adapters (actor.model.lora_rank) are trained with actor.strategy fsdp2 only",
    ),
    (
        "actor: {fsdp_config: {param_offload: true}}",
        "key 'actor.fsdp_config.param_offload' has no effect while trainer.d",
    ),
    (
        "trainer: {device: gpu}\nactor: {fsdp_config: {offload_policy: true, param_offload: true}}",
        "key 'actor.fsdp_config.offload_policy' keeps all on the CPU",
    ),
    (
        "trainer: {device: gpu, nproc_per_node: 4}\nactor: {fsdp_config: {ulysses_sequence_parallel_size: 3}}",
        "actor.fsdp_config.ulysses_sequence_parallel_size is 3, which does not divide the 4 processes",
    ),
    (
        "trainer: {nproc_per_node: 4}\nactor: {fsdp_config: {fsdp_size: 3}}",
        "actor.fsdp_config.fsdp_size is 3, which does",
    ),
]


@pytest.mark.parametrize(("text", "sentence"), ENGINES)
def test_an_engine_that_does_not_fit_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(typed.ConfigError) as e:
        load(tmp_path, TRAIN + text)
    assert sentence in str(e.value) and "\n" not in str(e.value)


def test_a_row_may_be_as_long_as_those_who_share_it(tmp_path: Path) -> None:
    tokens = {n: fixture(tmp_path, n).actor.row_tokens for n in FIXTURES}
    assert tokens == {"claw": 65536, "claw_dense": 65536, "computeruse": 65536}


def test_transformer_options_show_their_origin(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config/claw.yaml").write_text((HERE / "scale/claw.yaml").read_text())
    shown = typed.describe(typed.load("claw", tmp_path)).splitlines()
    line = next(s for s in shown if "moe_router_dtype" in s)
    assert line.split() == [
        "actor.megatron.override_transformer_config.moe_router_dtype",
        '"fp32"',
        "config/claw.yaml",
    ]


@pytest.mark.parametrize(
    ("name", "model", "sentence"),
    [
        ("claw", {"model_type": "qwen3_moe", "num_experts": 128}, None),
        ("claw", {"model_type": "qwen3"}, "expert_model_parallel_size is 8, but the model in .* has 0 experts"),
        ("claw", {"model_type": "mixtral", "num_local_experts": 4}, "is 8, but the model in .* has 4 experts"),
        ("claw", {"model_type": "qwen3_vl"}, "is a model of type qwen3_vl, which actor.strategy megatron cannot load"),
        ("computeruse", {"model_type": "qwen3_vl"}, None),
    ],
)
def test_a_model_that_megatron_cannot_train(tmp_path: Path, name: str, model: Json, sentence: str | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model))
    if sentence is None:
        check_model(fixture(tmp_path, name), tmp_path)
        return
    with pytest.raises(TrainError, match=sentence):
        check_model(fixture(tmp_path, name), tmp_path)


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> Json:
    """Figures of compose.py."""
    folder = tmp_path_factory.mktemp("compose")
    wanted = ("megatron-core", "mbridge", "einops", "transformers")
    pins = [p for p in (ROOT / "envs/train-gpu.txt").read_text().splitlines() if p.partition("==")[0] in wanted]
    assert len(pins) == len(wanted)
    python = str(python_of("train-cpu"))
    pip = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder / "packages"), *pins]
    subprocess.run(pip, check=True, stdin=subprocess.DEVNULL)
    for name in FIXTURES:
        config = fixture(folder, name).model_dump(mode="json")
        (folder / f"{name}.json").write_text(json.dumps(config))
    env = launch.environment(1)
    done = subprocess.run(
        [python, str(HERE / "compose.py"), str(folder), *FIXTURES],
        env={**env, "PYTHONPATH": f"{folder / 'packages'}:{env['PYTHONPATH']}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result: Json = json.loads((folder / "result.json").read_text())
    return result


@pytest.mark.slow
def test_versions_are_the_gpu_lists(composed: Json) -> None:
    assert composed["versions"] == {"megatron-core": "0.16.1", "mbridge": "0.15.1", "transformers": "5.9.0"}


@pytest.mark.slow
@pytest.mark.parametrize("name", FIXTURES)
def test_verls_own_composition_gives_the_same(composed: Json, name: str) -> None:
    """The keys of a configuration, laid over veRL's hydra defaults, against what our training job builds."""
    ours, theirs = composed[name]["ours"], composed[name]["verl"]
    assert composed[name]["engine"] == ("FSDPEngineConfig" if name == "computeruse" else "McoreEngineConfig")
    assert ours == theirs and len(ours) >= 10


@pytest.mark.slow
def test_replicas_are_megatrons(composed: Json) -> None:
    # Ranks go tensor, context, data, pipeline: rank = t + T (c + C (d + D p)), and a replica's outputs are where t and
    # c are 0 and p is the last stage.
    sizes = {"claw": (2, 2, 2, 32), "claw_dense": (4, 2, 1, 16)}
    for name, (t, c, p, world) in sizes.items():
        d = world // (t * c * p)
        for rank, found in composed[name]["replicas"].items():
            r = int(rank)
            last = r // (t * c * d) == p - 1
            assert found == [r // (t * c) % d, d, last and r % (t * c) == 0], (name, rank)
        assert len(composed[name]["replicas"]) == 4


@pytest.mark.slow
def test_megatron_takes_the_models_and_their_options(composed: Json) -> None:
    found = composed["claw"]["transformer"]
    assert (found["num_moe_experts"], found["moe_router_dtype"], found["expert_tensor_parallel_size"]) == (8, "fp32", 1)
    for name, layers in (("claw", 4), ("claw_dense", 2)):
        found = composed[name]["transformer"]
        assert (found["num_layers"], found["recompute_granularity"], found["bf16"]) == (layers, "full", True)
        assert composed[name]["rotary_base"] == 123456.0
    assert composed["claw"]["optimizer"] == {"adam_beta1": 0.9, "adam_beta2": 0.95, "weight_decay": 0.1, "lr": 1e-6}
    assert composed["models"] == dict.fromkeys(MEGATRON_MODELS, 123456.0)


@pytest.mark.slow
def test_megatrons_schedule_is_the_same(composed: Json) -> None:
    # Up from 0 over 3 steps, half a cosine from 1e-6 to a tenth of it over the next 8, then constant.
    half = [1e-7 + 4.5e-7 * (1 + math.cos(math.pi * i / 8)) for i in range(9)]
    assert composed["claw_dense"]["rates"] == pytest.approx([0.0, 1e-6 / 3, 2e-6 / 3, *half, *[1e-7] * 4], rel=1e-6)
    assert composed["claw"]["rates"] == pytest.approx([1e-6] * 16)
