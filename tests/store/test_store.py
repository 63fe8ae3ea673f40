"""The store against the hand-made run, through this library and through PyPI's duckdb-cli (an older DuckDB)."""

import errno
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import duckdb
import made_run
import pytest

from openforge import store
from openforge import tables as t

CURVE = "select iteration, avg(reward) as reward from episodes where purpose = 'train' group by 1 order by 1"


def cli(store_file: Path, sql: str, cwd: Path) -> list[dict]:
    command = [Path(sys.executable).parent / "duckdb", "-readonly", "-json", store_file, sql]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
    return json.loads(done.stdout or "[]")


def test_learning_curve_is_the_hand_computed_one(run_dir):
    assert store.rows(run_dir, CURVE) == [
        {"iteration": 1, "reward": 2 / 8},
        {"iteration": 2, "reward": pytest.approx(5 / 7)},
    ]


def test_duckdb_cli_answers_alike_from_another_folder(run_dir, tmp_path):
    store.refresh(run_dir)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert cli(run_dir / store.STORE, CURVE, elsewhere) == store.rows(run_dir, CURVE)
    counts = "select purpose, cell, iteration, shard, count(*) as n from calls group by all order by all"
    assert cli(run_dir / store.STORE, counts, elsewhere) == store.rows(run_dir, counts)
    macro = "select cell, iteration, tasks, pass_at from pass_k(1) order by all"
    assert cli(run_dir / store.STORE, macro, elsewhere) == store.rows(run_dir, macro)


def test_duckdb_cli_is_the_older_client_that_the_storage_version_is_for():
    done = subprocess.run([Path(sys.executable).parent / "duckdb", "--version"], capture_output=True, text=True)
    cli_version = tuple(int(x) for x in done.stdout.split()[0].lstrip("v").split(".")[:2])
    library = tuple(int(x) for x in duckdb.__version__.split(".")[:2])
    assert cli_version <= library


def test_episodes_are_final_with_the_latest_score(run_dir):
    assert store.rows(run_dir, "select count(*) n from episodes") == [{"n": 16 + 6 + 6 + 3 + 3 + 2}]
    assert store.rows(run_dir, "select count(*) n from all_episodes") == [{"n": 37}]
    assert store.rows(run_dir, "select count(*) n from scores") == [{"n": 37}]
    again = "select attempt, reward, passed, score_status, scorer_version, components from episodes where attempt = 1"
    assert store.rows(run_dir, again) == [
        {
            "attempt": 1,
            "reward": 1.0,
            "passed": True,
            "score_status": "scored",
            "scorer_version": "v2",
            "components": "{}",
        }
    ]
    lost = store.rows(run_dir, "select status from all_episodes where not final")
    assert lost == [{"status": "sandbox_lost"}]


def test_an_episode_without_a_score_is_kept_with_null(run_dir):
    (run_dir / t.partition_path("scores", "eval", "pi", 2)).unlink()
    sql = "select count(*) n, count(reward) r, count(score_status) s from episodes where cell = 'pi'"
    assert store.rows(run_dir, sql) == [{"n": 2, "r": 0, "s": 0}]


def test_views_have_the_declared_columns_and_types_before_the_first_file(tmp_path):
    run_dir = tmp_path / "results" / "new"
    run_dir.mkdir(parents=True)
    store.refresh(run_dir)
    for table in t.TABLES.values():
        view = "all_episodes" if table.name == "episodes" else table.name
        got = store.query(run_dir, f"select * from {view}")
        declared = [c.name for c in table.columns]
        assert got.num_rows == 0
        assert got.column_names == declared + [k for k in table.partition if k not in declared]
        for column in ("iteration", "shard"):
            if column in got.column_names:
                assert str(got.schema.field(column).type) == "int32"
    episodes = store.query(run_dir, "select * from episodes")
    assert [str(episodes.schema.field(c).type) for c in ("reward", "passed", "started")] == [
        "double",
        "bool",
        "timestamp[us, tz=UTC]",
    ]
    assert cli(run_dir / store.STORE, "select count(*) as n from episodes", tmp_path) == [{"n": 0}]


