"""Tables: rows against their declaration, files against each other, identities against literals."""

import hashlib
import os
from datetime import UTC, datetime

import made_run
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from openforge import tables as t

METRIC = {"iteration": 1, "step": 0, "name": "loss", "value": 0.5}


def test_every_table_round_trips_a_made_row(tmp_path):
    raw = made_run.task("a", "copy", "train") | {"files": [{"path": "x", "content": b"\x00\xff", "mode": 0o644}]}
    planned = made_run.rollout(raw, "train", "train", None, 0)
    episode = made_run.episode(planned, "completed")
    blob = {"sha256": "ab", "mime": "image/png", "width": 1, "height": None, "bytes": b"\x00"}
    rows = {
        "tasks": raw,
        "rollouts": planned,
        "episodes": episode,
        "calls": made_run.call(episode, 1),
        "blobs": blob,
        "scores": made_run.score(episode, None),
        "samples": made_run.sample(episode, 0, [0]) | {"logprobs": [0.0, 0.0, -0.5], "advantages": None},
        "metrics": METRIC,
    }
    assert set(rows) == set(t.TABLES)
    for name, row in rows.items():
        path = tmp_path / f"{name}.parquet"
        t.write_table(path, t.TABLES[name], [row, row])
        back = t.read_rows([path, path], t.TABLES[name])
        expected = row if name != "calls" else row | {"logprobs": pytest.approx(row["logprobs"], abs=1e-7)}
        assert back == [expected] * 4
        t.check_file(path, t.TABLES[name])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({k: v for k, v in METRIC.items() if k != "step"}, r"table metrics, row 1: missing columns \['step'\]"),
        (METRIC | {"nope": 1}, r"table metrics, row 1: missing columns \[\], unknown columns \['nope'\]"),
        (METRIC | {"value": None}, "table metrics, row 1: column value must not be NULL"),
        (METRIC | {"value": "x"}, r"table metrics, column value \(double\)"),
        (METRIC | {"step": 2**40}, r"table metrics, column step \(int32\)"),
        (METRIC | {"step": 1.5}, r"table metrics, column step \(int32\)"),
        (METRIC | {"step": True}, r"table metrics, column step \(int32\)"),
        (METRIC | {"name": 3}, r"table metrics, column name \(string\)"),
    ],
)
def test_a_row_that_does_not_fit_is_a_sentence(row, message):
    with pytest.raises(t.TableError, match=message):
        t.METRICS.arrow([METRIC, row])


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("token_ids", [1, 2.5]),
        ("loss_mask", [True, False]),
        ("loss_mask", [300]),
        ("token_ids", [None]),
        ("calls", [0.5]),
    ],
)
def test_lists_of_whole_numbers_are_not_cut_down(column, value):
    e = made_run.episode(made_run.rollout(made_run.task("a", "k", "s"), "train", "train", 1, 0), "completed")
    row = made_run.sample(e, 0, [0])
    t.SAMPLES.arrow([row])
    with pytest.raises(t.TableError, match=f"table samples, column {column}"):
        t.SAMPLES.arrow([row, row | {column: value}])


def test_whole_numbers_inside_structs_are_not_cut_down():
    planned = made_run.rollout(made_run.task("a", "k", "s"), "train", "train", 1, 0)
    t.ROLLOUTS.arrow([planned])
    with pytest.raises(t.TableError, match="table rollouts, column limits"):
        t.ROLLOUTS.arrow([planned | {"limits": {"turns": 1.5, "tokens": None, "seconds": 1.0}}])


def test_no_rows_are_a_file_with_the_schema(tmp_path):
    path = tmp_path / "deep" / "down" / "scores.parquet"
    t.write_table(path, t.SCORES, [])
    assert pq.read_schema(path).names == [c.name for c in t.SCORES.columns]
    assert pq.read_schema(path).field("reward").type == pa.float64()
    assert t.read_rows(path, t.SCORES) == []
    assert t.read_table([], t.SCORES).schema.names == t.SCORES.schema.names


def test_reading_adds_no_hive_columns(tmp_path):
    path = tmp_path / t.partition_path("scores", "train", "train", 3)
    t.write_table(path, t.SCORES, [])
    assert t.read_table(path, t.SCORES).column_names == [c.name for c in t.SCORES.columns]


