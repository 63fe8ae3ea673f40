"""The training job in its own environment, against an oracle in plain PyTorch (tests/train/oracle.py).

drive.py does the work in one process of the train environment; what is asserted stands here.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from openforge import tables
from openforge.software import python_of
from openforge.train import launch
from openforge.train.job import Job

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
Json = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("train")


@pytest.fixture(scope="module")
def driven(folder: Path) -> Json:
    """Figures of drive.py."""
    done = subprocess.run(
        [str(python_of("train-cpu")), str(HERE / "drive.py"), str(folder)],
        env=launch.environment(1),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result: Json = json.loads((folder / "result.json").read_text())
    return result


@pytest.mark.parametrize("case", ["bypass", "plain_engine", "recomputed", "token_sum"])
def test_two_chained_iterations_equal_the_oracle(driven: Json, case: str) -> None:
    # Losses of the cases are between 0.01 and 10, gradient norms between 1 and 130.
    found = driven[case]
    assert found["steps"] == 16
    assert found["loss"] < 1e-5
    assert found["grad_norm"] < 1e-3
    # The oracle keeps model and AdamW between iterations, the jobs chain them through files.
    assert found["log_probs"] < 1e-4 < 0.1 < found["moved"]
    assert found["clipped"] > 0
    assert found["untied"]


def test_advantages_are_verls_and_others_stop_the_job(driven: Json) -> None:
    assert driven["advantages"]["worst"] < 1e-5
    assert re.match(
        r"episode e0\.0 of group g0: its advantage in the samples table is .*, but veRL's estimator grpo gives",
        driven["advantages"]["refused"],
    )


def test_shared_prefixes_equal_verls_own_engine(driven: Json) -> None:
    found = driven["engines"]
    assert found["log_probs"] < 1e-5 * found["largest"]
    assert found["entropy"] < 1e-5
    assert found["computed"] < 0.7 * found["raw"]


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_an_episodes_weight_does_not_depend_on_its_rows(driven: Json, mode: str) -> None:
    merged, split = driven["rows"][mode]
    assert split == pytest.approx(merged, rel=1e-4)
    assert all(abs(x) > 1e-3 for x in merged)


def test_the_same_inputs_give_the_same_weights(driven: Json) -> None:
    first, again = driven["repeat"]
    assert first == again


def metrics(path: str | Path) -> dict[tuple[int, str], float]:
    return {(m["step"], m["name"]): m["value"] for m in tables.read_rows(path, tables.METRICS)}


def launched(folder: Path, name: str, **changes: Any) -> Job:
    """The job of the case `bypass`, iteration 1, to be written elsewhere."""
    spec = json.loads((folder / "bypass/metrics1.json").read_text())
    out = folder / name
    places = {
        "checkpoint_out": out / "checkpoints/0001",
        "state_out": out / "state/0001",
        "metrics_out": out / "m.parquet",
    }
    job = Job(**(spec | {k: str(v) for k, v in places.items()}))
    for section, values in changes.items():
        job.config[section].update(values)
    return job


def test_two_processes_give_what_one_gives(driven: Json, folder: Path) -> None:
    said: list[str] = []
    job = launched(folder, "two", trainer={"nproc_per_node": 2})
    launch.train(job, said.append)
    one, two = metrics(folder / "bypass/metrics1.parquet"), metrics(job.metrics_out)
    steps = [s for s in said if s.startswith("step ")]
    assert len(steps) == 8 and steps[0].startswith("step 1/8 loss ")
    for step in range(8):
        for name in ("loss", "actor/pg_loss", "training/trained_tokens"):
            assert two[step, name] == pytest.approx(one[step, name], abs=1e-5)
        assert two[step, "grad_norm"] == pytest.approx(one[step, "grad_norm"], rel=1e-4)
    assert two[0, "training/logprob_diff_max"] == pytest.approx(one[0, "training/logprob_diff_max"], abs=1e-5)
    state = json.loads(Path(job.state_out, "state.json").read_text())
    card = json.loads(Path(job.checkpoint_out, "checkpoint.json").read_text())
    assert state == {"iteration": 1, "policy_version": card["policy_version"], "world_size": 2}
    assert sorted(p.name for p in Path(job.checkpoint_out).iterdir()) == [
        "checkpoint.json",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "probe.json",
    ]
