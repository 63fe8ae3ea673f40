"""`openforge watch RUN`: what it reads off a run's files, without a trace of its own."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import time
from dataclasses import asdict
from datetime import datetime, timedelta
from pathlib import Path

import made_run
import pytest

from openforge import cli, run_lock
from openforge import tables as t
from openforge.rollout.partial import Partial
from openforge.sandboxes.owner import Owner
from openforge.verbs import watch


@pytest.fixture
def third(finished: Path) -> Path:
    """The made run, its third iteration at work: of 8 rollouts 3 have ended, 2 are at work, one of these again."""
    config = finished / "config" / "made.yaml"
    config.write_text(config.read_text().replace("iterations: 2", "iterations: 3"))
    run_dir = finished / "results" / "made"
    raws = [made_run.task(n, "copy", "train") for n in ("t1", "t2")]
    rows = [made_run.rollout(raw, "train", "train", 3, i) for raw in raws for i in range(4)]
    t.write_table(run_dir / t.partition_path("rollouts", "train", "train", 3), t.ROLLOUTS, rows)
    partial = Partial(run_dir / "partial" / "train-train-0003" / "0001", "abc")
    ids = [r["rollout_id"] for r in rows]
    for i, status in ((0, "completed"), (1, "completed"), (2, "agent_timeout"), (3, "sandbox_lost")):
        partial.start(ids[i], 0, made_run.START)
        partial.end(made_run.episode(rows[i], status))
    partial.start(ids[3], 1, made_run.START)
    partial.start(ids[4], 0, made_run.START)
    partial.close()
    with open(partial.folder / "episodes.jsonl", "a") as f:
        f.write('{"event": "start", "rollout_id": "torn')
    logs = finished / "logs" / "made"
    logs.mkdir(parents=True)
    (logs / "train-0002.log").write_text("an older one\n")
    os.utime(logs / "train-0002.log", (1, 1))
    began = datetime.now() - timedelta(seconds=90)
    lines = [
        f"{began:%H:%M:%S} rollout made train 0003 0001: policy at http://127.0.0.1:1/v1",
        "\x1b[31mred",
        "",
        "last",
    ]
    (logs / "rollout-train-train-0003-0001.log").write_text("\n".join(lines) + "\n")
    return finished


def hold(project: Path, owner: Owner) -> str:
    """Write down who works on the run; the line that names it."""
    holder = run_lock.Holder(owner, "2026-01-02T03:04:05+00:00", "snakemake train_made", None)
    file = run_lock.lock_file(project / "results" / "made")
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(asdict(holder)))
    return f"process {owner.pid} on {owner.host}, at work since 2026-01-02T03:04:05+00:00 (snakemake train_made)"


def once(capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert cli.main(["watch", "made", "--once"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out.splitlines()


def test_a_run_at_work(third: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    line = hold(third, Owner.current())
    before = {p: p.lstat().st_mtime_ns for p in third.rglob("*")}
    # Trying the lock would keep out a command that starts at that moment.
    monkeypatch.delattr(fcntl, "flock")
    lines = once(capsys)
    assert {p: p.lstat().st_mtime_ns for p in third.rglob("*")} == before
    assert lines[:2] == ["made: 2 of 3 iterations, 2 of 5 evaluations, unfinished", line]
    job, _, ago = lines[2].removeprefix("running: ").partition(" ")
    assert job == "rollout-train-train-0003-0001" and ago in ("(1:30)", "(1:31)", "(1:32)")
    assert lines[3:] == [
        "train train 3: 3/8 episodes (2 completed, 1 agent_timeout, 2 running, 1 attempts before the last)",
        "mean reward by iteration  1: 0.250  2: 0.714",
        "last lines of logs/made/rollout-train-train-0003-0001.log",
        f"  {(third / 'logs/made/rollout-train-train-0003-0001.log').read_text().splitlines()[0]}",
        "  [31mred",
        "  last",
    ]


def test_a_killed_run(third: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An absent lock, an empty one, a torn one, and one of a process that is dead: nobody works on the run."""
    gone = subprocess.Popen(["sleep", "60"])
    owner = Owner.of(gone.pid)
    assert once(capsys)[1] == "no process works on it"
    line = hold(third, owner)
    assert once(capsys)[1] == line
    gone.kill()
    gone.wait()
    for text in (None, "", '{"owner": {"ho'):
        if text is not None:
            run_lock.lock_file(third / "results" / "made").write_text(text)
        lines = once(capsys)
        assert lines[1:3] == ["no process works on it", "interrupted: rollout-train-train-0003-0001"]
        assert lines[3].startswith("train train 3: 3/8 episodes")


