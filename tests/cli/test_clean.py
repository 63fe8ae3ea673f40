"""`openforge clean RUN`: sizes first, removal of what is asked for and of nothing else, never under a live run."""

from __future__ import annotations

import builtins
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from openforge import cli
from openforge.rollout.partial import claim
from openforge.train.checkpoint import check_state
from openforge.train.job import TrainError

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ("--partial", "--logs", "--artifacts", "--superseded", "--states", "--caches")


@pytest.fixture
def full(finished: Path) -> Path:
    """The finished run with something of every kind."""
    run_dir = finished / "results" / "made"
    files = {
        "partial/train-train-0003/0001/abc/episodes.jsonl": 1000,
        "artifacts/e1.log": 10_000,
        "superseded/20260102/episodes/x.parquet": 1000,
        "state/0001/optim.pt": 500_000,
        "state/0002/optim.pt": 600_000,
        "checkpoints/0001/model.safetensors": 300_000,
        "tasks/t1/task.yaml": 10,
    }
    for name, size in files.items():
        (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (run_dir / name).write_bytes(b"x" * size)
    (finished / "logs" / "made").mkdir(parents=True)
    (finished / "logs" / "made" / "tasks.log").write_text("x")
    (finished / "logs" / "other").mkdir()
    assert cli.main(["sql", "made", "select 1"]) == 0  # makes the caches
    return finished


def listing(project: Path) -> set[str]:
    return {str(p.relative_to(project)) for p in project.rglob("*") if p.is_file() and ".locks" not in p.parts}


def clean(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = cli.main(["clean", "made", *words])
    return code, *capsys.readouterr()


@contextmanager
def elsewhere(code: str) -> Iterator[int]:
    """Another process that runs `code` and lives until the end; its pid."""
    program = f"{code}\nprint('ready', flush=True)\ninput()"
    command = [sys.executable, "-c", program]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as p:
        assert p.stdout is not None and p.stdout.readline() == b"ready\n"
        yield p.pid
        p.communicate(b"\n")


def test_sizes_are_listed_and_nothing_is_removed(full: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = listing(full)
    code, out, err = clean(capsys)
    assert (code, err) == (0, "") and listing(full) == before
    rows = {line.split()[0]: line for line in out.splitlines()}
    kinds = ["partial", "logs", "artifacts", "superseded", "states", "caches", "checkpoints", "results"]
    assert list(rows) == kinds
    assert all(f"--{k}" in rows[k] for k in kinds[:6]) and not any("--" in rows[k] for k in kinds[6:])
    # Blocks of 4096 bytes: 500 000 take 503 808, and the folder and a card of it up to three more.
    for kind, low, high in (("states", 503.808, 520), ("checkpoints", 303, 330)):
        assert low < float(rows[kind].split()[1]) < high and rows[kind].split()[2] == "KB"


@pytest.mark.parametrize(
    ("flag", "gone"),
    [
        ("--partial", ["results/made/partial/train-train-0003/0001/abc/episodes.jsonl"]),
        ("--logs", ["logs/made/tasks.log"]),
        ("--artifacts", ["results/made/artifacts/e1.log"]),
        ("--superseded", ["results/made/superseded/20260102/episodes/x.parquet"]),
        ("--states", ["results/made/state/0001/optim.pt"]),
    ],
)
def test_a_flag_removes_its_kind_and_nothing_else(
    full: Path, capsys: pytest.CaptureFixture[str], flag: str, gone: list[str]
) -> None:
    before = listing(full)
    code, out, err = clean(capsys, flag, "--yes")
    assert (code, err) == (0, "") and out.splitlines()[-1].startswith(f"removed {flag[2:]} (")
    assert before - listing(full) == set(gone)
    new = {"results/made/state/0001/tombstone.json"} if flag == "--states" else set()
    assert listing(full) - before == new


def test_caches_are_made_again(full: Path, capsys: pytest.CaptureFixture[str]) -> None:
    query = ["sql", "made", "select avg(reward) from episodes where iteration = 1 and purpose = 'train'", "--csv"]
    before = listing(full)
    assert clean(capsys, "--caches", "--yes")[0] == 0
    assert "results/made/store.duckdb" in before - listing(full) and "results/made/.tasks.parquet" not in listing(full)
    assert cli.main(query) == 0
    assert capsys.readouterr().out.split() == ["avg(reward)", "0.25"]
    assert listing(full) == before


def test_an_older_state_is_a_tombstone_and_the_newest_stays(full: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert clean(capsys, "--states", "--yes")[0] == 0
    state = full / "results" / "made" / "state"
    with pytest.raises(TrainError, match="was pruned; no full state is left before it"):
        check_state(state / "0001", full / "results/made/checkpoints/0001", None)
    assert (state / "0002" / "optim.pt").stat().st_size == 600_000
    assert re.search(r"^states +0 B", clean(capsys)[1], re.M)


def test_a_clean_finished_run_plans_nothing(full: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for part in ("Snakefile", "rules", "profiles", "scripts", "envs"):
        source = ROOT / part
        (shutil.copytree if source.is_dir() else shutil.copy)(source, full / part)
    assert clean(capsys, *FLAGS, "--yes")[0] == 0
    env = {k: v for k, v in os.environ.items() if not k.startswith("OPENFORGE_")} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "snakemake", "--nocolor", "-n", "train_made"]
    done = subprocess.run(command, cwd=full, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "Nothing to be done" in done.stdout + done.stderr, done.stdout + done.stderr


def test_a_question_on_a_terminal_and_a_sentence_elsewhere(
    full: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = listing(full)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    code, _, err = clean(capsys, "--logs")
    assert (code, err) == (2, "error: nobody can be asked here: add --yes to remove it\n")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    asked: list[str] = []

    def answer(text: str) -> Callable[[str], str]:
        return lambda question: asked.append(question) or text

    for text in ("", "n", "yes please"):
        monkeypatch.setattr(builtins, "input", answer(text))
        code, out, _ = clean(capsys, "--logs", "--artifacts")
        assert code == 0 and out.endswith("nothing is removed\n") and listing(full) == before
    assert asked[0].startswith("remove logs, artifacts (") and asked[0].endswith("KB)? [y/N] ")
    monkeypatch.setattr(builtins, "input", answer("y"))
    assert clean(capsys, "--logs")[0] == 0
    assert before - listing(full) == {"logs/made/tasks.log"}


def test_everything_goes_when_the_name_is_repeated(
    full: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = listing(full)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    for words, sentence in (
        (["--everything", "--yes"], "nobody can be asked here: --everything=made removes results/made"),
        (["--everything=other", "--yes"], "'other' is not 'made'; nothing is removed"),
    ):
        code, _, err = clean(capsys, *words)
        assert (code, err) == (2, f"error: {sentence}\n") and listing(full) == before
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(builtins, "input", lambda question: "mad")
    assert clean(capsys, "--everything")[0] == 2 and listing(full) == before
    code, out, _ = clean(capsys, "--everything=made")
    assert code == 0 and out.splitlines()[-1] == "removed results/made"
    assert list((full / "results").iterdir()) == []
    assert (full / "logs" / "made" / "tasks.log").exists()


def test_a_folder_on_another_disk_goes_with_its_link(full: Path, capsys: pytest.CaptureFixture[str]) -> None:
    partial = full / "results" / "made" / "partial"
    partial.rename(full / "scratch")
    partial.symlink_to(full / "scratch")
    assert clean(capsys, "--partial", "--yes")[0] == 0
    assert not partial.is_symlink() and not (full / "scratch").exists()


def test_a_live_run_is_left_alone(full: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = full / "results" / "made"
    before = listing(full)
    take = (
        f"from pathlib import Path; from openforge import run_lock; run_lock.take(Path({str(run_dir)!r}), 'snakemake')"
    )
    with elsewhere(take) as pid:
        for words in (["--logs", "--yes"], ["--everything=made"]):
            code, _, err = clean(capsys, *words)
            assert code == 2 and err.count("\n") == 1 and listing(full) == before
            assert re.match(rf"error: run made is at work: process {pid} on \S+, at work since .* \(snakemake\); ", err)
        assert clean(capsys)[0] == 0
    assert clean(capsys, "--logs", "--yes")[0] == 0


def test_a_job_that_outlived_its_snakemake_is_named(full: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fd = claim(full / "results" / "made" / ".locks" / "train-train-0003-0001")
    code, _, err = clean(capsys, "--partial", "--yes")
    assert code == 2 and err.startswith(f"error: process {os.getpid()} still works on shard train-train-0003-0001")
    os.close(fd)
    assert clean(capsys, "--partial", "--yes")[0] == 0


def test_no_run_can_start_meanwhile(
    full: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the question stands, another process does not get the run's lock; afterwards it does."""
    run_dir = full / "results" / "made"
    code = f"from pathlib import Path; from openforge import run_lock; print(run_lock.held(Path({str(run_dir)!r})))"

    def held() -> str:
        command, env = [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.strip()

    seen = []
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(builtins, "input", lambda question: seen.append(held()) or "y")
    assert clean(capsys, "--logs")[0] == 0
    assert (seen, held()) == (["True"], "False")


@pytest.mark.parametrize("name", ["nope", "..", "../results/made", "made/episodes", ""])
def test_only_a_run_can_be_named(full: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    before = listing(full)
    assert cli.main(["clean", name, f"--everything={name}", "--yes"]) == 2
    assert capsys.readouterr().err == f"error: there is no run {name!r} in results/; runs there: made\n"
    assert listing(full) == before
