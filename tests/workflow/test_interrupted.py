"""A command that was killed goes on when it is typed again; one that lives is named. The rules are the real ones."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_dag import STUB, stubbed

from openforge import clock, run_lock, run_start
from openforge.policy import process

ROOT = Path(__file__).resolve().parents[2]
# A rollout that tells its pid and ends only when it is told to.
BLOCKED = """\
import os, threading
from pathlib import Path
from openforge.job import job
with job("rollout", snakemake) as j:
    (j.run_dir / "blocked").write_text(str(os.getpid()))
    threading.Event().wait()
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The workflow with stubs for jobs; the rollouts of run tiny wait for ever, those of run other do not."""
    root = tmp_path / "clone"
    root.mkdir()
    stubbed(root)
    indented = BLOCKED.replace("\n", "\n    ")
    other = STUB.replace("\n", "\n    ")
    text = f"if snakemake.wildcards.run == 'tiny':\n    {indented}\nelse:\n    {other}\n"
    (root / "scripts" / "rollout.py").write_text(text)
    shutil.copy(root / "config" / "tiny.yaml", root / "config" / "other.yaml")
    return root


class Commands:
    """Snakemake commands in a clone; whatever of them lives at the end is killed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.children: list[subprocess.Popen[str]] = []

    def start(self, *words: str) -> subprocess.Popen[str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith("OPENFORGE_")}
        # pytest may run in the background, where SIGINT is ignored.
        command = ["env", "--default-signal=INT", sys.executable, "-m", "snakemake", "--nocolor", *words]
        child = subprocess.Popen(
            command,
            cwd=self.root,
            env=env | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.children.append(child)
        return child

    def run(self, *words: str) -> tuple[int, str]:
        child = self.start(*words)
        out, _ = child.communicate(timeout=120)
        return child.returncode, out

    def blocked(self, child: subprocess.Popen[str]) -> process.Identity:
        """The rollout job of run tiny, once it waits."""
        file = self.root / "results" / "tiny" / "blocked"
        wait(lambda: (file.exists() and file.read_text() != "") or child.poll() is not None)
        assert child.poll() is None, child.communicate()[0]
        who = process.identity(int(file.read_text()))
        file.unlink()
        assert who is not None
        return who


def wait(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.02)


@pytest.fixture
def commands(clone: Path) -> Iterator[Commands]:
    made = Commands(clone)
    yield made
    for child in made.children:
        if child.poll() is None:
            child.kill()
        child.communicate()


@pytest.mark.slow
def test_a_live_owner_is_one_sentence_and_another_run_goes_on_beside_it(commands: Commands) -> None:
    first = commands.start("train_tiny")
    job = commands.blocked(first)
    code, out = commands.run("train_tiny")
    assert code == 1 and "Traceback" not in out
    assert f"run tiny has a live owner: process {first.pid} on {os.uname().nodename}, at work since 20" in out
    assert "train_tiny); wait until it ends, or end it" in out
    code, out = commands.run("train_other")
    assert code == 0, out
    # Neither the refused command nor the other run's touched it; looking is always allowed.
    assert commands.run("-n", "train_tiny")[0] == 0
    assert process.alive(job) and first.poll() is None


@pytest.mark.slow
def test_after_kill_9_the_same_command_goes_on(commands: Commands) -> None:
    first = commands.start("train_tiny")
    job = commands.blocked(first)
    first.kill()
    first.wait()
    # The job ends with its owner, and the dead command's locks of Snakemake's are no obstacle.
    wait(lambda: not process.alive(job))
    assert list((commands.root / ".snakemake" / "locks").iterdir())
    second = commands.start("train_tiny")
    commands.blocked(second)
    (commands.root / "scripts" / "rollout.py").write_text(STUB)
    second.kill()
    code, out = commands.run("train_tiny")
    assert code == 0, out
    assert commands.run("train_tiny")[1].count("Nothing to be done") == 1
    assert run_lock.read(commands.root / "results" / "tiny") is None


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_jobs_and_says_what_is_kept(commands: Commands, sign: signal.Signals) -> None:
    first = commands.start("train_tiny")
    job = commands.blocked(first)
    first.send_signal(sign)  # to Snakemake alone
    out, _ = first.communicate(timeout=60)
    assert first.returncode not in (0, None) and not process.alive(job)
    assert "stay in results/tiny; the same command goes on" in out
    assert "interrupted: rollout of tiny" in out and "Traceback" not in out, out


def test_orphans_of_this_run_end_first_and_no_others(tmp_path: Path) -> None:
    root = tmp_path.resolve()
    dead = subprocess.Popen(["sleep", "60"])
    gone = process.identity(dead.pid)
    dead.kill()
    dead.wait()
    made = []

    def job(runs: str, owner: object, at: Path = root) -> subprocess.Popen[bytes]:
        env = {"OPENFORGE_RUNS": runs, "OPENFORGE_OWNER": str(owner), "OPENFORGE_ROOT": str(at)}
        made.append(subprocess.Popen(["/bin/sleep", "600"], env=env))
        return made[-1]

    try:
        orphan, other_run = job("tiny", gone), job("other", gone)
        other_place, owned = job("tiny", gone, Path("/nowhere")), job("tiny", process.this())
        # A child shows its parent's environment until it has become its program.
        wait(lambda: len(run_start.orphans(root, ["tiny", "other"], False)) == 2)
        assert run_start.end_orphans(root, ["tiny"], alone=False) == 1
        assert orphan.wait(10) == -signal.SIGTERM
        assert [p.poll() for p in (other_run, other_place, owned)] == [None, None, None]
    finally:
        for p in made:
            p.kill()
            p.wait()


@pytest.mark.slow
def test_a_file_that_stands_is_not_incomplete(clone: Path, commands: Commands) -> None:
    (clone / "scripts" / "rollout.py").write_text(STUB)
    part = "purpose=train/cell=train/iteration=0001/shard=0001"
    output = f"results/tiny/episodes/{part}/episodes.parquet"
    assert commands.run(output)[0] == 0
    # As Snakemake 9.27 names its mark, when it is killed between a job's end and taking notice of it.
    from snakemake.persistence.file import FilePersistence

    marks = FilePersistence(path=clone / ".snakemake")
    marks._mark_incomplete(output, None)
    assert "rule rollout" in commands.run("-n", output)[1]
    code, out = commands.run(output)
    assert code == 0 and "Nothing to be done" in out


def test_half_written_files_are_put_away(tmp_path: Path) -> None:
    run = tmp_path / "tiny"
    for name in ("checkpoints/.0001.0a1b2c3d.tmp", "checkpoints/0001", "tasks/.mine.0a1b2c3d.tmp"):
        (run / name).mkdir(parents=True)
    for name in ("scores/.scores.parquet.0a1b2c3d.tmp", "checkpoints/.0001.0a1b2c3d.job.json", "scores/scores.parquet"):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).touch()
    run_start.put_away(run)
    left = sorted(str(p.relative_to(run)) for p in run.rglob("*") if not p.is_dir() or not any(p.iterdir()))
    assert left == ["checkpoints/0001", "scores/scores.parquet", "tasks/.mine.0a1b2c3d.tmp"]


