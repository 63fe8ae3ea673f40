"""Kill a run again and again at random moments, type the same command again, and count what is lost or doubled.

    python benchmarks/kills.py --kills 20 --in-training 5 --in-rollouts 7 --signals KILL --json kills.json

The run is config/tiny.yaml, with every real part, in a clone of its own. KILL is sent to Snakemake and to all that it
started; TERM and INT to Snakemake alone, as a user or a scheduler does. After each death the store must open; after the
last command every planned rollout must have exactly one final episode, and nothing may be left behind. The exit code
says whether it was so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import duckdb

from openforge import store

ROOT = Path(__file__).resolve().parents[1]
RUN = "tiny"
# Seconds within which it is killed: after its start (set-up, a server's start), after a training job's (imports,
# steps, checkpoint), after a shard's first episode began.
LATEST = {"start": 30.0, "training": 9.0, "rollout": 2.0}


def clone(root: Path) -> None:
    """The workflow in a folder of its own, with the software that is built here."""
    for part in ("Snakefile", "rules", "scripts", "config", "profiles", "envs", "openforge"):
        src = ROOT / part
        (shutil.copytree if src.is_dir() else shutil.copy)(src, root / part)
    (root / ".software").symlink_to(ROOT / ".software")


def start(root: Path, iterations: int, log: Path) -> subprocess.Popen[bytes]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("OPENFORGE_")} | {"PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "snakemake", "--nocolor", f"train_{RUN}", "--config", f"iterations={iterations}"]
    # A benchmark that was itself started in the background ignores SIGINT, and so would Snakemake.
    command = ["env", "--default-signal=INT", *command]
    with open(log, "ab") as out:
        return subprocess.Popen(
            command, cwd=root, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )


def started_by(root: Path) -> list[int]:
    """Live processes that a command of the clone started, directly or not; sandboxes are known by their folders."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and int(entry) != os.getpid():
            with contextlib.suppress(OSError):
                stat = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[0]
                env = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
                line = Path(f"/proc/{entry}/cmdline").read_bytes()
                ours = f"OPENFORGE_ROOT={root}".encode() in env or f"{root}/".encode() in line
                if stat not in "ZX" and ours:
                    found.append(int(entry))
    return found


def kill(root: Path, child: subprocess.Popen[bytes], sign: signal.Signals) -> None:
    """End a command by a signal and wait until it is dead."""
    child.send_signal(sign)
    if sign is signal.SIGKILL:
        # Not the sandboxes: the kernel has to end those with their owner.
        mark = f"OPENFORGE_ROOT={root}".encode()
        for pid in started_by(root):
            with contextlib.suppress(OSError):
                if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    os.kill(pid, sign)
    child.wait(120)


def wait_for(moment: str, root: Path, child: subprocess.Popen[bytes]) -> None:
    """Wait until a training job runs, or a shard's episodes do, or the command ends."""
    while child.poll() is None and moment != "start":
        if moment == "training" and any(b"openforge.train.epoch" in line for line in command_lines(root)):
            return
        records = root.glob(f"results/{RUN}/partial/*/*/*/episodes.jsonl")
        if moment == "rollout" and any(f.stat().st_size for f in records):
            return
        time.sleep(0.1)


def command_lines(root: Path) -> list[bytes]:
    lines = []
    for pid in started_by(root):
        with contextlib.suppress(OSError):
            lines.append(Path(f"/proc/{pid}/cmdline").read_bytes())
    return lines


def store_opens(root: Path) -> bool:
    run_dir = root / "results" / RUN
    if not run_dir.is_dir():
        return True
    if store.refresh(run_dir):
        return False
    with duckdb.connect(str(run_dir / store.STORE), read_only=True) as db:
        db.sql("select count(*) from episodes").fetchall()
    return True


