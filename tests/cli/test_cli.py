"""The command line: what it prints, and one sentence with exit code 2 on bad input."""

import csv
import errno
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import made_run
import pytest
import yaml

from openforge import __version__, cli
from openforge.environments.claw_eval.folder import write_folder
from openforge.tasks import TasksError
from openforge.tasks.sources import read_all

ROOT = Path(__file__).resolve().parent.parent.parent
CURVE = "select iteration, avg(reward) from episodes where purpose = 'train' group by 1 order by 1"


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


def test_sql_prints_columns_of_one_name_as_duckdb_does_and_json_names_them(project, capsys):
    query = "select 1 as a, 2 as a"
    assert cli.main(["sql", "made", query]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [["a", "a"], ["-", "-"], ["1", "2"]]
    assert cli.main(["sql", "made", query, "--csv"]) == 0
    assert capsys.readouterr().out == "a,a\n1,2\n"
    err = failed(capsys, "sql", "made", query, "--json")
    assert err == "error: column 'a' stands twice in the result; give one of them another name with AS\n"


def test_sql_names_the_column_of_a_date_that_python_lacks(project, capsys):
    err = failed(capsys, "sql", "made", "select timestamp 'infinity' as t")
    assert err.startswith("error: column 't' cannot be shown (") and err.endswith("cast it to text: t::text\n")
    assert cli.main(["sql", "made", "select (timestamp 'infinity')::text as t"]) == 0
    assert capsys.readouterr().out.split() == ["t", "--------", "infinity"]


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
    for query, words in (("", "none"), (" -- nothing", "none"), ("select 1; select 2", "2")):
        assert failed(capsys, "sql", "made", query) == f"error: one SQL statement is expected, this is {words}\n"
    assert 'Referenced column "nope" not found' in failed(capsys, "sql", "made", "select nope from episodes")
    assert "read-only" in failed(capsys, "sql", "made", "create table x as select 1")
    assert "there is no run '../results/made'" in failed(capsys, "sql", "../results/made", "select 1")


@pytest.mark.parametrize(
    ("query", "word"),
    [
        ("copy (select 1) to 'out.csv'", "COPY"),
        ("explain analyze copy (select 1) to 'out.csv'", "COPY"),
        ("explain (analyze, format json) copy (select 1) to 'out.csv'", "COPY"),
        ("/* a pivot */ copy (pivot (select 1 as a) on a) to 'out.csv'", "COPY"),
        ("create table x as select 1", "CREATE"),
        ("attach 'other.duckdb'", "ATTACH"),
        ("install httpfs", "INSTALL"),
        ("load httpfs", "LOAD"),
        ("export database 'out'", "EXPORT"),
        ("insert into episodes values (1)", "INSERT"),
        ("pragma profiling_output = 'out.json'", "SET"),
        ("call pragma_version()", "CALL"),
    ],
)
def test_sql_refuses_what_writes(project, capsys, query, word):
    before = sorted(project.rglob("*"))
    err = failed(capsys, "sql", "made", query)
    assert err == f"error: queries are read-only: {word} is refused; use SELECT\n"
    assert sorted(project.rglob("*")) == before


def test_sql_takes_every_statement_that_reads(project, capsys):
    for query in (
        "-- how many\nselect count(*) from tasks;",
        "from tasks",
        "with t as (from tasks) select count(*) from t",
        "(select 1) union (select 2)",
        "describe episodes",
        "summarize tasks",
        "show tables",
        "pivot episodes on status using count(*) group by purpose",
        "explain analyze select 1",
        "pragma table_info('tasks')",
    ):
        assert cli.main(["sql", "made", query]) == 0, capsys.readouterr().err
        assert len(capsys.readouterr().out.splitlines()) > 2


def test_config_names_what_does_not_exist_after_its_values(project, capsys):
    file = project / "config" / "mine.yaml"
    for line, words in (
        ("environment: no_such.env", "environment 'no_such.env': there is no module no_such.env"),
        ("harness: {name: mini_swe_agent, config: gone.yaml}", f"harness.config 'gone.yaml': {project}/gone.yaml"),
    ):
        file.write_text(f"model: tiny-random\niterations: 2\ntasks: {{source: tiny}}\n{line}\n")
        assert cli.main(["config", "mine"]) == 2
        out, err = capsys.readouterr()
        assert re.search(r"^iterations +2 +config/mine.yaml$", out, re.M)
        assert err.startswith(f"error: config/mine.yaml: {words}") and err.count("\n") == 1
    (project / "config" / "eval_x.yaml").write_text("model: tiny-random\ntasks: {source: tiny}\npolicy: mine@3\n")
    assert cli.main(["config", "eval_x"]) == 2
    assert "policy mine@3: results/mine/checkpoints/0003 does not exist" in capsys.readouterr().err


def test_config_prints_values_and_refuses_unknown_runs(project, capsys):
    assert cli.main(["config", "mine"]) == 0
    assert "iterations" in capsys.readouterr().out
    assert "there is no run 'nope' in config/; runs there: mine" in failed(capsys, "config", "nope")
    (project / "config" / "mine.yaml").write_text("model: x\niteration: 2\ntasks: {source: tiny}\n")
    assert "unknown key 'iteration'; did you mean 'iterations'?" in failed(capsys, "config", "mine")


def deny(monkeypatch, method: str, denied: Path) -> None:
    """A path that is another user's, also where the tests run as root."""
    real = getattr(Path, method)

    def refuse(self, *args, **kwargs):
        if self == denied:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, method, refuse)


