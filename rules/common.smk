# Configurations by run, and what each job reads. Parsing needs neither GPU, model, network nor keys.
import os
import re
import shlex
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError
from snakemake_interface_executor_plugins.settings import ExecMode

from openforge import config as typed
from openforge import config_paths, harnesses, interrupts, job, manifest, redo
from openforge import run_lock, run_start
from openforge import plan as planning
from openforge.eval import policies
from openforge.plan.standing import standing
from openforge.policy import process
from openforge.tables import TableError, partition_path

os.environ.setdefault("OPENFORGE_ROOT", str(Path(workflow.basedir).resolve()))
if workflow.exec_mode != ExecMode.SUBPROCESS:
    # Jobs and warm policy servers end when this process does (docs/design.md, sections 3 and 4). They inherit the
    # name; a job on another node is owned by the Snakemake there.
    os.environ["OPENFORGE_OWNER"] = str(process.this())
    # Where its jobs leave why they failed; on a shared file system also those of other nodes.
    SAID = Path(workflow.basedir, ".snakemake", f"openforge-said-{os.getpid()}")
    os.environ["OPENFORGE_SAID"] = str(SAID)
    # A dead command's with the same pid.
    SAID.unlink(missing_ok=True)

    onsuccess:
        # Of jobs that went well when they were tried again.
        SAID.unlink(missing_ok=True)

    onerror:
        for sentence in job.said(SAID):
            print(f"error: {sentence}", file=sys.stderr)


# A user's environment is named by its import path from the project's root.
sys.path.append(os.environ["OPENFORGE_ROOT"])


def refuse(sentence):
    """End parsing with one sentence: a WorkflowError is shown with the lines of the workflow that raised it."""
    sys.exit(f"error: {sentence}")


def target_of(name):
    return name if name.startswith("eval_") else f"train_{name}"


def targeted(name):
    """Whether the command line names this run, as a target or as a path of its results."""
    words = sys.argv[1:]
    target = target_of(name)
    return any(
        w in (target, name if name == "demo" else target) or f"results/{name}/" in w
        # A job that an executor starts on its own: --target-jobs RULE:run=NAME,...
        or f"run={name}" in re.split("[:,]", w)
        for w in words
    )


def run_dir(name):
    return Path(workflow.basedir) / "results" / name


def named_runs():
    """The runs that the command line names, and the further suites of these; without any, --config is demo's."""
    root = Path(workflow.basedir)
    names = typed.runs(root)
    named = [n for n in names if targeted(n)]
    named += [s for n in named for s in typed.suites(n, root) if s in names]
    return list(dict.fromkeys(named)) or [n for n in names if config and n == "demo"]


def check_variables(name, c):
    """A missing secret stops a run; a dry run, which needs none, only says so."""
    try:
        config_paths.check_variables(name, c)
    except typed.ConfigError as e:
        if not any(
            re.fullmatch("--dry-?run|-[A-Za-z]*n[A-Za-z]*", w) for w in sys.argv
        ):
            raise
        print(f"warning: {e}", file=sys.stderr)


def check_targets(names):
    """Refuse a run's target where there is no such run, and a run's name where its target is meant."""
    there = ", ".join(target_of(n) for n in names) or "none"
    for before, word in zip(sys.argv, sys.argv[1:]):
        kind, _, name = word.partition("_")
        if kind in ("train", "eval") and word.isidentifier():
            # An evaluation's run has the prefix in its name: config/eval_SUITE.yaml.
            run = name if kind == "train" else word
            if name and target_of(run) == word and run not in names:
                refuse(
                    f"there is no run for the target {word}: config/{run}.yaml does not exist; targets there are: {there}"
                )
        elif word in names and word != "demo" and not before.startswith("--"):
            # Behind -- it may be that option's value.
            refuse(f"{word!r} is a run; its target is: snakemake {target_of(word)}")


def load_runs():
    """Every valid configuration; --config is laid over the runs that the command line names.

    An invalid one stops only the commands that name it: a broken mine.yaml is no reason to refuse `snakemake demo`.
    """
    root = Path(workflow.basedir)
    names = typed.runs(root)
    check_targets(names)
    named = named_runs()
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
                check_variables(name, runs[name])
                if isinstance(runs[name], typed.EvalConfig):
                    policies.check(runs[name], root)
                # Here, because Snakemake shows an input function's error with its own lines around it.
                for table in sorted(run_dir(name).glob("rollouts/**/rollouts.parquet")):
                    standing(table)
        except typed.NoSource as e:
            if targeted(name):
                refuse(e)
            if name in named:
                print(f"{name} is left out: {e}", file=sys.stderr)
            runs.pop(name, None)
        except (typed.ConfigError, TableError) as e:
            if name in named:
                refuse(e)
            print(f"warning: {e}; its targets are left out", file=sys.stderr)
    return runs