def test_partition_keys_come_from_the_path_typed(run_dir):
    sql = "select distinct purpose, cell, iteration, shard from calls where cell = 'pi'"
    assert store.rows(run_dir, sql) == [{"purpose": "eval", "cell": "pi", "iteration": 2, "shard": 1}]
    sql = "select distinct purpose, cell, iteration from samples order by all"
    assert store.rows(run_dir, sql) == [{"purpose": "train", "cell": "train", "iteration": k} for k in (1, 2)]


def test_a_foreign_policy_has_no_iteration(run_dir):
    raw = made_run.task("x", "copy", "heldout")
    made_run.write_cell(
        run_dir,
        "eval",
        "heldout.foreign",
        None,
        [(made_run.rollout(raw, "eval", "heldout.foreign", None, 0), 1.0)],
    )
    for view in ("calls", "scores", "episodes", "rollouts"):
        sql = f"select cell, iteration from {view} where iteration is null"
        assert store.rows(run_dir, sql) == [{"cell": "heldout.foreign", "iteration": None}]


def test_a_file_written_later_appears_without_a_refresh(tmp_path):
    run_dir = tmp_path / "results" / made_run.RUN
    run_dir.mkdir(parents=True)
    store.refresh(run_dir)
    made_run.make(tmp_path / "results")
    assert cli(run_dir / store.STORE, CURVE, tmp_path) == store.rows(run_dir, CURVE) != []


def test_a_refresh_without_change_leaves_the_store_alone(run_dir):
    store.refresh(run_dir)
    before = (run_dir / store.STORE).stat()
    store.refresh(run_dir)
    after = (run_dir / store.STORE).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_a_moved_folder_is_read_where_it_stands(run_dir, tmp_path):
    store.refresh(run_dir)
    moved = tmp_path / "it's [a] b*d place" / "results" / "moved"
    moved.parent.mkdir(parents=True)
    shutil.move(run_dir, moved)
    assert store.rows(moved, CURVE)[0] == {"iteration": 1, "reward": 0.25}
    assert cli(moved / store.STORE, CURVE, tmp_path)[0] == {"iteration": 1, "reward": 0.25}