def test_sql_on_results_of_another_user(project, capsys, monkeypatch):
    deny(monkeypatch, "iterdir", project / "results")
    assert failed(capsys, "sql", "made", "select 1") == f"error: {project}/results: Permission denied\n"


def test_sql_on_a_store_that_is_a_folder(project, capsys):
    store = project / "results" / "made" / "store.duckdb"
    store.unlink(missing_ok=True)
    (store / "x").mkdir(parents=True)
    assert failed(capsys, "sql", "made", "select 1").startswith(f"error: {store} cannot be written: ")


def test_config_that_cannot_be_read(project, capsys, monkeypatch):
    (project / "config" / "folder.yaml").mkdir()
    err = failed(capsys, "config", "folder")
    assert err == "error: config/folder.yaml cannot be read: Is a directory\n"
    deny(monkeypatch, "read_text", project / "config" / "mine.yaml")
    err = failed(capsys, "config", "mine")
    assert err == "error: config/mine.yaml cannot be read: Permission denied\n"


def test_any_other_file_that_cannot_be_read_or_written(project, capsys, tmp_path, monkeypatch):
    long = tmp_path / ("x" * 300)
    assert failed(capsys, "tasks", "check", str(long)) == f"error: {long}: File name too long\n"
    (project / "docs").touch()
    assert failed(capsys, "docs").startswith(f"error: {project}/docs")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert failed(capsys, "config", "mine") == "error: the working directory has been removed\n"


def test_a_full_disk_behind_the_output_is_one_sentence(project):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "openforge", "sql", "made", "select 1"]
        done = subprocess.run(command, cwd=project, env=env, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, "error: the output cannot be written: No space left on device\n")


def test_the_project_is_found_from_a_folder_below(project, monkeypatch):
    below = project / "results" / made_run.RUN
    monkeypatch.chdir(below)
    assert cli.project_root() == project


