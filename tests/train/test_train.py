"""The training job in its own environment, against an oracle in plain PyTorch (tests/train/oracle.py).

drive.py does the work in one process of the train environment; what is asserted stands here.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openforge import tables
from openforge.software import python_of
from openforge.train import launch
from openforge.train.job import Job, TrainError

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


CASES = (
    *("bypass", "plain_engine", "recomputed", "token_sum", "dr_grpo", "kl_loss", "schedule"),
    *("gspo", "sapo", "cispo", "gpg", "dro", "dppo_tv", "dppo_kl"),
    *("sft", "gae", "gae_means", "lora", "lora_some", "checkpointing", "micro_rows", "micro_tokens"),
)


@pytest.mark.parametrize("case", CASES)
def test_two_chained_iterations_equal_the_oracle(driven: Json, case: str) -> None:
    found = driven[case]
    assert found["steps"] == 16
    assert found["first_loss"] < 1e-6
    # The others come after Adam has made the differences of the steps before larger.
    assert found["loss"] < 1e-5
    assert found["grad_norm"] < 1e-5
    # The oracle keeps model and AdamW between iterations, the jobs chain them through files.
    assert found["log_probs"] < 1e-4 < 0.1 < found["moved"]
    assert found["smallest"] > 1e-4
    if case not in ("gpg", "dro", "sapo", "sft"):
        assert found["actor/pg_clipfrac"] > 0
    assert found["untied"]
    assert 2 < found["actor/entropy"] < math.log(61)
    # Both iterations have samples of checkpoint 0.
    assert found["training/staleness"] == 1
    assert (found["samples/episodes"], found["samples/dropped/groups/zero_variance"]) == (5, 2)


def test_the_critic_is_trained_and_kept_in_the_state(driven: Json) -> None:
    for case, rate in (("gae", 1e-3), ("gae_means", 1e-5)):
        found = driven[case]
        assert found["vf_loss"] < 1e-5
        assert found["values"] < 1e-4
        assert min(found["vf_losses"]) > 1e-3
        assert set(found["critic_lr"]) == {rate}
    assert driven["gae"]["values"] < 1e-4 < 0.1 < driven["gae"]["values_moved"]
    assert driven["gae"]["critic_clipped"] > 0


def test_adapters_are_in_the_state_and_merged_in_the_checkpoint(driven: Json) -> None:
    # Two layers with four projections of attention and three of the MLP each.
    for case, layers in (("lora", 14), ("lora_some", 4)):
        found = driven[case]
        assert found["adapted"] == layers
        assert found["adapter"] == ["adapter_config.json", "adapter_model.safetensors"]
        assert found["merged"] < 1e-5
        assert found["others_kept"]
    assert driven["bypass"]["adapter"] == []


def test_the_weights_bound_is_reported(driven: Json) -> None:
    # The recorded log-probs have noise of 0.2 around those of temperature 1, and old ones are of 0.7.
    assert 0 < driven["recomputed"]["rollout_corr/rollout_is_ratio_fraction_high"] < 0.5
    assert driven["bypass"]["rollout_corr/rollout_is_ratio_fraction_high"] is None


def test_a_schedule_goes_on_over_iterations_and_ends_at_its_horizon(driven: Json) -> None:
    # Up from 0 over 3 steps, half a cosine from 0.002 to a tenth of it over the next 8, then constant.
    half = [0.0002 + 0.0009 * (1 + math.cos(math.pi * i / 8)) for i in range(9)]
    expected = [0.0, 0.002 / 3, 0.004 / 3, *half, *[0.0002] * 4]
    assert driven["schedule"]["lr"] == pytest.approx(expected)
    assert set(driven["bypass"]["lr"]) == {1e-3}


@pytest.mark.parametrize("kind", ["kl", "abs", "mse", "low_var_kl", "kl+", "abs+", "low_var_kl+"])
def test_each_kl_estimator_equals_the_oracle(driven: Json, kind: str) -> None:
    loss, norm, size = driven["kl"][kind]
    assert loss < 1e-6 and norm < 1e-5 < 0.01 < size


def test_estimators_with_a_plus_have_the_gradient_of_the_squared_one(driven: Json) -> None:
    norms = {kind: found[2] for kind, found in driven["kl"].items()}
    for kind in ("kl+", "abs+", "low_var_kl+"):
        assert norms[kind] == pytest.approx(norms["mse"], rel=1e-4)
    assert norms["kl"] != pytest.approx(norms["mse"], rel=1e-2)


def test_a_loss_that_is_no_number_stops_before_anything_is_written(driven: Json) -> None:
    assert re.match(
        r"iteration 1, step [2-8] of 8: the loss is nan, the gradient norm nan, on samples \w+, \w+, \w+ and 2 more; "
        "nothing was written, checkpoint 0 stays: lower actor.optim.lr",
        driven["diverging"]["refused"],
    )
    assert driven["diverging"]["written"] == []
    # After the last step there is no loss any more to see it by.
    last = driven["diverging_at_last"]
    assert re.match(r"the last step left model\..* without a number; nothing was written", last["refused"])
    assert last["written"] == []


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


@pytest.mark.parametrize(
    "mode", ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
)
def test_an_episodes_weight_does_not_depend_on_its_rows(driven: Json, mode: str) -> None:
    merged, split = driven["rows"][mode]
    assert split == pytest.approx(merged, rel=1e-5)
    assert all(abs(x) > 1e-3 for x in merged)


def test_the_same_inputs_give_the_same_weights(driven: Json) -> None:
    first, again = driven["repeat"]
    assert first == again


def metrics(path: str | Path) -> dict[tuple[int, str], float]:
    return {(m["step"], m["name"]): m["value"] for m in tables.read_rows(path, tables.METRICS)}


def launched(folder: Path, name: str, of: str = "bypass", **changes: Any) -> Job:
    """The job of a case, iteration 1, to be written elsewhere."""
    spec = json.loads((folder / of / "metrics1.json").read_text())
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


@pytest.fixture
def two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A SLURM job of two nodes, both of them this machine: mocks of srun and scontrol."""
    mocks = {
        "scontrol": 'echo "localhost localhost"',
        "srun": """
nodes=1 pids= failed=0
while [ "${1#--}" != "$1" ]; do case $1 in --nodes=*) nodes=${1#*=};; esac; shift; done
for _ in $(seq "$nodes"); do "$@" & pids="$pids $!"; done
for pid in $pids; do wait "$pid" || failed=1; done
exit $failed""",
    }
    for name, body in mocks.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "this[1-2]")
    # It decides over the port.
    monkeypatch.setenv("SLURM_JOB_ID", str(os.getpid()))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ({"trainer": {"nproc_per_node": 2}}, None),
        # A copy of the weights in each process.
        (
            {"trainer": {"nnodes": 2}, "actor": {"fsdp_config": {"fsdp_size": 1}}},
            {"strategy": "fsdp2", "fsdp_size": 1},
        ),
    ],
    ids=["one node", "two nodes"],
)
def test_two_processes_give_what_one_gives(
    driven: Json, folder: Path, two_nodes: None, shape: Json, layout: Json | None
) -> None:
    said: list[str] = []
    job = launched(folder, f"two {len(shape)}", **shape)
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
    assert state == {
        "iteration": 1,
        "policy_version": card["policy_version"],
        "world_size": 2,
        "lora": None,
        "layout": layout,
    }
    assert sorted(p.name for p in Path(job.checkpoint_out).iterdir()) == [
        "checkpoint.json",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "probe.json",
    ]