def test_finished_shards_and_a_file_that_cannot_be_read(third: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = third / "config" / "made.yaml"
    config.write_text(config.read_text().replace("{n: 4}", "{n: 4, shards: 2}"))
    run_dir = third / "results" / "made"
    rows = t.read_rows(run_dir / t.partition_path("rollouts", "train", "train", 3), t.ROLLOUTS)
    ended = [made_run.episode(rows[4], "sandbox_lost", 0, False), made_run.episode(rows[4], "completed", 1)]
    t.write_table(run_dir / t.partition_path("episodes", "train", "train", 3, 2), t.EPISODES, ended)
    for k in (1, 2):
        # Of two shards now, one each.
        source = run_dir / t.partition_path("episodes", "train", "train", k, 1)
        target = run_dir / t.partition_path("episodes", "train", "train", k, 2)
        target.parent.mkdir()
        t.write_table(target, t.EPISODES, t.read_rows(source, t.EPISODES)[-4:])
        t.write_table(source, t.EPISODES, t.read_rows(source, t.EPISODES)[:-4])
    scores = run_dir / t.partition_path("scores", "train", "train", 2)
    scores.write_bytes(scores.read_bytes()[:100])
    lines = once(capsys)
    assert "train train 3: 4/8 episodes (3 completed, 1 agent_timeout, 2 running, 2 attempts before the last)" in lines
    assert "mean reward by iteration  1: 0.250" in lines
    assert any(line.startswith(f"unreadable: {scores} cannot be read as table scores") for line in lines)


def test_a_run_that_has_not_begun(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["watch", "mine", "--once"]) == 0
    assert capsys.readouterr().out.splitlines() == ["mine: 0 of 2 iterations, unfinished", "no process works on it"]
    assert not (project / "results" / "mine").exists()
    assert cli.main(["watch", "nope"]) == 2
    assert capsys.readouterr().err == "error: there is no run 'nope' in config/; runs there: mine\n"


def test_it_follows_until_the_run_is_finished(
    finished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = finished / "results" / "made" / "report" / "index.html"
    report.unlink()
    hold(finished, Owner.current())
    waits = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        report.touch()
        if len(waits) == 3:
            # Finished is finished when its command has ended as well.
            run_lock.lock_file(finished / "results" / "made").write_text("")

    monkeypatch.setattr(time, "sleep", wait)
    assert cli.main(["watch", "made"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(waits) == 3
    assert lines[0] == "made: 2 of 2 iterations, 5 of 5 evaluations, unfinished"
    assert lines[-1] == "run made is finished: 2 of 2 iterations, 5 of 5 evaluations, finished"
    # What has not changed is not said again.
    assert sum(line.startswith("made: ") for line in lines) == 3


def test_ctrl_c_ends_it(made: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    assert cli.main(["watch", "made"]) == 0
    assert capsys.readouterr().err == ""


def test_the_clock_of_a_log_that_began_before_midnight(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("23:59:50 rollout made: first\n")
    midnight = datetime.combine(datetime.now().date(), datetime.min.time()).timestamp()
    assert watch._born(log, midnight + 20) == midnight - 10