def held_elsewhere(run_dir: Path, slurm_job: str | None) -> None:
    owner = {"host": "node-of-another-world", "boot": "b", "pid": 17, "start": 4}
    data = {"owner": owner, "since": "2026-11-30T08:00:00+00:00", "command": "snakemake", "slurm_job": slurm_job}
    run_lock.lock_file(run_dir).parent.mkdir(parents=True)
    run_lock.lock_file(run_dir).write_text(json.dumps(data))


def test_an_owner_on_another_machine_counts_as_alive(tmp_path: Path) -> None:
    held_elsewhere(tmp_path, None)
    with pytest.raises(run_lock.RunBusy, match=r"process 17 on node-of-another-world.*remove .*run.json"):
        run_lock.take(tmp_path, "snakemake")


@pytest.mark.parametrize(
    ("answer", "busy"),
    [
        ("echo RUNNING", True),
        ("exit 0", False),  # known no longer
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", False),
        ("echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1", True),
    ],
)
def test_a_lock_of_a_slurm_job_is_stale_when_the_job_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, busy: bool
) -> None:
    # squeue stands for SLURM here; its answers are those of slurm 22.05.
    (tmp_path / "bin").mkdir()
    squeue = tmp_path / "bin" / "squeue"
    squeue.write_text(f"#!/bin/sh\n{answer}\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    held_elsewhere(tmp_path / "run", "4711")
    if busy:
        with pytest.raises(run_lock.RunBusy):
            run_lock.take(tmp_path / "run", "snakemake")
    else:
        run_lock.take(tmp_path / "run", "snakemake")
        assert run_lock.held(tmp_path / "run")


def test_a_clock_that_is_set_back_costs_no_output(clone: Path, commands: Commands) -> None:
    # While the job runs, the clock goes back: its input is suddenly of the future.
    inside = STUB.replace("\n", "\n    ")
    back = "import os, time\n    t = time.time() + 3600\n    os.utime(snakemake.input.tasks, (t, t))"
    text = f"from openforge.job import job\nwith job('plan', snakemake):\n    {inside}\n    {back}\n"
    (clone / "scripts" / "plan.py").write_text(text)
    target = "results/tiny/rollouts/purpose=train/cell=train/iteration=0001/rollouts.parquet"
    code, out = commands.run(target)
    assert code == 0, out
    assert "Nothing to be done" in commands.run(target)[1]


def test_files_of_the_future_keep_their_order(tmp_path: Path) -> None:
    now = time.time()
    dates = {"a": now - 50, "b": now + 3600, "c": now + 3610, "d": now + 3605}
    for name, t in dates.items():
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (t, t))
    assert clock.date_anew(tmp_path) == 3
    assert sorted(dates, key=lambda n: (tmp_path / n).stat().st_mtime_ns) == ["a", "b", "d", "c"]
    assert all((tmp_path / n).stat().st_mtime <= time.time() for n in dates)
