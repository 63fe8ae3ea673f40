"""Does the demo learn at other seeds, on policy and stale? Trains it anew for every seed and lag.

    python benchmarks/seeds.py --seeds 0 1 2 --lags 0 1 2 --json seeds.json

Each run is config/demo.yaml with its held-out cell only (64 tasks, 4 samples each at temperature 1, before and after),
old logprobs recomputed and corrected by the recorded ones, and every other key as it is. A benchmark that was killed
goes on where it was. The JSON holds pass@1 before and after with 95 % intervals (bootstrap over tasks), each
iteration's staleness and share of importance weights that were cut, and how many seeds rose by 0.20 or more.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml

ROOT = Path(__file__).resolve().parents[1]
RISE, SAMPLES = 0.20, 4
FIGURES = ("training/staleness", "rollout_corr/rollout_is_ratio_fraction_high", "rollout_corr/kl")


def configuration(seed: int, lag: int) -> dict[str, Any]:
    """The demo's configuration at another seed and lag, with its held-out cell only and the correction on."""
    demo: dict[str, Any] = yaml.safe_load((ROOT / "config" / "demo.yaml").read_text())
    demo["algorithm"]["rollout_correction"] = {"bypass_mode": False}
    cells = [c | {"n": SAMPLES} for c in demo["cells"] if c["name"] == "heldout"]
    return demo | {"seed": seed, "lag": lag, "cells": cells}


def train(seed: int, lag: int) -> dict[str, Any]:
    """Run one seed to its end; its figures."""
    run = f"seeds_{seed}_lag_{lag}"
    config = ROOT / "config" / f"{run}.yaml"
    config.write_text(yaml.safe_dump(configuration(seed, lag)))
    try:
        subprocess.run(
            [sys.executable, "-m", "snakemake", "--quiet", "rules", "--", f"train_{run}"], cwd=ROOT, check=True
        )
    finally:
        config.unlink()
    last = configuration(seed, lag)["iterations"]
    before, after = (
        json.loads((ROOT / f"results/{run}/eval/cell=heldout/iteration={k:04d}/eval.json").read_text())
        for k in (0, last)
    )
    keys = ("p", "low", "high", "n", "episodes", "missing")
    return {
        "seed": seed,
        "lag": lag,
        "before": {k: before[k] for k in keys},
        "after": {k: after[k] for k in keys},
        "rise": after["p"] - before["p"],
        "iterations": [figures(run, k) for k in range(1, last + 1)],
    }


def figures(run: str, iteration: int) -> dict[str, float]:
    """Means over an iteration's optimizer steps of what says how far off policy it was."""
    folder = ROOT / f"results/{run}/metrics/purpose=train/cell=train/iteration={iteration:04d}"
    rows = pq.ParquetFile(folder / "metrics.parquet").read().to_pylist()
    found = {}
    for name in FIGURES:
        values = [r["value"] for r in rows if r["name"] == name]
        found[name.rsplit("/", 1)[1]] = sum(values) / len(values)
    return found


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    p.add_argument("--lags", type=int, nargs="+", default=[0, 1])
    p.add_argument("--json", type=Path, required=True)
    args = p.parse_args()
    runs = []
    for lag in args.lags:
        for seed in args.seeds:
            runs.append(train(seed, lag))
            rose = {lag: sum(r["rise"] >= RISE for r in runs if r["lag"] == lag) for lag in args.lags}
            args.json.write_text(json.dumps({"runs": runs, "rose_by_0.20": rose}, indent=1) + "\n")
            r = runs[-1]
            print(f"seed {seed} lag {lag}: {r['before']['p']:.3f} -> {r['after']['p']:.3f}", flush=True)


if __name__ == "__main__":
    main()