def test_a_relative_folder_is_stored_absolute(run_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store.refresh(Path("results") / made_run.RUN)
    monkeypatch.chdir("/")
    assert cli(run_dir / store.STORE, CURVE, Path("/"))[0] == {"iteration": 1, "reward": 0.25}


@pytest.mark.parametrize("keep", [0, 1, 100, -1])
def test_an_unreadable_file_is_named_and_left_out(run_dir, capsys, keep):
    path = run_dir / t.partition_path("episodes", "train", "train", 2, 1)
    path.write_bytes(path.read_bytes()[:keep])
    assert [u.path for u in store.refresh(run_dir)] == [path]
    assert f"warning: left out of view episodes: {path} cannot be read" in capsys.readouterr().err
    assert store.rows(run_dir, CURVE) == [{"iteration": 1, "reward": 0.25}]
    listed = store.rows(run_dir, "select table_name, path, error from unreadable_files")
    assert [(x["table_name"], x["path"]) for x in listed] == [("episodes", str(path))]
    assert str(path) in listed[0]["error"]


def test_a_repaired_file_is_back_and_the_list_empty(run_dir):
    path = run_dir / t.partition_path("scores", "train", "train", 1)
    whole = path.read_bytes()
    path.write_bytes(whole[:50])
    assert [x["reward"] for x in store.rows(run_dir, CURVE)] == [None, pytest.approx(5 / 7)]
    path.write_bytes(whole)
    assert store.rows(run_dir, CURVE)[0]["reward"] == 0.25
    assert store.rows(run_dir, "select * from unreadable_files") == []


def test_another_schema_version_is_unreadable(run_dir, monkeypatch):
    path = run_dir / t.partition_path("scores", "eval", "pi", 2)
    monkeypatch.setattr(t, "SCHEMA_VERSION", 99)
    t.write_table(path, t.SCORES, [])
    monkeypatch.undo()
    assert ["schema 99" in u.error for u in store.refresh(run_dir)] == [True]


def test_a_damaged_store_and_a_damaged_twin_are_rewritten(run_dir):
    store.refresh(run_dir)
    (run_dir / store.STORE).write_bytes(b"not a database")
    (run_dir / ".tasks.parquet").write_bytes(b"PAR1")
    assert store.rows(run_dir, "select count(*) n from tasks") == [{"n": 5}]


def test_nothing_is_left_beside(run_dir):
    store.refresh(run_dir)
    assert [p.name for p in run_dir.iterdir() if ".tmp" in p.name] == []


def test_a_reader_that_holds_the_store_does_not_stop_a_refresh(run_dir, tmp_path):
    store.refresh(run_dir)
    with duckdb.connect(str(run_dir / store.STORE), read_only=True) as held:
        (run_dir / t.partition_path("scores", "train", "train", 1)).write_bytes(b"")
        store.refresh(run_dir)
        assert held.execute("select count(*) from tasks").fetchall() == [(5,)]


def test_a_filter_on_the_partition_reads_those_files_only(run_dir):
    """The typed key still prunes: a query of one iteration must not open every file of a long run."""
    store.refresh(run_dir)
    with duckdb.connect(str(run_dir / store.STORE), read_only=True) as c:
        plan = c.execute("explain select * from calls where iteration = 1 and purpose = 'train'").fetchall()
    assert "1/8" in plan[0][1], plan[0][1]


def test_refusals_are_sentences(run_dir, tmp_path):
    with pytest.raises(store.StoreError, match=r"run 'nope' has no results in .*; runs there: made"):
        store.refresh(tmp_path / "results" / "nope")
    with pytest.raises(store.StoreError) as e:
        store.query(run_dir, "select nope from episodes")
    assert "nope" in str(e.value) and "\n" not in str(e.value)
    with pytest.raises(store.StoreError, match="read-only"):
        store.query(run_dir, "create table x as select 1")


def test_a_store_that_cannot_be_replaced_is_a_sentence(run_dir):
    (run_dir / store.STORE).mkdir()
    with pytest.raises(store.StoreError, match=r"store\.duckdb cannot be written"):
        store.refresh(run_dir)
    assert [p.name for p in run_dir.iterdir() if ".tmp" in p.name] == []


def test_a_folder_of_another_user_is_named_and_not_counted_as_empty(run_dir, capsys, monkeypatch):
    closed = run_dir / "scores" / "purpose=train" / "cell=train" / "iteration=0001"
    real = os.scandir

    def scandir(path="."):
        if Path(path) == closed:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert [(u.table, u.path) for u in store.refresh(run_dir)] == [("scores", closed)]
    assert capsys.readouterr().err == f"warning: left out of view scores: {closed}: Permission denied\n"


def test_rows_by_name_refuse_two_columns_of_one_name(run_dir):
    with pytest.raises(store.StoreError, match=r"^column 'a' stands twice in the result; give one of them another"):
        store.rows(run_dir, "select 1 as a, 2 as a")


def test_a_store_that_cannot_be_opened_is_a_sentence(run_dir, monkeypatch):
    store.refresh(run_dir)
    monkeypatch.setattr(store, "refresh", lambda run_dir: [])
    (run_dir / store.STORE).write_text("x" * 5000)
    with pytest.raises(store.StoreError, match=f"^{run_dir / store.STORE} cannot be opened: IO Error"):
        store.rows(run_dir, "select 1")


def test_the_documented_lines_of_python_run(run_dir, capsys):
    store.refresh(run_dir)
    text = (Path(__file__).parents[2] / "docs" / "query-episodes.md").read_text()
    lines = text.partition("From Python:\n")[2].replace("results/demo/", f"{run_dir}/")
    names = {}
    exec(textwrap.dedent(lines), names)
    assert capsys.readouterr().out == f"[(1, 0.25), (2, {5 / 7})]\n"
    assert names["episodes"].num_rows == 36