def test_two_processes_give_what_one_gives_in_every_loss(driven: Json, folder: Path) -> None:
    """Mini-batches of 5 rows leave one process a row short, and the last of each pass has two rows."""
    specs = {}
    for case in CASES:
        job = launched(folder, f"two-{case}", of=case)
        specs[case] = folder / f"two-{case}.json"
        job.write(specs[case])
    python = str(python_of("train-cpu"))
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(HERE / "drive.py")]
    done = subprocess.run(
        [*torchrun, *map(str, specs.values())],
        env=launch.environment(1),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for case, spec in specs.items():
        one, two = metrics(folder / case / "metrics1.parquet"), metrics(Job.read(spec).metrics_out)
        for name in ("loss", "actor/pg_loss", "actor/pg_clipfrac", "actor/entropy", "actor/kl_loss", "critic/vf_loss"):
            expected = [one[step, name] for step in range(8) if (step, name) in one]
            found = [two[step, name] for step in range(8) if (step, name) in two]
            # Sums cancel, so that what a loss is exact to goes by the largest.
            assert found == pytest.approx(expected, abs=1e-5 * max([1.0, *map(abs, expected)])), (case, name)
        assert two[0, "loss"] == pytest.approx(one[0, "loss"], rel=1e-6, abs=1e-6), case


def test_two_processes_that_are_one_replica_give_what_one_gives(driven: Json, folder: Path) -> None:
    """With old log-probs computed anew, so that outputs of both kinds are gathered."""
    job = launched(folder, "replica", of="recomputed")
    job.write(folder / "replica.json")
    python = str(python_of("train-cpu"))
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, str(HERE / "one_replica.py"), str(folder / "replica.json")],
        env=launch.environment(1),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    one, two = metrics(folder / "recomputed/metrics1.parquet"), metrics(job.metrics_out)
    for step in range(8):
        for name in ("loss", "actor/pg_loss", "actor/pg_clipfrac", "training/rows", "perf/tokens"):
            assert two[step, name] == pytest.approx(one[step, name], abs=1e-5), (step, name)
        assert two[step, "grad_norm"] == pytest.approx(one[step, "grad_norm"], rel=1e-4)
    for name in ("rollout_corr/kl", "rollout_corr/rollout_is_mean"):
        assert two[-1, name] == pytest.approx(one[-1, name], abs=1e-6)
    probes = [
        json.loads((Path(p) / "probe.json").read_text())["logprobs"]
        for p in (folder / "recomputed/checkpoints/0001", job.checkpoint_out)
    ]
    assert probes[1] == pytest.approx(probes[0], abs=1e-4)


