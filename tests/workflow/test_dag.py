"""Which jobs a command plans. The rules are the real ones; the jobs are stubs that touch their outputs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from openforge import config_paths, tables
from openforge.config import load
from openforge.config_docs import flatten
from openforge.verbs.jobs import Jobs

ROOT = Path(__file__).resolve().parents[2]
# Tasks and plans are real: what an iteration was planned with decides over it.
STUB = f"""\
import runpy
from pathlib import Path
if snakemake.rule in ("tasks", "plan"):
    runpy.run_path(f"{ROOT}/scripts/{{snakemake.rule}}.py", {{"snakemake": snakemake}})
for output in snakemake.output:
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    Path(output).touch()
    if output.endswith("checkpoint.json"):
        Path(output).with_name("model.safetensors").touch()
"""


def stubbed(root: Path) -> None:
    """Make a folder a clone of the workflow, its jobs replaced by stubs."""
    for part in ("Snakefile", "rules", "config", "profiles", "envs"):
        src = ROOT / part
        (shutil.copytree if src.is_dir() else shutil.copy)(src, root / part)
    # Of these, configurations name files.
    for part in ("openforge", "suites"):
        (root / part).symlink_to(ROOT / part)
    (root / "scripts").mkdir()
    for script in (ROOT / "scripts").glob("*.py"):
        (root / "scripts" / script.name).write_text(STUB)


def snakemake(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("OPENFORGE_")}
    command = [sys.executable, "-m", "snakemake", "--nocolor", *words]
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=120)


def planned(root: Path, *words: str) -> dict[str, int]:
    """Jobs by rule that a dry run lists."""
    done = snakemake(root, "-n", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    if "Nothing to be done" in done.stdout + done.stderr:
        return {}
    table = re.search(r"^job +count\n-+ +-+\n(.*?)\n\n", done.stdout + done.stderr, re.S | re.M)
    assert table is not None, done.stdout + done.stderr
    rows = [line.split() for line in table[1].splitlines()]
    return {name: int(count) for name, count in rows if name != "total"}


def outlook(root: Path, run: str, **overrides: object) -> dict[str, int]:
    """Jobs by rule that `openforge plan` counts as left."""
    return dict(Counter(job.rule for job in Jobs(run, load(run, root, overrides).config, root).left()))


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of the workflow without any result, its jobs replaced by stubs."""
    root = tmp_path_factory.mktemp("clone")
    stubbed(root)
    return root


