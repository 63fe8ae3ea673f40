# Configurations by run, and what each job reads. Parsing needs neither GPU, model, network nor keys.
import os
import sys
from pathlib import Path

from snakemake.cli import get_argument_parser
from snakemake.exceptions import WorkflowError
from snakemake_interface_executor_plugins.settings import ExecMode

from openforge import config as typed
from openforge import config_paths, redo
from openforge import plan as planning
from openforge.eval import policies
from openforge.plan.standing import standing
from openforge.policy import process
from openforge.tables import TableError, partition_path

# A warm policy server ends when this process does (docs/design.md, section 4). Jobs inherit the name.
os.environ.setdefault("OPENFORGE_OWNER", str(process.this()))
os.environ.setdefault("OPENFORGE_ROOT", str(Path(workflow.basedir).resolve()))

# A user's environment is named by its import path from the project's root.
sys.path.append(os.environ["OPENFORGE_ROOT"])


def targeted(name):
    """Whether the command line names this run, as a target or as a path of its results."""
    words = sys.argv[1:]
    target = name if name.startswith("eval_") else f"train_{name}"
    return any(
        w in (target, name if name == "demo" else target) or f"results/{name}/" in w
        for w in words
    )


def run_dir(name):
    return Path(workflow.basedir) / "results" / name


def named_runs():
    """The runs that the command line names; without any, --config is the default target's, demo."""
    names = typed.runs(Path(workflow.basedir))
    named = [n for n in names if targeted(n)]
    return named or [n for n in names if config and n == "demo"]


def load_runs():
    """Every valid configuration; --config is laid over the runs that the command line names.

    An invalid one stops only the commands that name it: a broken mine.yaml is no reason to refuse `snakemake demo`.
    """
    root = Path(workflow.basedir)
    names, named = typed.runs(root), named_runs()
    runs = {}
    for name in names:
        try:
            runs[name] = typed.load(
                name, root, config if name in named else None
            ).config
            if name in named:
                config_paths.check(name, runs[name], root)
                k = typed.from_iteration(config)
                if k is not None:
                    redo.check(name, runs[name], run_dir(name), k)
                config_paths.check_frozen(
                    name, runs[name], run_dir(name), anew=k is not None
                )
                if isinstance(runs[name], typed.EvalConfig):
                    policies.check(runs[name], root)
        except typed.ConfigError as e:
            if name in named:
                raise WorkflowError(str(e)) from None
            print(f"warning: {e}; its targets are left out", file=sys.stderr)
    return runs


def runs_jobs():
    """Whether this is a command that runs jobs: no job's own process, no dry run, none that only looks or repairs."""
    if workflow.exec_mode != ExecMode.DEFAULT:
        return False
    try:
        args = get_argument_parser().parse_args(sys.argv[1:])
    except (SystemExit, Exception):
        return False
    looks = ("dryrun", "touch", "unlock", "lint", "list_rules", "list_target_rules")
    looks += ("dag", "rulegraph", "filegraph", "d3dag", "summary", "detailed_summary")
    looks += ("report", "archive", "cleanup_metadata", "delete_all_output")
    return not any(getattr(args, name) for name in looks)


def make_anew():
    """Move away what from_iteration makes anew, or what a killed command has begun to."""
    k, works = typed.from_iteration(config), runs_jobs()
    for name in named_runs() or [n for n in RUNS if works and n == "demo"]:
        c, folder = RUNS[name], run_dir(name)
        try:
            if works:
                redo.finish(folder)
                if k is not None:
                    redo.check(name, c, folder, k)
                    print(redo.redo(folder, c, k), file=sys.stderr)
                config_paths.check_frozen(name, c, folder)
            elif k is not None and workflow.exec_mode == ExecMode.DEFAULT:
                print(redo.outlook(folder, c, k), file=sys.stderr)
        except typed.ConfigError as e:
            raise WorkflowError(str(e)) from None


RUNS = load_runs()
# It moves results: the run's lock is taken before.
make_anew()


def number(k):
    return None if k == "none" else int(k)


def cell_of(wildcards):
    """The configured cell of an evaluation's path; a foreign policy's cell is called <cell>.<policy>."""
    name = wildcards.cell.split(".")[0]
    for cell in RUNS[wildcards.run].cells:
        if cell.name == name:
            return cell
    raise WorkflowError(
        f"config/{wildcards.run}.yaml has no cell {name!r}; its cells: "
        + (", ".join(c.name for c in RUNS[wildcards.run].cells) or "none")
    )


def planned(wildcards):
    """What the rollout table was planned with, if it stands: then the configuration of today has no say in it."""
    w = wildcards
    part = f"purpose={w.purpose}/cell={w.cell}/iteration={w.k}"
    try:
        return standing(run_dir(w.run) / f"rollouts/{part}/rollouts.parquet")
    except TableError as e:
        raise WorkflowError(str(e)) from None


def shard_names(wildcards):
    table = planned(wildcards)
    if table is not None:
        return [f"{i + 1:04d}" for i in range(table.shards)]
    cell = None if wildcards.purpose == "train" else cell_of(wildcards)
    return [f"{i + 1:04d}" for i in range(planning.shards(RUNS[wildcards.run], cell))]


def shard_files(table):
    """The files of all shards of an iteration or evaluation."""

    def files(wildcards):
        part = (
            f"purpose={wildcards.purpose}/cell={wildcards.cell}/iteration={wildcards.k}"
        )
        return [
            f"results/{wildcards.run}/{table}/{part}/shard={s}/{table}.parquet"
            for s in shard_names(wildcards)
        ]

    return files


def marker(run, k):
    return f"results/{run}/checkpoints/{k:04d}/checkpoint.json"


def episodes_file(w):
    part = f"purpose={w.purpose}/cell={w.cell}/iteration={w.k}/shard={w.shard}"
    return f"results/{w.run}/episodes/{part}/episodes.parquet"


def sampled_checkpoint(wildcards):
    """The checkpoint that a rollout samples from: b(k) = max(0, k-1-lag) in training, k in evaluation."""
    if wildcards.purpose == "train":
        table = planned(wildcards)
        if table is None:
            k = max(0, int(wildcards.k) - 1 - RUNS[wildcards.run].lag)
        else:
            k = int(table.policy.rpartition("@")[2])
        return marker(wildcards.run, k)
    return policy_input(wildcards)


def software(output, *names):
    """Environments that are not built yet, as inputs of a job whose output does not stand yet.

    Only so do they never re-plan what stands: a missing or outdated input that a rule can make runs every job behind
    it, or (outdated and ancient) skips every one, unfinished ones included. A built environment is no input; whether
    it was built from the pins of today is checked by the job that uses it (openforge/software.py).
    """
    if Path(output).exists():
        return []
    ready = [f".software/{n}/ready.json" for n in names]
    return [ancient(f) for f in ready if not Path(f).exists()]


HARNESS_SOFTWARE = {"mini_swe_agent": "harness-mini", "pi": "harness-pi"}


def rollout_software(wildcards):
    c = RUNS[wildcards.run]
    cell = None if wildcards.purpose == "train" else cell_of(wildcards)
    server = policies.server(c, cell)
    serve = [] if server.url else [f"serve-{server.device}"]
    table = planned(wildcards)
    harness = table.harness if table else (cell or c).harness.name
    return software(episodes_file(wildcards), *serve, HARNESS_SOFTWARE[harness])