def test_outside_a_project_the_packages_own_is_meant(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.project_root() == ROOT


def test_docs_are_written_checked_and_stale_ones_named(project, capsys):
    assert cli.main(["docs"]) == 0
    assert capsys.readouterr().out.split() == [
        "docs/tables.md",
        "docs/config.md",
        "docs/statuses.md",
        "docs/harnesses.md",
        "config/schema.json",
    ]
    told = (project / "docs" / "statuses.md").read_text()
    assert "| unconfirmed | the harness cannot be shown to have read it |" in told.splitlines()
    assert "| probe | one token was asked for, to see whether anybody answers |" in told.splitlines()
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


@pytest.fixture
def task_set(tmp_path):
    """Two right task folders."""
    for name in ("one", "two"):
        limits = {"turns": 3, "tokens": None, "seconds": 9.0}
        write_folder(tmp_path / "set" / name, {**made_run.task(name, "copy", "train"), "task_limits": limits})
    return tmp_path / "set"


def checked(capsys, folder: Path) -> tuple[int, list[str]]:
    code = cli.main(["tasks", "check", str(folder)])
    out, err = capsys.readouterr()
    assert err == ""
    return code, out.splitlines()


def test_tasks_check_refuses_the_doubled_ids_that_the_tasks_job_refuses(task_set, capsys):
    shutil.copytree(task_set / "one", task_set / "three")
    code, lines = checked(capsys, task_set)
    sentence = f"{task_set}: task_id 'one' stands in several folders (one, three); ids must differ"
    assert (code, lines[-1], len(lines)) == (1, sentence, 4)
    with pytest.raises(TasksError) as e:
        read_all(task_set, "set")
    assert str(e.value) == sentence


def test_tasks_check_leaves_out_what_is_unsupported(task_set, capsys):
    file = task_set / "one" / "task.yaml"
    data = yaml.safe_load(file.read_text())
    del data["verifier"]
    file.write_text(yaml.safe_dump(data))
    (task_set / "one" / "grader.py").touch()
    assert checked(capsys, task_set) == (
        0,
        [
            f"{task_set}/one: unsupported: task 'one' needs the ClawEval checkout around its grader.py, "
            "which this installation cannot run",
            f"{task_set}/two: ok, task two",
            f"{task_set}: warning: unsupported tasks, which a run leaves out: 1; tasks that are left: 1",
        ],
    )
    assert [r["task_id"] for r in read_all(task_set, "set")] == ["two"]


def test_tasks_check_names_near_misses_of_known_keys_and_lets_others_be(task_set, capsys):
    file = task_set / "one" / "task.yaml"
    data = yaml.safe_load(file.read_text())
    data["environment"]["max_turn"] = data["environment"].pop("max_turns")
    data |= {"sandbox_file": [], "rubric_of_ours": 1}
    file.write_text(yaml.safe_dump(data))
    assert checked(capsys, task_set) == (
        0,
        [
            f"{task_set}/one: warning: key 'sandbox_file' has no effect here; did you mean 'sandbox_files'?",
            f"{task_set}/one: warning: key 'environment.max_turn' has no effect here; "
            "did you mean 'environment.max_turns'?",
            f"{task_set}/one: ok, task one",
            f"{task_set}/two: ok, task two",
        ],
    )


def test_tasks_check_counts_subfolders_without_a_task(task_set, capsys):
    for name in ("b", "a/verifier", ".git", "services"):
        (task_set / name).mkdir(parents=True)
    # Programs that tasks share are named in no warning; a task's parts without its task.yaml are.
    for name in ("services/base.py", "a/more.py"):
        (task_set / name).touch()
    (task_set / "README.md").touch()
    code, lines = checked(capsys, task_set)
    assert code == 0 and len(lines) == 3
    assert lines[-1] == f"{task_set}: warning: subfolders without task.yaml, which are no tasks: 2 (a, b)"


def test_tasks_check_goes_on_after_a_task_that_cannot_be_read(task_set, capsys, monkeypatch):
    deny(monkeypatch, "read_text", task_set / "one" / "task.yaml")
    # A folder that may not be entered, too.
    deny(monkeypatch, "exists", task_set / "shut" / "task.yaml")
    deny(monkeypatch, "is_file", task_set / "shut" / "task.yaml")
    (task_set / "shut").mkdir()
    assert checked(capsys, task_set) == (
        1,
        [
            f"{task_set}/one: {task_set}/one/task.yaml cannot be read: Permission denied",
            f"{task_set}/shut: {task_set}/shut/task.yaml cannot be read: Permission denied",
            f"{task_set}/two: ok, task two",
        ],
    )


def test_tasks_check_of_the_working_directory(task_set, capsys, monkeypatch):
    file = task_set / "one" / "task.yaml"
    file.write_text(file.read_text().replace("split: train\n", ""))
    for place, lines in ((task_set, ["one: ok, task one", "two: ok, task two"]), (file.parent, [".: ok, task one"])):
        monkeypatch.chdir(place)
        assert checked(capsys, Path(".")) == (0, lines)


@pytest.mark.parametrize("argv", [[], ["nope"], ["sql"], ["config"], ["docs", "x"], ["sql", "a", "b", "--xml"]])
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