@pytest.mark.parametrize("keep", [0, 3, 50, -1])
def test_a_truncated_file_is_named(tmp_path, keep):
    path = tmp_path / "metrics.parquet"
    t.write_table(path, t.METRICS, [METRIC])
    path.write_bytes(path.read_bytes()[:keep])
    for read in (t.read_table, t.check_file):
        with pytest.raises(t.TableError, match=r"metrics\.parquet cannot be read as table metrics"):
            read(path, t.METRICS)


def test_another_table_and_another_version_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "x.parquet"
    t.write_table(path, t.METRICS, [METRIC])
    for read in (t.read_table, t.check_file):
        with pytest.raises(t.TableError, match="holds table 'metrics' with schema 2; expected 'scores'"):
            read(path, t.SCORES)
    monkeypatch.setattr(t, "SCHEMA_VERSION", 3)
    with pytest.raises(t.TableError, match="holds table 'metrics' with schema 2; expected 'metrics' with schema 3"):
        t.read_table(path, t.METRICS)
    pq.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(t.TableError, match="holds table 'unknown' with schema none"):
        t.read_table(path, t.METRICS)


def test_a_missing_file_is_a_sentence(tmp_path):
    with pytest.raises(t.TableError, match=r"nope\.parquet cannot be read as table metrics"):
        t.read_rows(tmp_path / "nope.parquet", t.METRICS)


def test_a_failed_write_leaves_the_old_file_and_nothing_beside(tmp_path, monkeypatch):
    path = tmp_path / "metrics.parquet"
    t.write_table(path, t.METRICS, [METRIC])
    t.write_beside(tmp_path / "note.txt", "old")

    def refuse(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="disk full"):
        t.write_table(path, t.METRICS, [])
    with pytest.raises(OSError, match="disk full"):
        t.write_beside(tmp_path / "note.txt", "new")
    assert t.read_rows(path, t.METRICS) == [METRIC]
    assert (tmp_path / "note.txt").read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.parquet", "note.txt"]


def test_an_arrow_table_of_other_columns_is_refused(tmp_path):
    with pytest.raises(t.TableError, match=r"table metrics: columns \['a'\] are not"):
        t.write_table(tmp_path / "x.parquet", t.METRICS, pa.table({"a": [1]}))


def test_identities_are_stable_and_keep_their_parts_apart():
    # As sha256sum prints it for the bytes ["group","demo","train","train",1,0,"t1"].
    digest = hashlib.sha256(b'["group","demo","train","train",1,0,"t1"]').hexdigest()
    group = t.group_id("demo", "train", "train", 1, 0, "t1")
    assert group == digest[:16]
    ids = {
        group,
        t.group_id("demo", "train", "train", 1, 1, "t1"),
        t.group_id("demo", "train", "train", None, 0, "t1"),
        t.group_id("demo", "eval", "train", 1, 0, "t1"),
        t.rollout_id(group, 0),
        t.rollout_id(group, 1),
        t.episode_id(group, 0),
        t.h("a", "b"),
        t.h("ab"),
        t.h("a,b"),
        t.h(None),
        t.h(""),
        t.h("None"),
        t.h(1),
        t.h("1"),
    }
    assert len(ids) == 15
    assert all(len(i) == 16 and int(i, 16) >= 0 for i in ids)


def test_partition_paths():
    assert t.partition_path("episodes", "train", "train", 1, 12) == (
        "episodes/purpose=train/cell=train/iteration=0001/shard=0012/episodes.parquet"
    )
    assert t.partition_path("scores", "eval", "pi", None) == (
        "scores/purpose=eval/cell=pi/iteration=none/scores.parquet"
    )


def test_declarations_are_whole():
    for name, table in t.TABLES.items():
        names = [c.name for c in table.columns]
        assert table.name == name and len(names) == len(set(names))
        for c in table.columns:
            assert c.doc.endswith("."), f"{name}.{c.name}"
        assert set(table.partition) <= {"purpose", "cell", "iteration", "shard"}


def test_times_keep_their_zone(tmp_path):
    e = made_run.episode(made_run.rollout(made_run.task("a", "k", "s"), "train", "train", 1, 0), "completed")
    path = tmp_path / "e.parquet"
    t.write_table(path, t.EPISODES, [e])
    (back,) = t.read_rows(path, t.EPISODES)
    assert back["started"] == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def test_markdown_has_every_column_of_every_table():
    text = t.markdown()
    for name, table in t.TABLES.items():
        section = text.split(f"\n## {name}\n")[1].split("\n## ")[0]
        for c in table.columns:
            assert section.count(f"\n| {c.name} | `") == 1
