"""The command line: what it prints, and one sentence with exit code 2 on bad input."""

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import made_run
import pytest

from openforge import __version__, cli
from openforge.environments.claw_eval.folder import write_folder

ROOT = Path(__file__).resolve().parent.parent.parent
CURVE = "select iteration, avg(reward) from episodes where purpose = 'train' group by 1 order by 1"


@pytest.fixture
def project(run_dir, tmp_path, monkeypatch):
    """A project with the hand-made run and one configuration, as the working directory."""
    (tmp_path / "Snakefile").touch()
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "mine.yaml").write_text("model: tiny-random\niterations: 2\ntasks: {source: tiny}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def failed(capsys, *argv: str) -> str:
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    return err


def test_sql_prints_a_table(project, capsys):
    assert cli.main(["sql", "made", CURVE]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["iteration", "avg(reward)"],
        ["---------", "------------------"],
        ["1", "0.25"],
        ["2", "0.7142857142857143"],
    ]


def test_sql_in_the_words_of_the_readme_and_duckdb_cli_alike(project):
    """Issue 2's two commands, as a person types them."""
    run = {"cwd": project, "capture_output": True, "text": True, "check": True, "stdin": subprocess.DEVNULL}
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ours = subprocess.run([sys.executable, "-m", "openforge", "sql", "made", CURVE, "--csv"], env=env, **run)
    duckdb = Path(sys.executable).parent / "duckdb"
    theirs = subprocess.run([duckdb, "-csv", "results/made/store.duckdb", CURVE], **run)
    rows = [list(csv.reader(io.StringIO(p.stdout))) for p in (ours, theirs)]
    assert rows[0] == rows[1] == [["iteration", "avg(reward)"], ["1", "0.25"], ["2", "0.7142857142857143"]]
    assert ours.stderr == ""


def test_sql_as_json_and_csv_keeps_null_and_nesting(project, capsys):
    query = "select null as a, [1, 2] as b, {'x': 'y'} as c, 'p,\"q\nr' as d, timestamp '2026-01-02 03:04:05' as e"
    assert cli.main(["sql", "made", query, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {"a": None, "b": [1, 2], "c": {"x": "y"}, "d": 'p,"q\nr', "e": "2026-01-02 03:04:05"}
    ]
    assert cli.main(["sql", "made", query, "--csv"]) == 0
    header, row = csv.reader(io.StringIO(capsys.readouterr().out))
    assert (header, row[:3]) == (["a", "b", "c", "d", "e"], ["", "[1, 2]", '{"x": "y"}'])
    assert cli.main(["sql", "made", query]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_sql_reads_every_column_of_every_table(project, capsys):
    for view in ("tasks", "rollouts", "calls", "blobs", "scores", "samples", "metrics", "episodes", "all_episodes"):
        for style in ("--json", "--csv"):
            assert cli.main(["sql", "made", f"select * from {view}", style]) == 0
    assert capsys.readouterr().err == ""


def test_sql_names_an_unreadable_file_and_goes_on(project, capsys):
    path = next((project / "results" / "made" / "calls").rglob("*.parquet"))
    path.write_bytes(path.read_bytes()[:200])
    assert cli.main(["sql", "made", "select count(*) from episodes"]) == 0
    out, err = capsys.readouterr()
    assert out.split()[-1] == "36"
    assert err.startswith(f"warning: left out of view calls: {path} cannot be read") and err.count("\n") == 1


def test_sql_refusals(project, capsys):
    assert "there is no run 'nope' in results/; runs there: made" in failed(capsys, "sql", "nope", "select 1")
    assert "Parser Error" in failed(capsys, "sql", "made", "selec 1")
    assert 'Referenced column "nope" not found' in failed(capsys, "sql", "made", "select nope from episodes")
    assert "read-only" in failed(capsys, "sql", "made", "create table x as select 1")
    assert "there is no run '../results/made'" in failed(capsys, "sql", "../results/made", "select 1")


def test_config_prints_values_and_refuses_unknown_runs(project, capsys):
    assert cli.main(["config", "mine"]) == 0
    assert "iterations" in capsys.readouterr().out
    assert "there is no run 'nope' in config/; runs there: mine" in failed(capsys, "config", "nope")
    (project / "config" / "mine.yaml").write_text("model: x\niteration: 2\ntasks: {source: tiny}\n")
    assert "unknown key 'iteration'; did you mean 'iterations'?" in failed(capsys, "config", "mine")


def test_the_project_is_found_from_a_folder_below(project, monkeypatch):
    below = project / "results" / made_run.RUN
    monkeypatch.chdir(below)
    assert cli.project_root() == project


def test_outside_a_project_the_packages_own_is_meant(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.project_root() == ROOT


def test_docs_are_written_checked_and_stale_ones_named(project, capsys):
    assert cli.main(["docs"]) == 0
    assert capsys.readouterr().out.split() == ["docs/tables.md", "docs/config.md", "config/schema.json"]
    assert cli.main(["docs"]) == 0
    assert cli.main(["docs", "--check"]) == 0
    assert capsys.readouterr().out == ""
    (project / "docs" / "tables.md").write_text("old")
    (project / "config" / "schema.json").unlink()
    assert cli.main(["docs", "--check"]) == 1
    assert "not as rendered: docs/tables.md, config/schema.json; run: openforge docs" in capsys.readouterr().err
    assert (project / "docs" / "tables.md").read_text() == "old"


def test_tasks_check_reads_folders_and_names_what_is_wrong(tmp_path, capsys):
    good = {**made_run.task("good", "copy", "train"), "task_limits": {"turns": 3, "tokens": None, "seconds": 9.0}}
    write_folder(tmp_path / "set" / "good", good)
    assert cli.main(["tasks", "check", str(tmp_path / "set")]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/set/good: ok, task good\n"
    (tmp_path / "set" / "bad").mkdir()
    (tmp_path / "set" / "bad" / "task.yaml").write_text("prompt: {text: x}\n")
    assert cli.main(["tasks", "check", str(tmp_path / "set")]) == 1
    bad, ok = capsys.readouterr().out.splitlines()
    assert ok.endswith("set/good: ok, task good")
    assert bad.startswith(f"{tmp_path}/set/bad: ") and "task_id" in bad
    assert cli.main(["tasks", "check", str(tmp_path / "set" / "good")]) == 0
    capsys.readouterr()
    assert "holds no task.yaml" in failed(capsys, "tasks", "check", str(tmp_path / "nope"))


@pytest.mark.parametrize("argv", [[], ["nope"], ["sql", "made"], ["config"], ["docs", "x"], ["sql", "a", "b", "--xml"]])
def test_wrong_usage_exits_with_2(argv, capsys):
    with pytest.raises(SystemExit) as e:
        cli.main(argv)
    assert e.value.code == 2
    assert "usage: openforge" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit) as e:
        cli.main(["--version"])
    assert e.value.code == 0
    assert capsys.readouterr().out.strip() == __version__


def test_a_reader_that_leaves_early_is_no_traceback(project):
    command = [sys.executable, "-m", "openforge", "sql", "made", "select range as n from range(200000)"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=project, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as p:
        assert p.stdout.readline().strip() == b"n"
        p.stdout.close()
        assert p.stderr.read() == b""
        assert p.wait() == 0