@pytest.fixture(scope="module")
def finished(fresh: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same after `snakemake train_tiny`."""
    root = tmp_path_factory.mktemp("finished") / "clone"
    shutil.copytree(fresh, root, symlinks=True)
    done = snakemake(root, "train_tiny")
    assert done.returncode == 0, done.stdout + done.stderr
    return root


def test_a_fresh_run_plans_every_stage(fresh: Path) -> None:
    jobs = planned(fresh, "train_tiny")
    # config/tiny.yaml: 2 iterations of 2 shards, one cell before and after, one after.
    assert {k: jobs[k] for k in ("tasks", "prepare", "plan", "rollout", "score", "samples", "train", "eval")} == {
        "tasks": 1,
        "prepare": 1,
        "plan": 2 + 3,
        "rollout": 2 * 2 + 3,
        "score": 2 + 3,
        "samples": 2,
        "train": 2,
        "eval": 3,
    }
    # Snakemake counts the software environments one by one, and the target itself.
    others = {name: count for name, count in jobs.items() if not name.startswith("software") and name != "train_tiny"}
    assert others == outlook(fresh, "tiny")


def checkout(name: str) -> str:
    return str(ROOT / f"tests/environments/samples/{name}_checkout")


@pytest.mark.slow
def test_no_evaluation_plans_training(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suites = sorted(p.stem for p in (fresh / "config").glob("eval_*.yaml"))
    assert suites
    for suite in suites:
        for name in ("claweval", "qwenclaw"):
            monkeypatch.setenv(name.upper(), checkout(name) if suite == f"eval_{name}" else "")
        jobs = planned(fresh, suite)
        assert "train" not in jobs and "samples" not in jobs and jobs["eval"] >= 1
        assert {n: c for n, c in jobs.items() if not n.startswith("software") and n != suite} == outlook(fresh, suite)


def test_a_checkout_that_is_named_is_evaluated_beside_our_suite(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLAWEVAL", checkout("claweval"))
    monkeypatch.delenv("QWENCLAW", raising=False)
    done = snakemake(fresh, "-n", "eval_claw", "--config", "policy=tiny-random")
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    for suite, cell in (("eval_claw", "reference"), ("eval_claweval", "codex")):
        # The command's policy is that of both; their results are apart.
        assert f"results/{suite}/eval/cell={cell}.tiny_random" in said
    assert "results/eval_qwenclaw/" not in said
    (line,) = [x for x in said.splitlines() if "QWENCLAW" in x]
    assert line.startswith("eval_qwenclaw is left out: config/eval_qwenclaw.yaml: tasks.source is $QWENCLAW")
    refused = snakemake(fresh, "-n", "eval_qwenclaw")
    assert refused.returncode != 0 and "error: config/eval_qwenclaw.yaml: tasks.source is $QWENCLAW" in refused.stderr
    # Whoever asks for another target hears nothing of them.
    assert "QWENCLAW" not in (other := snakemake(fresh, "-n", "train_tiny")).stdout + other.stderr


def test_a_finished_run_has_nothing_to_do(finished: Path) -> None:
    assert planned(finished, "train_tiny") == {}
    assert outlook(finished, "tiny") == {}


def test_one_more_iteration_plans_only_itself(finished: Path) -> None:
    jobs = planned(finished, "train_tiny", "--config", "iterations=3")
    expected = {"plan": 3, "rollout": 4, "score": 3, "samples": 1, "train": 1, "eval": 2, "write_report": 1}
    assert jobs == expected | {"train_tiny": 1}
    assert outlook(finished, "tiny", iterations=3) == expected


def jobs(root: Path, *words: str) -> dict[str, list[tuple[str, int]]]:
    """Inputs and threads of the jobs that a dry run lists, by rule, purpose and iteration, e.g. `rollout train 1`."""
    done = snakemake(root, "-n", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, list[tuple[str, int]]] = {}
    for rule, block in re.findall(r"^rule (\w+):\n((?:    .*\n)+)", done.stdout + done.stderr, re.M):
        lines = dict(re.findall(r"^    (\w+): (.*)$", block, re.M))
        wild = dict(w.split("=") for w in lines.get("wildcards", "").split(", ") if w)
        if "k" in wild:
            key = f"{rule} {wild.get('purpose', 'train')} {int(wild['k'])}"
            found.setdefault(key, []).append((lines["input"], int(lines.get("threads", 1))))
    return found


@pytest.mark.parametrize(("lag", "sampled"), [(0, [0, 1, 2, 3]), (1, [0, 0, 1, 2]), (2, [0, 0, 0, 1])])
def test_the_lag_says_which_checkpoint_an_iteration_samples(fresh: Path, lag: int, sampled: list[int]) -> None:
    found = jobs(fresh, "train_tiny", "--cores", "4", "--config", "iterations=4", f"lag={lag}")
    for k, checkpoint in enumerate(sampled, 1):
        shards = found[f"rollout train {k}"]
        assert [re.findall(r"checkpoints/(\d+)/", i) for i, _ in shards] == [[f"{checkpoint:04d}"]] * 2
        # config/tiny.yaml trains with one thread: with a lag sampling runs beside it on the others.
        assert [threads for _, threads in shards] == [4 if lag == 0 else 3] * 2
        ((_, threads),) = found[f"train train {k}"]
        assert threads == (4 if lag == 0 else 1)
        # At most one training rollout is in flight, whatever the lag.
        ((inputs, _),) = found[f"plan train {k}"]
        before = f"scores/purpose=train/cell=train/iteration={k - 1:04d}/scores.parquet"
        assert (before in inputs) == (k > 1)
    for k in (0, 4):
        assert all(re.findall(r"checkpoints/(\d+)/", i) == [f"{k:04d}"] for i, _ in found[f"rollout eval {k}"])


def test_with_a_lag_two_cores_are_shared_whatever_training_asks_for(fresh: Path) -> None:
    found = jobs(fresh, "train_tiny", "--cores", "2", "--config", "iterations=2", "lag=1", "trainer={threads: 8}")
    assert found["train train 1"][0][1] + found["rollout train 2"][0][1] == 2


@pytest.mark.parametrize("actor", ["{use_kl_loss: true}", "{model: {lora_rank: 4}}", "{}"])
def test_checkpoint_0_is_an_input_where_training_reads_it(fresh: Path, actor: str) -> None:
    found = jobs(fresh, "train_tiny", "--config", f"actor={actor}")
    for k in (1, 2):
        ((inputs, _),) = found[f"train train {k}"]
        read = {int(c) for c in re.findall(r"checkpoints/(\d+)/", inputs)}
        assert read == ({k - 1} if actor == "{}" else {0, k - 1})


@pytest.mark.parametrize("lost", ["scores", "episodes"])
def test_what_is_lost_of_a_finished_iteration_makes_none_anew(finished: Path, tmp_path: Path, lost: str) -> None:
    root = tmp_path / "clone"
    # Every file is dated anew on the way, as by `cp -r`.
    shutil.copytree(finished, root, symlinks=True, copy_function=shutil.copyfile)
    (file, *_) = sorted((root / "results" / "tiny").glob(f"{lost}/**/*.*"))
    file.unlink()
    # The report's own date may have come before its inputs'.
    assert planned(root, "train_tiny").keys() <= {"write_report", "train_tiny"}


def test_a_damaged_rollout_table_is_one_sentence(finished: Path, tmp_path: Path) -> None:
    root = tmp_path / "clone"
    shutil.copytree(finished, root, symlinks=True)
    (table,) = root.glob("results/tiny/rollouts/purpose=train/cell=train/iteration=0002/rollouts.parquet")
    table.write_bytes(table.read_bytes()[:100])
    done = snakemake(root, "-n", "train_tiny")
    out = done.stdout + done.stderr
    assert done.returncode == 1 and f"error: {table} cannot be read as table rollouts" in out
    assert "Traceback" not in out and "Exception" not in out


def test_changed_pins_never_replan_an_iteration(finished: Path, tmp_path: Path) -> None:
    root = tmp_path / "clone"
    shutil.copytree(finished, root, symlinks=True)
    for pins in (root / "envs").glob("*.txt"):
        pins.write_text(pins.read_text() + "# changed\n")
    assert planned(root, "train_tiny") == {}
    # And they hide nothing that is still to be done.
    assert planned(root, "train_tiny", "--config", "iterations=3")["train"] == 1
    shutil.rmtree(root / ".software")
    assert planned(root, "train_tiny") == {}


def test_an_evaluation_of_a_run_reads_its_checkpoint(finished: Path) -> None:
    jobs = planned(finished, "eval_demo", "--config", "policy=tiny@2")
    assert "train" not in jobs and "prepare" not in jobs


def test_an_evaluation_of_a_folder_prepares_it_and_of_an_endpoint_nothing(fresh: Path, tmp_path: Path) -> None:
    root = tmp_path / "clone"
    shutil.copytree(fresh, root, symlinks=True)
    (root / "models" / "mine").mkdir(parents=True)
    for file in ("config.json", "tokenizer.json", "model.safetensors"):
        (root / "models" / "mine" / file).write_text("{}")
    for policy in ("models/mine", str(root / "models" / "mine")):
        jobs = planned(root, "eval_demo", "--config", f"policy={policy}")
        assert jobs["prepare_policy"] == 1 and jobs["eval"] == 4 and "train" not in jobs
    # A dry run needs no key and says that it is missing.
    words = ["-n", "eval_demo", "--config", "policy=http://127.0.0.1:1/v1", "server={model: m, api_key_env: NO_KEY}"]
    done = snakemake(root, *words)
    out = done.stdout + done.stderr
    assert done.returncode == 0 and "environment variable NO_KEY, which is not set" in out, out
    assert "prepare" not in out and "serve_cpu" not in out and "rule rollout" in out


def test_a_missing_checkpoint_is_one_sentence(finished: Path) -> None:
    done = snakemake(finished, "-n", "eval_demo", "--config", "policy=tiny@7")
    assert done.returncode == 1
    assert "snakemake train_tiny" in done.stdout + done.stderr and "tiny@7" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["train_tiny", "--config", "iteratons=3"], "did you mean 'iterations'?"),
        (["train_tiny", "--config", "iterations=many"], "'iterations' is \"many\""),
        (["train_tiny", "--config", "actor={optim: {lrr: 1.0}}"], "did you mean 'actor.optim.lr'?"),
        (["eval_demo", "--config", "policy=tiny@last"], "RUN@k needs a checkpoint's number"),
        (["eval_demo", "--config", "policy=nosuch/folder"], "policy 'nosuch/folder' must be a model folder"),
        (["eval_demo", "--config", "policy="], "policy= is empty"),
        (["eval_demo", "--config", "policy=http://h/v1", "server={api_key: k}"], "unknown key 'server.api_key'"),
        (["train_tiny", "--config", "from_iteration=3"], "run tiny has finished 0 iterations"),
    ],
)
def test_a_wrong_value_stops_before_any_job(fresh: Path, words: list[str], sentence: str) -> None:
    done = snakemake(fresh, "-n", *words)
    assert done.returncode == 1 and sentence in done.stdout + done.stderr, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_a_run_goes_on_only_as_it_was_made(finished: Path, tmp_path: Path) -> None:
    root = tmp_path / "clone"
    shutil.copytree(finished, root, symlinks=True)
    # What the first job of a run writes; here the jobs are stubs.
    config_paths.freeze(load("tiny", root).config, root / "results" / "tiny")
    assert planned(root, "train_tiny") == {}
    done = snakemake(root, "-n", "train_tiny", "--config", "seed=3")
    assert done.returncode == 1 and "was made with seed = 0, now it is 3" in done.stdout + done.stderr


# ---- finished iterations are immutable ----------------------------------------------------------------
@pytest.fixture
def clone(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run that a test may change."""
    return Path(shutil.copytree(finished, tmp_path / "clone", symlinks=True))


# config/tiny.yaml with another value of everything that a run may change on its way.
CHANGED = """\
model: tiny-random
iterations: 2
tasks: {source: tiny, train: 8, heldout: 4}
data: {train_batch_size: 4}
rollout: {n: 5, shards: 3, concurrency: 9, attempts: 3, quorum: 0.5}
sandbox: {network: none, limits: {processes: 99}, warm: 1, max_alive: 4, creating: 2, create_seconds: 9.0,
  setup_seconds: 9.0, verify_seconds: 9.0, grading: second, artifacts: {keep: failed, most: 2, work: true}}
harness: {name: pi}
limits: {turns: 4, tokens: 99, seconds: 61.0}
sampling: {temperature: 0.9, max_tokens: 17}
server:
  {device: gpu, dtype: bfloat16, max_model_len: 2000, max_num_seqs: 8, block_size: 16, tensor_parallel_size: 2,
   tool_call_parser: hermes, warm: false, start_seconds: 100.0}
actor:
  optim: {lr: 2e-3, weight_decay: 0.1, betas: [0.8, 0.9], clip_grad: 2.0}
  ppo_mini_batch_size: 8
  ppo_epochs: 2
  ppo_max_token_len_per_gpu: 9999
  clip_ratio_low: 0.1
  clip_ratio_high: 0.3
  clip_ratio_c: 4.0
  loss_agg_mode: seq-mean-token-sum
  entropy_coeff: 0.1
  use_shared_prefix: false
  data_loader_seed: 2
trainer: {device: gpu, nproc_per_node: 2, max_actor_ckpt_to_keep: 3, keep_checkpoints: {last: 1, every: 3}}
cells:
  - {name: heldout, n: 3, split: train, tasks: 1, harness: {name: pi}, sampling: {max_tokens: 9}, concurrency: 2,
     limits: {turns: 3}, server: {max_model_len: 1999, chat_template: config/templates/plain.jinja}}
  - {name: command, n: 2, tasks: 1, at: last}
"""


def test_no_changed_key_plans_a_finished_iteration_again(clone: Path) -> None:
    was = flatten(load("tiny", ROOT).config.model_dump(mode="json"))
    (clone / "config" / "tiny.yaml").write_text(CHANGED)
    now = flatten(load("tiny", clone).config.model_dump(mode="json"))
    assert {k.split(".")[0].split("[")[0] for k in now if now[k] != was.get(k)} == {
        *("rollout", "sandbox", "harness", "limits", "sampling", "server", "actor", "trainer", "cells")
    }
    assert planned(clone, "train_tiny") == {}
    # And all of it holds from the first unfinished iteration on.
    jobs = planned(clone, "train_tiny", "--config", "iterations=3")
    expected = {"plan": 3, "rollout": 3 + 2, "score": 3, "samples": 1, "train": 1, "eval": 2, "write_report": 1}
    built = {"software_harness_pi": 1, "software_serve_gpu": 1, "software_train_gpu": 1, "train_tiny": 1}
    assert {k: v for k, v in jobs.items() if k in expected} == expected
    assert set(jobs) - set(expected) <= {*built, "software_harness_mini", "software_serve_cpu"}


def test_other_cells_plan_their_own_evaluations_only(clone: Path) -> None:
    file = clone / "config" / "tiny.yaml"
    file.write_text(file.read_text().replace("name: heldout", "name: other").replace("at: last", "at: every"))
    # `other` at 0 and 2; `command`, which stood at 2, at 0 and 1.
    expected = {"plan": 4, "rollout": 4, "score": 4, "eval": 4, "write_report": 1, "train_tiny": 1}
    assert planned(clone, "train_tiny") == expected


def test_fewer_iterations_than_there_are_plan_nothing(finished: Path) -> None:
    assert planned(finished, "train_tiny", "--config", "iterations=1") == {}


@pytest.mark.slow
def test_a_table_that_stands_decides_over_its_shards(clone: Path) -> None:
    part = "purpose=train/cell=train/iteration=0003"
    table = f"results/tiny/rollouts/{part}/rollouts.parquet"
    done = snakemake(clone, table, "--config", "iterations=3")
    assert done.returncode == 0, done.stdout + done.stderr
    # 2 shards were planned; 4 would be now. Two more rollout jobs are those of the cells.
    jobs = planned(clone, "train_tiny", "--config", "iterations=3", "rollout={shards: 4}")
    assert (jobs["plan"], jobs["rollout"]) == (2, 2 + 2)
    (clone / table).write_bytes((clone / table).read_bytes()[:-9])
    done = snakemake(clone, "-n", "train_tiny", "--config", "iterations=3")
    assert done.returncode == 1 and "cannot be read as table rollouts" in done.stdout + done.stderr


def test_a_table_that_stands_decides_over_its_policy(clone: Path) -> None:
    """As after lag 1: the rollouts of iteration 2 ran beside the training of checkpoint 1, which is newer."""
    run = clone / "results" / "tiny"
    table = run / "rollouts/purpose=train/cell=train/iteration=0002/rollouts.parquet"
    when = table.stat().st_mtime_ns
    rows = pq.ParquetFile(table).read().to_pylist()
    tables.write_table(table, tables.ROLLOUTS, [{**r, "policy": "tiny@0"} for r in rows])
    os.utime(table, ns=(when, when))
    episodes = run / "episodes/purpose=train/cell=train/iteration=0002/shard=0001/episodes.parquet"
    later = (run / "checkpoints/0002/checkpoint.json").stat().st_mtime_ns - 1
    assert later > episodes.stat().st_mtime_ns
    # Of other content: Snakemake has a checksum of what it was when iteration 2 sampled from it.
    (run / "checkpoints/0001/checkpoint.json").write_text("{}")
    os.utime(run / "checkpoints/0001/checkpoint.json", ns=(later, later))
    assert planned(clone, "train_tiny") == {}


def test_pruned_weights_replan_nothing_and_are_not_sampled_from(clone: Path) -> None:
    (clone / "results/tiny/checkpoints/0001/tombstone.json").write_text("{}")
    assert planned(clone, "train_tiny") == {}
    for words in (
        ["train_tiny", "--config", "cells=[{name: new, at: every}]"],
        ["eval_demo", "--config", "policy=tiny@1"],
    ):
        done = snakemake(clone, "-n", *words)
        out = done.stdout + done.stderr
        assert done.returncode == 1 and "weights of checkpoint 1 of run tiny were pruned" in out, out
        assert "the nearest kept one is 0" in out and "Traceback" not in out


@pytest.mark.slow
def test_from_iteration_makes_anew_what_it_names_and_keeps_what_was(clone: Path) -> None:
    run = clone / "results" / "tiny"
    before = {p.relative_to(run) for p in run.rglob("*") if p.is_file()}
    words = ("train_tiny", "--config", "from_iteration=2", "seed=5")
    dry = snakemake(clone, "-n", *words)
    assert dry.returncode == 0 and "would move" in dry.stdout + dry.stderr
    assert {p.relative_to(run) for p in run.rglob("*") if p.is_file()} == before
    first = (run / "checkpoints/0001/checkpoint.json").stat().st_mtime_ns
    done = snakemake(clone, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    # Iteration 2: a plan and an evaluation table of each of two cells, and so on.
    counts = dict(re.findall(r"^(plan|train|samples|eval|prepare|tasks) +(\d+)$", done.stdout + done.stderr, re.M))
    assert counts == {"plan": "3", "train": "1", "samples": "1", "eval": "2"}
    assert (run / "checkpoints/0001/checkpoint.json").stat().st_mtime_ns == first
    old = run / "superseded" / "0001"
    kept = {p.relative_to(old) for p in old.rglob("*") if p.is_file()}
    assert kept == {
        p for p in before if re.search(r"iteration=0002|^(checkpoints|state)/0002|-0002\b.*json", str(p))
    } | {Path(name) for name in ("report/index.html", "summary.json", "frozen.json")}
    assert Path("checkpoints/0002/checkpoint.json") in kept
    assert json.loads((run / "frozen.json").read_text())["seed"] == 5
    assert json.loads((old / "frozen.json").read_text())["seed"] == 0
    # The same command goes on.
    again = snakemake(clone, *words)
    assert again.returncode == 0 and "Nothing to be done" in again.stdout + again.stderr
    assert [p.name for p in (run / "superseded").iterdir()] == ["0001"]


def test_an_environment_of_ones_own_is_found_below_the_root(fresh: Path, tmp_path: Path) -> None:
    root = tmp_path / "clone"
    shutil.copytree(fresh, root, symlinks=True)
    text = (root / "config" / "tiny.yaml").read_text()
    (root / "config" / "mine.yaml").write_text(text + "environment: my_package.my_env\n")
    done = snakemake(root, "-n", "train_mine")
    assert done.returncode == 1 and "there is no module my_package.my_env" in done.stdout + done.stderr
    (root / "my_package").mkdir()
    (root / "my_package" / "my_env.py").write_text("def create_env(sandbox): ...\n")
    assert planned(root, "train_mine")["train"] == 2


def test_a_broken_configuration_stops_only_its_own_run(fresh: Path, tmp_path: Path) -> None:
    root = tmp_path / "clone"
    shutil.copytree(fresh, root, symlinks=True)
    (root / "config" / "mine.yaml").write_text("model: [\n")
    assert planned(root, "train_tiny")["train"] == 2
    done = snakemake(root, "-n", "train_mine")
    assert done.returncode == 1 and "config/mine.yaml" in done.stdout + done.stderr
