"""`data.filter`: which episodes a condition leaves out, what that does to their group, and how it is counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import made_run
import pytest
from samples_rig import advantage_of, config, group_of

from openforge import condition, store, tables
from openforge.condition import ConditionError
from openforge.samples.build import build

JOB = Path(__file__).parents[2] / "scripts/samples.py"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_run.make(tmp_path_factory.mktemp("filter"))


@pytest.fixture(scope="module")
def files(run_dir: Path) -> Mapping[str, list[Path]]:
    """Of the hand-made run's first iteration."""
    part = "purpose=train/cell=train/iteration=0001"
    return {t: sorted(run_dir.glob(f"{t}/{part}/**/{t}.parquet")) for t in ("episodes", "calls", "scores")}


@pytest.mark.parametrize(
    ("where", "left"),
    [
        # Rewards 1 0 0 1 | 0 0 0 0, and the latest score counts.
        ("reward > 0", 2),
        ("true", 8),
        ("NULL::boolean", 0),
        ("reward = 1 -- only the solved", 2),
        # A lost first attempt is no episode of the view, but can be asked for.
        ("status = 'completed'", 8),
        ("rollout_id IN (SELECT rollout_id FROM all_episodes WHERE NOT final)", 1),
        ("EXISTS (FROM calls c WHERE c.episode_id = episodes.episode_id)", 8),
        ("EXISTS (FROM calls c WHERE c.episode_id = episodes.episode_id AND c.call = 99)", 0),
    ],
)
def test_what_a_condition_leaves(files: Mapping[str, list[Path]], run_dir: Path, where: str, left: int) -> None:
    condition.check(where)
    failing = condition.failing(where, files)
    everyone = store.rows(run_dir, "SELECT episode_id FROM episodes WHERE purpose = 'train' AND iteration = 1")
    assert len(everyone) == 8 and failing <= {r["episode_id"] for r in everyone}
    assert 8 - len(failing) == left


def test_a_value_that_does_not_fit_is_a_sentence(files: Mapping[str, list[Path]]) -> None:
    where = "status::int > 0"
    condition.check(where)
    with pytest.raises(
        ConditionError,
        match=r"^data\.filter is 'status::int > 0': Conversion Error: Could not convert string 'completed' to INT32",
    ):
        condition.failing(where, files)


def test_filtered_episodes_take_no_part_and_are_counted() -> None:
    episodes, scores, calls = group_of([1.0, 0.0, 0.0, 1.0])
    result = build(episodes, scores, calls, config(std=False), {"g0-e1", "g0-e3"})
    assert {s["episode_id"] for s in result.samples} == {"g0-e0", "g0-e2"}
    assert advantage_of(result.samples, "g0-e0") == 0.5
    assert result.report["episodes"] == {"total": 4, "trained": 2, "dropped": {"filtered": 2}}
    assert result.report["calls"] == {"total": 4, "trained": 2, "dropped": {"episode: filtered": 2}}
    one = build(episodes, scores, calls, config(), {"g0-e1", "g0-e2", "g0-e3"})
    assert one.report["episodes"]["dropped"] == {"filtered": 3, "singleton_group": 1}
    everyone = build(episodes, scores, calls, config(), {e["episode_id"] for e in episodes})
    assert everyone.report["groups"] == {"total": 1, "trained": 0, "dropped": {"no_row": 1}}


def test_what_has_no_reward_anyway_is_counted_as_such() -> None:
    episodes, scores, calls = group_of([1.0, 0.0, 0.0])
    episodes[2]["status"] = "sandbox_lost"
    result = build(episodes, scores, calls, config(), {"g0-e2"})
    assert result.report["episodes"]["dropped"] == {"status: sandbox_lost": 1}


# The rule's script with what Snakemake hands it; the job's end is its exit code.
SCRIPT = """
import json, runpy, sys
from types import SimpleNamespace
paths, out = json.loads(sys.argv[1]), json.loads(sys.argv[2])
class Files(SimpleNamespace):
    def __iter__(self):
        return iter([])
snakemake = SimpleNamespace(
    wildcards={"run": "made", "purpose": "train", "cell": "train", "k": "0001"}, log=["samples.log"],
    input=Files(**paths), output=SimpleNamespace(**out), config={}, resources={},
)
runpy.run_path(sys.argv[3], {"snakemake": snakemake})
"""


@pytest.mark.parametrize("where", [None, "reward = 1 or sample < 2", "status::int > 0"])
def test_the_job_leaves_out_what_the_configuration_says(
    files: Mapping[str, list[Path]], tmp_path: Path, where: str | None
) -> None:
    # Those of the hand-made run are for looking at: their versions and second prompts would be refused.
    calls = [c | {"policy_version": "0@abc"} for c in tables.read_rows(files["calls"], tables.CALLS) if c["call"] == 0]
    tables.write_table(tmp_path / "calls.parquet", tables.CALLS, calls)
    episodes, scores = [str(f) for f in files["episodes"]], str(files["scores"][0])
    (tmp_path / "config.json").write_text("{}")  # a language model's
    paths = {"episodes": episodes, "calls": ["calls.parquet"], "blobs": [], "scores": scores, "base": "checkpoint.json"}
    (tmp_path / "config").mkdir()
    data = {"model": "tiny-random", "iterations": 2, "tasks": {"source": "tiny"}, "data": {"filter": where}}
    (tmp_path / "config/made.yaml").write_text(json.dumps(data))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(paths), '{"samples": "s.parquet", "report": "r.json"}', str(JOB)],
        cwd=tmp_path,
        env=os.environ | {"OPENFORGE_ROOT": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    if where == "status::int > 0":
        assert done.returncode == 1 and not (tmp_path / "s.parquet").exists()
        (line,) = done.stderr.splitlines()
        assert line.startswith("error: samples of made: data.filter is 'status::int > 0': Conversion Error")
        return
    assert done.returncode == 0, done.stderr
    samples = tables.read_rows(tmp_path / "s.parquet", tables.SAMPLES)
    # Rewards 1 0 0 1 of the group with spread: of samples 0, 1, 2, 3.
    assert len(samples) == (3 if where else 4)
    dropped = json.loads((tmp_path / "r.json").read_text())["episodes"]["dropped"]
    assert dropped == {"not_final": 1} | ({"filtered": 3, "zero_variance": 2} if where else {"zero_variance": 4})
