"""A run with a lag on the tiny random model: who sampled what, and that sampling runs beside training."""

from __future__ import annotations

import json
import shutil
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_tiny_run import rows, snakemake

ROOT = Path(__file__).resolve().parents[2]
LAG, ITERATIONS = 1, 2

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """results/lagged of a clone: one shard, few episodes at a time (slow ones), an evaluation of every checkpoint."""
    root = tmp_path_factory.mktemp("lagged")
    for part in ("Snakefile", "rules", "scripts", "config", "profiles", "envs", "openforge"):
        src = ROOT / part
        (shutil.copytree if src.is_dir() else shutil.copy)(src, root / part)
    (root / ".software").symlink_to(ROOT / ".software")
    config: dict[str, Any] = yaml.safe_load((ROOT / "config" / "tiny.yaml").read_text())
    config |= {"iterations": ITERATIONS, "lag": LAG, "rollout": {"n": 4, "concurrency": 4}}
    config["actor"]["optim"]["lr"] = 0.001
    config["cells"] = [{**config["cells"][0], "n": 1, "at": "every"}]
    (root / "config" / "lagged.yaml").write_text(yaml.safe_dump(config))
    snakemake(root, "train_lagged", "--cores", "2")
    return root / "results" / "lagged"


def version(run: Path, k: int) -> str:
    card = json.loads((run / "checkpoints" / f"{k:04d}" / "checkpoint.json").read_text())
    return str(card["policy_version"])


def test_every_episode_is_of_the_one_policy_that_was_planned(run: Path) -> None:
    versions = [version(run, k) for k in range(ITERATIONS + 1)]
    assert len({v.partition("@")[2] for v in versions}) == ITERATIONS + 1
    episodes = {str(e["episode_id"]): e for e in rows(run, "episodes")}
    seen: dict[tuple[str, int], set[Any]] = {}
    for e in episodes.values():
        key = (str(e["purpose"]), int(str(e["iteration"])))
        seen.setdefault(key, set()).add((e["policy_version"], e["staleness"]))
    # Iterations 1 and 2 sample with checkpoint 0, of which the second lags by one.
    assert seen == {
        ("train", 1): {(versions[0], 0)},
        ("train", 2): {(versions[0], 1)},
        **{("eval", k): {(versions[k], None)} for k in range(ITERATIONS + 1)},
    }
    calls = rows(run, "calls")
    assert calls and all(c["policy_version"] == episodes[str(c["episode_id"])]["policy_version"] for c in calls)


def test_what_was_sampled_is_what_the_trainer_holds_against_it(run: Path) -> None:
    """Iteration 1 trains the very policy that sampled; iteration 2 one that has moved on since."""
    # Of the first step: its weights are still those that the iteration begins with.
    first = [m for m in rows(run, "metrics") if m["step"] == 0]
    values = {(m["iteration"], m["name"]): float(str(m["value"])) for m in first}
    assert values[1, "training/logprob_diff_mean"] < 1e-4 < values[2, "training/logprob_diff_mean"]
    assert values[2, "rollout_corr/kl"] != 0


def test_sampling_runs_beside_training(run: Path) -> None:
    spans: dict[str, list[tuple[datetime, datetime]]] = {"rollout": [], "train": []}
    for file in (run / "timings").glob("*.json"):
        took = json.loads(file.read_text())
        if took["stage"] in spans:
            began = datetime.fromisoformat(took["started"])
            spans[took["stage"]].append((began, began + timedelta(seconds=took["seconds"])))
    assert any(a < d and c < b for a, b in spans["rollout"] for c, d in spans["train"]), spans