def start(works):
    """Lock the runs of a command that runs jobs, and put away what a killed one left of them."""
    runs = working_on(works)
    # Jobs inherit it: a process whose run and owner are known can be ended by the next command.
    os.environ["OPENFORGE_RUNS"] = " ".join(runs)
    hidden = [s for n in runs for s in manifest.secrets(RUNS[n].model_dump())]
    command = manifest.redact(shlex.join(sys.argv), hidden)
    os.environ["OPENFORGE_COMMAND"] = command
    try:
        run_start.begin(Path(os.environ["OPENFORGE_ROOT"]), runs, command)
    except run_lock.RunBusy as e:
        refuse(e)
    except OSError as e:
        refuse(f"results cannot be written: {e}")
    interrupts.hand_on(runs)


def working_on(targets):
    """The runs of a command: those that it names, or the default one."""
    return [n for n in (named_runs() if targets else ["demo"]) if n in RUNS]


def make_anew(works):
    """Move away what from_iteration makes anew, or what a killed command has begun to."""
    k = typed.from_iteration(config)
    for name in working_on(works) if works is not None else working_on(True):
        c, folder = RUNS[name], run_dir(name)
        try:
            if works is not None:
                redo.finish(folder)
                if k is not None:
                    redo.check(name, c, folder, k)
                    print(redo.redo(folder, c, k), file=sys.stderr)
                config_paths.check_frozen(name, c, folder)
            elif k is not None:
                print(redo.outlook(folder, c, k), file=sys.stderr)
        except typed.ConfigError as e:
            refuse(e)


RUNS = load_runs()
if workflow.exec_mode == ExecMode.DEFAULT:
    # The targets of a command that runs jobs; None for one that only looks or repairs.
    WORKS = run_start.targets(sys.argv)
    if WORKS is not None:
        start(WORKS)
    # It moves results: the run's lock is taken before.
    make_anew(WORKS)


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


def attempt_of(wildcards, attempt):
    """The executor's count of a job's attempts, for its script, beside how many more there may be.

    Only the command that a person types knows the `retries` of its profile: it starts its jobs with none of their own.
    """
    # Commands that run nothing (--dag, --summary) have no such settings.
    retries = getattr(workflow.execution_settings, "retries", 0)
    os.environ.setdefault("OPENFORGE_RETRIES", str(retries))
    return attempt


def marker(run, k):
    return f"results/{run}/checkpoints/{k:04d}/checkpoint.json"


def settled(file):
    """A file that stands, under its absolute name, which no rule makes; else as it is.

    So a finished iteration is cut off from what it was made of: whatever of that is lost, damaged or dated anew, and
    whatever Snakemake would conclude from it, what stands is not made again.
    """
    full = Path(workflow.basedir, file).resolve()
    return str(full) if full.exists() else file


def finished(run, k):
    return Path(workflow.basedir, marker(run, k)).exists()


def episodes_file(w):
    part = f"purpose={w.purpose}/cell={w.cell}/iteration={w.k}/shard={w.shard}"
    return f"results/{w.run}/episodes/{part}/episodes.parquet"


def sampled_checkpoint(wildcards):
    """The checkpoint that a rollout samples from: b(k) = max(0, k-1-lag) in training, k in evaluation."""
    if wildcards.purpose == "train":
        table = planned(wildcards)
        if table is None:
            k = RUNS[wildcards.run].sampled(int(wildcards.k))
        else:
            k = int(table.policy.rpartition("@")[2])
        return settled(marker(wildcards.run, k))
    return policy_input(wildcards)


def training_cores(wildcards):
    """Cores that training claims: all of them, so that nothing heavy runs beside it; with lag one is left at least."""
    cores, c = workflow.cores or 1, RUNS[wildcards.run]
    if not getattr(c, "lag", 0):
        return cores
    return min(c.trainer.threads * c.trainer.nproc_per_node, max(1, cores - 1))


def rollout_cores(wildcards):
    """Cores that sampling claims: all of them, or those that training leaves where it may run beside it."""
    cores = workflow.cores or 1
    if not getattr(RUNS[wildcards.run], "lag", 0):
        return cores
    return max(1, cores - training_cores(wildcards))


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


def rollout_software(wildcards):
    c = RUNS[wildcards.run]
    cell = None if wildcards.purpose == "train" else cell_of(wildcards)
    server = policies.server(c, cell)
    serve = [] if server.url else [f"serve-{server.device}"]
    table = planned(wildcards)
    shard = int(wildcards.shard)
    if table:
        harness = table.harnesses[shard - 1]
    elif cell is not None:
        harness = cell.harness.name
    else:
        harness = planning.harness_of(c, int(wildcards.k), shard).name
    return software(episodes_file(wildcards), *serve, *harnesses.software_of(harness))
