"""Where a training job's processes run: its command lines, what SLURM is asked for, and a process without a GPU."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from snakemake_executor_plugin_slurm.submit_string import get_submit_command
from snakemake_executor_plugin_slurm.utils import set_gres_string

from openforge.config_training import Trainer
from openforge.train import launch
from openforge.train.checks import check_device
from openforge.train.job import TrainError
from openforge.train.slurm import resources

HERE = Path(__file__).parent
SHAPES: dict[str, dict[str, Any]] = {
    "one process": {},
    "one node": {"nproc_per_node": 2},
    "one node of GPUs": {"device": "gpu", "nproc_per_node": 8},
    "four nodes of GPUs": {"device": "gpu", "nproc_per_node": 8, "nnodes": 4},
    "two nodes of CPUs": {"nnodes": 2, "nproc_per_node": 2, "threads": 4},
}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The environment of job 4711, with a mock of scontrol that knows its nodes."""
    mock = tmp_path / "bin/scontrol"
    mock.parent.mkdir()
    mock.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        '"show hostnames gpu[07-09,12]") printf "gpu07\\ngpu08\\ngpu09\\ngpu12\\n";;\n'
        '"show hostnames gpu[07-08]") printf "gpu07\\ngpu08\\n";;\n'
        "*) echo 'Invalid hostlist' >&2; exit 1;;\n"
        "esac\n"
    )
    mock.chmod(0o755)
    monkeypatch.setenv("PATH", f"{mock.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[07-09,12]")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "64")
    return mock


def line(trainer: Trainer) -> str:
    return shlex.join(launch.command(Path("/env/bin/python"), Path("/results/.0001.job.json"), trainer))


class Resources(dict[str, Any]):
    """Resources of a job as the plugin reads them."""

    __getattr__ = dict.__getitem__


def submitted(trainer: Trainer) -> str:
    """The plugin's own submission of a training job."""
    job = SimpleNamespace(resources=Resources(resources(trainer)), threads=1)
    names = ("run_uuid", "slurm_logfile", "comment_str", "account", "partition", "workdir")
    # The plugin appends generic resources itself.
    return " ".join((get_submit_command(job, dict.fromkeys(names, "")) + set_gres_string(job)).split())


def test_launch_lines_are_those_expected(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for name, keys in SHAPES.items():
        trainer = Trainer.model_validate(keys)
        monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[07-08]" if trainer.nnodes == 2 else "gpu[07-09,12]")
        found += [f"# {name}", line(trainer), submitted(trainer), ""]
    assert "\n".join(found) == (HERE / "launch_lines.txt").read_text()


def test_nodes_are_those_of_a_slurm_job(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrainError, match=r"trainer.nnodes is 2, but job 4711 has the nodes gpu07 gpu08 gpu09 gpu12"):
        line(Trainer(nnodes=2))
    monkeypatch.setenv("SLURM_JOB_NODELIST", "other")
    with pytest.raises(TrainError, match=r"has the nodes none \(other: Invalid hostlist\); set trainer.nnodes"):
        line(Trainer(nnodes=4))
    monkeypatch.delenv("SLURM_JOB_NODELIST")
    with pytest.raises(TrainError, match=r"trainer.nnodes is 4, but this is no SLURM job .* set trainer.nnodes to 1"):
        line(Trainer(nnodes=4))


def test_a_node_without_scontrol(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm.unlink()
    monkeypatch.setenv("PATH", str(slurm.parent))
    with pytest.raises(TrainError, match=r"scontrol, which names them, cannot be run: .*No such file"):
        line(Trainer(nnodes=4))


def test_two_jobs_do_not_meet(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(nnodes=4)
    one = line(trainer)
    monkeypatch.setenv("SLURM_JOB_ID", "4712")
    assert "gpu07:19711" in one and "gpu07:19712" in line(trainer)


def test_loopback_is_for_one_node_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert launch.environment(1)["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in launch.environment(1, nodes=2)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert launch.environment(1, nodes=2)["GLOO_SOCKET_IFNAME"] == "ib0"


def test_a_process_without_a_gpu_of_its_own() -> None:
    trainer = Trainer(device="gpu", nproc_per_node=4, nnodes=2)
    env = {"RANK": "6", "WORLD_SIZE": "8", "LOCAL_RANK": "2"}
    with pytest.raises(TrainError) as e:
        check_device(trainer, env, 2)
    assert str(e.value).startswith(f"rank 6 of 8 (process 3 of 4 on {os.uname().nodename}) needs a GPU of its own, but")
    assert "torch sees 2 there" in str(e.value)
    check_device(trainer, env, 3)
    check_device(Trainer(), env, 0)