def killed(job: Job, when: Callable[[str | None], bool]) -> None:
    """Run a job's process and kill it (SIGKILL) once `when` is true of a line it said, or of None, which is asked for
    ever."""
    spec = Path(job.checkpoint_out).parent / "job.json"
    spec.parent.mkdir(parents=True, exist_ok=True)
    job.write(spec)
    argv = launch.command(python_of("train-cpu"), spec, job.typed.trainer)
    child = subprocess.Popen(argv, env=launch.environment(1), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert child.stdout is not None
    os.set_blocking(child.stdout.fileno(), False)
    while child.poll() is None:
        line = child.stdout.readline()
        if when(line.decode() if line else None):
            child.kill()
    assert child.wait() == -signal.SIGKILL
    child.stdout.close()


def test_a_job_killed_at_any_point_and_run_again_gives_the_undisturbed_checkpoint(driven: Json, folder: Path) -> None:
    undisturbed = json.loads((folder / "bypass/metrics1.json").read_text())["checkpoint_out"]
    job = launched(folder, "killed")
    out = Path(job.checkpoint_out)
    killed(job, lambda line: line is not None and "step 3/" in line)
    assert os.listdir(out.parent) == ["job.json"]
    # While state and checkpoint are written: what stands beside the place is another run's to sweep.
    killed(job, lambda line: len(os.listdir(out.parent)) > 1)
    assert not out.exists()
    launch.train(job)
    again, first = (json.loads((Path(p) / "checkpoint.json").read_text()) for p in (out, undisturbed))
    assert again["policy_version"] == first["policy_version"]


def test_a_rank_without_a_gpu_is_one_sentence(driven: Json, folder: Path) -> None:
    job = launched(folder, "no-gpu", trainer={"device": "gpu"})
    job.write(folder / "no-gpu.json")
    trainer = job.typed.trainer
    with pytest.raises(
        TrainError, match=r"^rank 0 of 1 \(process 1 of 1 on .*\) needs a GPU of its own, but torch sees 0"
    ):
        launch._follow(
            launch.command(python_of("train-cpu"), folder / "no-gpu.json", trainer), launch.environment(1), print
        )
    assert not Path(job.checkpoint_out).exists()
