"""Tables of one's own: what a column map, a folder's layout and a verifier for all rows make of them, and every
sentence on what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from openforge import cli, tables
from openforge.config import EvalConfig, RunConfig, Tasks
from openforge.tasks import TasksError, check_splits, raw_tasks

VERIFIER = {"command": ["python3", "v.py"], "files": [{"path": "v.py", "content": "print(1)"}], "seconds": 5.0}
ROW = {"task_id": "a", "instruction": "do it", "verifier": VERIFIER}
JUDGED = {"columns": {"task_id": "id", "instruction": "prompt"}, "verifier": "judge.py"}


def write(path: Path, rows: list[dict[str, Any]], schema: pa.Schema | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)
    return path


def read(tmp_path: Path, name: str = "t.parquet", **keys: Any) -> list[dict[str, Any]]:
    (tmp_path / "judge.py").write_text("print('{}')\n")
    config = Tasks.model_validate({"source": name, **keys})
    rows = raw_tasks(config, "claw_eval", tmp_path / "unused", tmp_path)
    # The declared table takes them as they are.
    tables.TASKS.arrow(rows)
    return rows


def refused(tmp_path: Path, name: str = "t.parquet", **keys: Any) -> str:
    with pytest.raises(TasksError) as e:
        read(tmp_path, name, **keys)
    assert "\n" not in str(e.value)
    return str(e.value)


def qa(n: int, first: int = 0) -> list[dict[str, Any]]:
    return [{"id": i, "prompt": f"question {i}", "answer": str(i * i)} for i in range(first, first + n)]


# ---- columns -------------------------------------------------------------------------------------
def test_columns_of_the_same_names_need_no_map(tmp_path: Path) -> None:
    files = [{"path": "in/x.txt", "content": b"\x00\x01", "mode": 0o755}]
    more = {"split": "heldout", "files": files, "tags": ["k", "m"], "level": 3}
    write(tmp_path / "t.parquet", [ROW | more])
    (row,) = read(tmp_path)
    assert (row["task_id"], row["split"], row["tags"], row["files"]) == ("a", "heldout", ["k", "m"], files)
    assert json.loads(row["payload"]) == {"level": 3}
    assert row["verifier"]["command"] == ["python3", "v.py"] and row["verifier"]["seconds"] == 5.0
    assert row["verifier"]["files"] == [{"path": "v.py", "content": b"print(1)", "mode": 0o644}]
    assert (row["source"], row["environment"]) == ("t", "claw_eval")


def test_a_map_takes_columns_of_other_names(tmp_path: Path) -> None:
    theirs = {"id": 7, "prompt": "p", "subset": "dev", "judge": json.dumps(VERIFIER), "kind": "sum", "x": 1, "y": 2}
    write(tmp_path / "t.parquet", [theirs | {"inputs": json.dumps({"a.txt": "text"})}])
    columns = {"task_id": "id", "instruction": "prompt", "split": "subset", "verifier": "judge", "tags": "kind"}
    (row,) = read(tmp_path, columns=columns | {"files": "inputs", "payload": ["y"]})
    assert (row["task_id"], row["instruction"], row["split"], row["tags"]) == ("7", "p", "dev", ["sum"])
    assert row["files"] == [{"path": "a.txt", "content": b"text", "mode": 0o644}]
    assert json.loads(row["payload"]) == {"y": 2} and row["verifier"]["files"][0]["path"] == "v.py"


def test_null_in_the_map_leaves_a_column_alone(tmp_path: Path) -> None:
    write(tmp_path / "t.parquet", [ROW | {"files": 3, "split": None}])
    assert "column 'files', row 0: 3; it must be a list of" in refused(tmp_path, columns={"split": None})
    (row,) = read(tmp_path, columns={"files": None, "split": None})
    assert row["files"] == [] and json.loads(row["payload"])["files"] == 3


def test_files_may_be_an_arrow_map(tmp_path: Path) -> None:
    schema = pa.schema([("id", pa.int64()), ("prompt", pa.string()), ("files", pa.map_(pa.string(), pa.string()))])
    write(tmp_path / "t.parquet", [{"id": 1, "prompt": "p", "files": [("a", "x"), ("b", "y")]}], schema)
    (row,) = read(tmp_path, **JUDGED)
    assert [(f["path"], f["content"]) for f in row["files"]] == [("a", b"x"), ("b", b"y")]


def test_one_verifier_judges_every_row_by_its_own_fields(tmp_path: Path) -> None:
    write(tmp_path / "t.parquet", qa(2))
    first, second = read(tmp_path, **JUDGED, verifier_seconds=7.0)
    assert first["verifier"]["command"] == ["python3", "-I", "judge.py", "{workspace}", "{answer}"]
    assert first["verifier"]["seconds"] == 7.0 and first["verifier"]["name"] == "judge"
    script, fields = second["verifier"]["files"]
    assert (script["path"], script["content"]) == ("judge.py", b"print('{}')\n")
    assert fields["path"] == "task.json" and json.loads(fields["content"]) == {
        "task_id": "1",
        "split": "train",
        "instruction": "question 1",
        "tags": [],
        "payload": {"answer": "1"},
    }
    assert first["verifier"]["version"] != second["verifier"]["version"]


def test_a_verifier_may_be_a_folder_or_a_program(tmp_path: Path) -> None:
    write(tmp_path / "t.parquet", qa(1))
    (tmp_path / "v" / "data").mkdir(parents=True)
    (tmp_path / "v" / "a.py").write_text("")
    (tmp_path / "v" / "verify.py").write_text("")
    (tmp_path / "v" / "data" / "x.json").write_text("{}")
    (row,) = read(tmp_path, **JUDGED | {"verifier": "v"})
    assert [f["path"] for f in row["verifier"]["files"]] == ["verify.py", "a.py", "data/x.json", "task.json"]
    assert row["verifier"]["command"][:3] == ["python3", "-I", "verify.py"]
    (tmp_path / "judge.sh").write_text("#!/bin/sh\n")
    assert "judge.sh must be a Python script (.py) or executable" in refused(
        tmp_path, **JUDGED | {"verifier": "judge.sh"}
    )
    (tmp_path / "judge.sh").chmod(0o755)
    (row,) = read(tmp_path, **JUDGED | {"verifier": "judge.sh"})
    assert row["verifier"]["command"][0] == "./judge.sh" and row["verifier"]["files"][0]["mode"] == 0o755
    (tmp_path / "v" / "task.json").touch()
    assert "which is the name of the row's own fields" in refused(tmp_path, **JUDGED | {"verifier": "v"})
    assert "nosuch must be a script, or a folder with verify.py" in refused(tmp_path, **JUDGED | {"verifier": "nosuch"})


def test_an_id_may_be_the_rows_digest(tmp_path: Path) -> None:
    columns = {"task_id": "hash", "instruction": "prompt"}
    write(tmp_path / "t.parquet", qa(3))
    ids = [r["task_id"] for r in read(tmp_path, columns=columns, verifier="judge.py")]
    write(tmp_path / "u.parquet", list(reversed(qa(3))))
    assert len(set(ids)) == 3
    assert [r["task_id"] for r in read(tmp_path, "u.parquet", columns=columns, verifier="judge.py")] == ids[::-1]
    write(tmp_path / "t.parquet", [*qa(2), *qa(1)])
    message = refused(tmp_path, columns=columns, verifier="judge.py")
    assert "stands in several rows (t.parquet row 0, t.parquet row 2)" in message


def test_the_revision_is_the_tables_own(tmp_path: Path) -> None:
    revisions = []
    for rows in (qa(2), qa(2), qa(3)):
        write(tmp_path / "t.parquet", rows)
        revisions.append({r["source_revision"] for r in read(tmp_path, **JUDGED)})
    assert revisions[0] == revisions[1] != revisions[2] and len(revisions[0]) == 1


def test_a_table_of_ours_is_taken_as_it_is(tmp_path: Path) -> None:
    made = raw_tasks(Tasks(source="tiny", train=2, heldout=1), "claw_eval", tmp_path / "tasks", tmp_path)
    tables.write_table(tmp_path / "t.parquet", tables.TASKS, made)
    assert read(tmp_path) == made
    assert "remove tasks.columns and tasks.verifier" in refused(tmp_path, verifier="judge.py")
    with pytest.raises(TasksError, match=r"column 'environment', row 0: 'claw_eval'; it must be 'my\.env'"):
        raw_tasks(Tasks(source="t.parquet"), "my.env", tmp_path / "unused", tmp_path)


# ---- layout --------------------------------------------------------------------------------------
def splits(rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    out: dict[str, list[str]] = {}
    for r in rows:
        out.setdefault(r["split"], []).append(r["task_id"])
    return out


def test_shards_of_the_hub_are_one_split(tmp_path: Path) -> None:
    for i in range(2):
        write(tmp_path / f"set/data/train-{i:05d}-of-00002.parquet", qa(2, 2 * i))
    write(tmp_path / "set/data/heldout-00000-of-00001-0a1b2c.parquet", qa(1, 9))
    (tmp_path / "set" / "README.md").write_text("---\nlicense: mit\n---\n# A set\n")
    rows = read(tmp_path, "set", **JUDGED)
    assert splits(rows) == {"train": ["0", "1", "2", "3"], "heldout": ["9"]} and rows[0]["source"] == "set"
    (tmp_path / "set/data/train-00000-of-00002.parquet").unlink()
    assert "shard train-00000-of-00002.parquet is missing" in refused(tmp_path, "set", **JUDGED)


def test_folders_and_known_names_are_splits(tmp_path: Path) -> None:
    write(tmp_path / "set/heldout/0000.parquet", qa(1))
    write(tmp_path / "set/test.parquet", qa(1, 1))
    write(tmp_path / "set/data/part-1.parquet", qa(1, 2))
    write(tmp_path / "set/.cache/old.parquet", qa(1, 2))
    assert splits(read(tmp_path, "set", **JUDGED)) == {"heldout": ["0"], "test": ["1"], "train": ["2"]}


@pytest.mark.parametrize(
    ("configs", "found"),
    [
        (
            "[{config_name: default, data_files: [{split: a, path: 'x/*.parquet'}, {split: b, path: [y.parquet]}]}]",
            "ab",
        ),
        ("[{config_name: one, data_files: x/0.parquet}]", "train"),
        ("[{config_name: one, data_files: y.parquet}, {config_name: two, data_files: x/*, default: true}]", "train"),
    ],
)
def test_the_readmes_front_matter_counts_first(tmp_path: Path, configs: str, found: str) -> None:
    write(tmp_path / "set/x/0.parquet", qa(1))
    write(tmp_path / "set/y.parquet", qa(1, 1))
    (tmp_path / "set" / "README.md").write_text(f"---\nconfigs: {configs}\n---\n")
    expected = {"ab": {"a": ["0"], "b": ["1"]}, "train": {"train": ["0"]}}[found]
    assert splits(read(tmp_path, "set", **JUDGED)) == expected


@pytest.mark.parametrize(
    ("front", "sentence"),
    [
        (
            "configs: [{config_name: a, data_files: no.parquet}]",
            "data_files 'no.parquet' of split 'train': there is no",
        ),
        ("configs: [{config_name: a, data_files: ../t.parquet}]", "must be a path inside the folder"),
        (
            "configs: [{config_name: a, data_files: x.parquet}, {config_name: b, data_files: x.parquet}]",
            "it has several configurations (a, b)",
        ),
        ("configs: [", "the front matter is not readable YAML"),
    ],
)
def test_a_wrong_front_matter_is_a_sentence(tmp_path: Path, front: str, sentence: str) -> None:
    write(tmp_path / "set/x.parquet", qa(1))
    (tmp_path / "set" / "README.md").write_text(f"---\n{front}\n---\n")
    assert sentence in refused(tmp_path, "set", **JUDGED)


# ---- what is wrong -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"instruction": 5}, "column 'instruction', row 0: 5; it must be a text that is not empty"),
        ({"instruction": None}, "column 'instruction', row 0: NULL; it must be a text"),
        ({"instruction": " "}, "column 'instruction', row 0: ' '; it must be a text"),
        ({"task_id": 1.5}, "column 'task_id', row 0: 1.5; it must be a text that is not empty, or a whole number"),
        ({"task_id": None}, "column 'task_id', row 0: NULL; it must be"),
        ({"split": None}, "column 'split', row 0: NULL; it must be a text"),
        ({"verifier": None}, "column 'verifier', row 0: NULL; it must be a struct (or JSON) of command"),
        ({"verifier": "{"}, "column 'verifier', row 0: '{'; it must be a struct (or JSON) of command"),
        ({"verifier": VERIFIER | {"command": []}}, "column 'verifier', row 0"),
        ({"verifier": VERIFIER | {"seconds": 0.0}}, "column 'verifier', row 0"),
        ({"verifier": VERIFIER | {"command": ["{wrk}"]}}, "unknown placeholder {wrk}; known: {answer}, {workspace}"),
        ({"files": "[3]"}, "column 'files', row 0: '[3]'; it must be a list of {path, content}"),
        ({"files": json.dumps({"../x": "t"})}, "column 'files', row 0: '../x' must be a plain path relative"),
        ({"files": json.dumps([{"path": "x", "content": "a"}] * 2)}, "column 'files', row 0: 'x' is listed twice"),
        ({"tags": 3}, "column 'tags', row 0: 3; it must be a text or a list of texts"),
    ],
)
def test_a_wrong_value_is_named_by_file_column_and_row(tmp_path: Path, row: dict[str, Any], sentence: str) -> None:
    write(tmp_path / "t.parquet", [ROW | row])
    message = refused(tmp_path)
    assert sentence in message and str(tmp_path / "t.parquet") in message


def test_rows_count_over_the_whole_file(tmp_path: Path) -> None:
    write(tmp_path / "t.parquet", [*qa(700), {"id": 700, "prompt": None}])
    assert "column 'prompt', row 700: NULL" in refused(tmp_path, **JUDGED)


@pytest.mark.parametrize(
    ("rows", "keys", "sentence"),
    [
        (
            qa(1),
            {},
            "has no column 'task_id'; name the one that holds it in tasks.columns.task_id, or set that to hash",
        ),
        (qa(1), {"columns": {"task_id": "id"}}, "has no column 'instruction'; name the one"),
        (qa(1), {"columns": {"task_id": "id", "instruction": "prompt"}}, "set tasks.verifier to a script"),
        (
            qa(1),
            JUDGED | {"columns": {"task_id": "uid", "instruction": "prompt"}},
            "no column 'uid', which tasks.columns.task_id names; its columns are id, prompt, answer",
        ),
        (
            qa(1),
            JUDGED | {"columns": {"task_id": "id", "instruction": "prompt", "payload": ["answer", "x"]}},
            "no column 'x', which tasks.columns.payload names",
        ),
        ([ROW], {"columns": {"verifier": "verifier"}, "verifier": "judge.py"}, "has no effect beside tasks.verifier"),
        ([ROW, ROW], {}, "task_id 'a' stands in several rows (t.parquet row 0, t.parquet row 1)"),
    ],
)
def test_a_wrong_map_is_a_sentence(tmp_path: Path, rows: list[Any], keys: dict[str, Any], sentence: str) -> None:
    write(tmp_path / "t.parquet", rows)
    assert sentence in refused(tmp_path, **keys)


def test_one_id_in_two_files_is_found(tmp_path: Path) -> None:
    write(tmp_path / "set/train/0.parquet", qa(1))
    write(tmp_path / "set/test/0.parquet", qa(1))
    assert "(test/0.parquet row 0, train/0.parquet row 0)" in refused(tmp_path, "set", **JUDGED)


def test_an_empty_split_is_a_sentence(tmp_path: Path) -> None:
    write(tmp_path / "set/train.parquet", qa(1))
    write(tmp_path / "set/test.parquet", [], pa.schema([("id", pa.int64()), ("prompt", pa.string())]))
    assert "split 'test' is empty: test.parquet holds no row" in refused(tmp_path, "set", **JUDGED)


def test_a_broken_file_is_a_sentence(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", qa(500))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert "t.parquet cannot be read; it must be a whole parquet file" in refused(tmp_path, **JUDGED)
    # The footer whole, a page of it not.
    path.write_bytes(whole[:4] + b"\xff" * 200 + whole[204:])
    assert "t.parquet cannot be read; it must be a whole parquet file" in refused(tmp_path, **JUDGED)


def test_a_split_that_a_run_draws_from_must_have_tasks() -> None:
    rows = [{"split": "train"}, {"split": "train"}, {"split": "test"}]
    base: dict[str, Any] = {"model": "tiny-random", "tasks": {"source": "t.parquet"}}
    check_splits(rows, EvalConfig.model_validate(base | {"cells": [{"name": "a", "split": "test"}]}))
    few = EvalConfig.model_validate(base | {"cells": [{"name": "a", "split": "test", "tasks": 2}]})
    with pytest.raises(
        TasksError, match=r"cells\[0\] \(a\) draws 2 from split 'test', which has 1 tasks; .*train \(2\)"
    ):
        check_splits(rows, few)
    none = RunConfig.model_validate(base | {"iterations": 1, "data": {"train_split": "learn"}})
    with pytest.raises(TasksError, match=r"data\.train_split draws tasks from split 'learn', which has 0 tasks"):
        check_splits(rows, none)


def test_tasks_check_reads_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "Snakefile").touch()
    (tmp_path / "config").mkdir()
    config = f"model: tiny-random\niterations: 1\ntasks: {json.dumps({'source': 't.parquet'} | JUDGED)}\n"
    (tmp_path / "config" / "mine.yaml").write_text(config)
    (tmp_path / "judge.py").touch()
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "t.parquet", qa(3))
    assert cli.main(["tasks", "check", "t.parquet", "--run", "mine"]) == 0
    assert capsys.readouterr().out == "t.parquet: ok, 3 tasks (3 train)\n"
    assert cli.main(["tasks", "check", "t.parquet"]) == 1
    assert "has no column 'task_id'" in capsys.readouterr().out
    assert cli.main(["tasks", "check", "no.parquet"]) == 2
    assert "no.parquet: No such file" in capsys.readouterr().err