def finished(root: Path) -> dict[str, Any]:
    """What the finished run holds."""
    run_dir = root / "results" / RUN
    store.refresh(run_dir)
    with duckdb.connect(str(run_dir / store.STORE), read_only=True) as db:
        db.sql("create temp view f as select rollout_id, count(*) n from all_episodes where final group by 1")
        count = {
            "rollouts": "select count(*) from rollouts",
            "not_exactly_one_final": "select count(*) from rollouts left join f using (rollout_id) "
            "where n is distinct from 1",
            "unplanned": "select count(*) from f anti join rollouts using (rollout_id)",
            "shard_lost": "select count(*) from all_episodes where status = 'shard_lost'",
            "planned_twice": "select count(*) - count(distinct rollout_id) from rollouts",
        }
        figures: dict[str, Any] = {k: db.sql(q).fetchall()[0][0] for k, q in count.items()}
        figures["final_statuses"] = dict(db.sql("select status, count(*) from episodes group by 1").fetchall())
        figures["attempts"] = dict(
            db.sql("select attempt, count(*) from all_episodes group by 1 order by 1").fetchall()
        )
    return figures


def left_behind(root: Path, seconds: float = 60) -> list[str]:
    """Processes and half-written files that remain; a warm server has a moment to notice that its owner is gone."""
    deadline = time.monotonic() + seconds
    while (pids := started_by(root)) and time.monotonic() < deadline:
        time.sleep(0.2)
    files = [
        p for p in root.rglob("*") if p.name.endswith((".tmp", ".old", ".job.json")) and ".snakemake" not in p.parts
    ]
    files += list((root / "results" / RUN / "partial").rglob("*"))
    return [f"process {p}" for p in pids] + [str(f.relative_to(root)) for f in files]


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--kills", type=int, default=20)
    p.add_argument("--in-training", type=int, default=5, help="how many of them while a training job runs")
    p.add_argument("--in-rollouts", type=int, default=7, help="how many of them while episodes run")
    p.add_argument("--signals", nargs="+", default=["KILL"], choices=["KILL", "TERM", "INT"])
    p.add_argument("--iterations", type=int, default=2, help="at least; one is added when the run ends too early")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--json", type=Path, required=True)
    args = p.parse_args()
    draw = random.Random(args.seed)
    moments = ["training"] * args.in_training + ["rollout"] * args.in_rollouts
    moments += ["start"] * (args.kills - len(moments))
    draw.shuffle(moments)
    deaths: list[dict[str, Any]] = []
    iterations, begun = args.iterations, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        root = Path(folder).resolve()
        clone(root)
        log = root / "command.log"
        while len(deaths) < args.kills:
            n = len(deaths)
            sign = signal.Signals[f"SIG{args.signals[n % len(args.signals)]}"]
            child = start(root, iterations, log)
            wait_for(moments[n], root, child)
            delay = draw.uniform(0, LATEST[moments[n]])
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(delay)
            if child.poll() is not None:
                if child.returncode:
                    print(log.read_text()[-4000:], file=sys.stderr)
                    return 1
                iterations += 1  # it finished first: one more iteration to be killed in
                continue
            kill(root, child, sign)
            deaths.append(
                {
                    "signal": sign.name,
                    "moment": moments[n],
                    "after_s": round(delay, 1),
                    "exit": child.returncode,
                    "store_opens": store_opens(root),
                }
            )
            print(deaths[-1], flush=True)
        for _ in range(2):
            # As a user: an episode that two kills ended may leave a shard below its quorum.
            child = start(root, iterations, log)
            if child.wait(1800) == 0:
                break
        if child.returncode:
            print(log.read_text()[-6000:], file=sys.stderr)
            return 1
        result = {
            "deaths": deaths,
            "iterations": iterations,
            "seconds": round(time.monotonic() - begun, 1),
            **finished(root),
            "left_behind": left_behind(root),
            "nothing_to_do": b"Nothing to be done" in again(root, iterations),
        }
    args.json.write_text(json.dumps(result, indent=1) + "\n")
    wrong = result["not_exactly_one_final"] or result["unplanned"] or result["shard_lost"] or result["left_behind"]
    wrong = wrong or not result["nothing_to_do"] or not all(d["store_opens"] for d in deaths)
    print(json.dumps({k: v for k, v in result.items() if k != "deaths"}))
    return 1 if wrong else 0


def again(root: Path, iterations: int) -> bytes:
    log = root / "again.log"
    start(root, iterations, log).wait(300)
    return log.read_bytes()


if __name__ == "__main__":
    sys.exit(main())
