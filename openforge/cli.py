"""`openforge VERB`. Bad input is one sentence on stderr and exit code 2."""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import yaml

from openforge import __version__, config, config_paths, harnesses, run_lock, store, tables
from openforge.eval import EvalError, matrix, policies
from openforge.proxy import trained
from openforge.rollout import status
from openforge.verbs import VerbError, clean, doctor, export, plan, proxy, recorded, score, serve, tasks_check, watch

USAGE = 2


class CliError(ValueError):
    """A wrong argument; one sentence."""


def project_root(start: Path | None = None) -> Path:
    """The folder with the Snakefile: the working directory or above it, else the package's own project.

    Raises:
        CliError: there is none.
    """
    try:
        here = (start or Path.cwd()).absolute()
    except FileNotFoundError:
        raise CliError("the working directory has been removed") from None
    for place in (here, *here.parents, Path(__file__).resolve().parent.parent):
        if (place / "Snakefile").is_file() and (place / "config").is_dir():
            return place
    raise CliError(f"no OpenForge project (a folder with Snakefile and config/) in {here} or above it")


def rendered(root: Path) -> dict[Path, str]:
    """The documents that are rendered from declarations, by path."""
    return {
        root / "docs" / "tables.md": tables.markdown(),
        root / "docs" / "config.md": config.markdown(),
        root / "docs" / "statuses.md": status.markdown() + "\n" + trained.markdown(),
        root / "docs" / "harnesses.md": harnesses.markdown(),
        root / "config" / "schema.json": json.dumps(config.schema(), indent=1) + "\n",
    }


def run_config(args: argparse.Namespace) -> int:
    root = project_root()
    _known(args.run, config.runs(root), "config/")
    loaded = config.load(args.run, root)
    print(config.describe(loaded))
    # A user's environment is named by its import path from the project's root.
    sys.path.append(str(root))
    config_paths.check(args.run, loaded.config, root)
    if isinstance(loaded.config, config.EvalConfig):
        policies.check(loaded.config, root)
    return 0


def run_doctor(args: argparse.Namespace) -> int:
    return doctor.run(project_root(), args.json)


def run_plan(args: argparse.Namespace) -> int:
    return plan.run(args.run, *_configured(args.run), args.json)


def run_watch(args: argparse.Namespace) -> int:
    return watch.run(args.run, *_configured(args.run), args.once)


def run_clean(args: argparse.Namespace) -> int:
    asked = [name for name in clean.FLAGS if getattr(args, name)]
    return clean.run(args.run, project_root(), asked, args.everything, args.yes)


def run_matrix(args: argparse.Namespace) -> int:
    results = project_root() / "results"
    names = store.runs(results)
    for run in args.run:
        _known(run, names, "results/")
    try:
        found = matrix.read(results, args.run or names)
    except EvalError as e:
        raise CliError(str(e)) from None
    print(json.dumps(found, indent=1) if args.json else matrix.text(found), end="")
    return 0


def run_serve(args: argparse.Namespace) -> int:
    # Ended like by Ctrl-C, so that its server ends with it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return serve.run(args.policy, project_root())


def run_score(args: argparse.Namespace) -> int:
    root = project_root()
    _known(args.run, config.runs(root), "config/")
    loaded = config.load(args.run, root, _overrides(args.config)).config
    config_paths.check_variables(args.run, loaded)
    return score.run(args.run, loaded, root, args.purpose, args.cell, args.iteration)


def _overrides(given: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE as `snakemake --config` reads them: the value is YAML."""
    found: dict[str, Any] = {}
    for text in given:
        key, sign, value = text.partition("=")
        if not sign:
            raise CliError(f"--config {text!r} must be KEY=VALUE, e.g. 'judge={{url: ..., model: ...}}'")
        try:
            found[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise CliError(f"--config {key}={value!r} is not readable YAML") from None
    return found


def run_sql(args: argparse.Namespace) -> int:
    if (args.run is None) == (args.journal is None):
        raise CliError("openforge sql takes RUN and QUERY, or --journal DIR and QUERY for calls recorded without a run")
    if args.journal is not None:
        store.check_reads(args.query)
        print(_formatted(recorded.query(args.journal, args.query), args.format), end="")
        return 0
    results = project_root() / "results"
    _known(args.run, store.runs(results), "results/")
    store.check_reads(args.query)
    print(_formatted(store.query(results / args.run, args.query), args.format), end="")
    return 0


def run_export(args: argparse.Namespace) -> int:
    root = project_root()
    _known(args.run, store.runs(root / "results"), "results/")
    return export.run(args, root)


def run_docs(args: argparse.Namespace) -> int:
    root = project_root()
    stale = [p for p, text in rendered(root).items() if not p.is_file() or p.read_text() != text]
    if args.check:
        if stale:
            names = ", ".join(str(p.relative_to(root)) for p in stale)
            print(f"error: not as rendered: {names}; run: openforge docs", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        tables.write_beside(path, rendered(root)[path])
        print(path.relative_to(root))
    return 0


def run_tasks_check(args: argparse.Namespace) -> int:
    return tasks_check.run(args, project_root())


def run_episode(args: argparse.Namespace) -> int:
    # Imported here: the other verbs need neither policy nor sandboxes.
    from openforge import episode

    try:
        return episode.run(args, project_root())
    except episode.BadInput as e:
        raise CliError(str(e)) from None


def _configured(run: str) -> tuple[config.RunConfig | config.EvalConfig, Path]:
    """The configuration of a run, and the project's root."""
    root = project_root()
    _known(run, config.runs(root), "config/")
    return config.load(run, root).config, root


def _known(run: str, names: Sequence[str], where: str) -> None:
    if run not in names:
        raise CliError(f"there is no run {run!r} in {where}; runs there: {', '.join(names) or 'none'}")


def _formatted(result: pa.Table, style: str) -> str:
    if style == "json":
        return json.dumps(store.records(result), indent=1, default=_text) + "\n"
    cells = [["" if v is None and style == "csv" else _text(v) for v in row] for row in store.values(result)]
    names = result.column_names
    if style == "csv":
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows([names, *cells])
        return out.getvalue()
    widths = [max(len(c) for c in column) for column in zip(names, *cells, strict=True)]
    lines = [names, ["-" * w for w in widths], *cells]
    return "".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() + "\n" for line in lines)


def _text(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, (dict, list)):
        return json.dumps(value, default=_text)
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    # One row is one line, whatever an agent wrote.
    return str(value).replace("\r", "\\r").replace("\n", "\\n")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="openforge", description="Train agents inside the harness they ship in.")
    top.add_argument("--version", action="version", version=__version__)
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")

    verb = verbs.add_parser("doctor", help="what this machine can do; exit 1 if make demo would not run on it")
    verb.add_argument("--json", action="store_true", help="an object with every check")
    verb.set_defaults(call=run_doctor)

    verb = verbs.add_parser("config", help="print every value of a configuration with its origin")
    verb.add_argument("run", metavar="RUN", help="name of config/RUN.yaml")
    verb.set_defaults(call=run_config)

    verb = verbs.add_parser("plan", help="jobs, episodes, tokens, hours, disk and GPU-hours of a run: left and in all")
    verb.add_argument("run", metavar="RUN", help="name of config/RUN.yaml")
    verb.add_argument("--json", action="store_true", help="an object with every figure and its basis")
    verb.set_defaults(call=run_plan)

    verb = verbs.add_parser("watch", help="follow a run until it is finished or Ctrl-C; it only reads")
    verb.add_argument("run", metavar="RUN", help="name of config/RUN.yaml")
    verb.add_argument("--once", action="store_true", help="print the state of now and end")
    verb.set_defaults(call=run_watch)

    verb = verbs.add_parser("clean", help="sizes of what a run keeps by kind; remove what is asked for")
    verb.add_argument("run", metavar="RUN", help="name of results/RUN")
    for name in clean.FLAGS:
        verb.add_argument(f"--{name}", action="store_true", help=f"remove the {name} that the list shows")
    verb.add_argument("--yes", action="store_true", help="remove without a question")
    verb.add_argument(
        "--everything", nargs="?", const="", metavar="RUN", help="remove results/RUN whole; the run's name is repeated"
    )
    verb.set_defaults(call=run_clean)

    verb = verbs.add_parser("matrix", help="evaluations that stand: suite, policy, harness, pass@1, pass^3, pass@3")
    verb.add_argument("run", metavar="RUN", nargs="*", help="names of results/RUN; all of them without one")
    verb.add_argument("--json", action="store_true", help="the evaluations' eval.json as a list")
    verb.set_defaults(call=run_matrix)

    verb = verbs.add_parser("serve", help="host a run's checkpoint as an OpenAI-compatible endpoint until Ctrl-C")
    verb.add_argument("policy", metavar="RUN[@k]", help="the newest checkpoint without @k")
    verb.set_defaults(call=run_serve)

    verb = verbs.add_parser("score", help="score finished episodes once more, by the judge of now (docs/judge.md)")
    verb.add_argument("run", metavar="RUN", help="name of config/RUN.yaml")
    verb.add_argument("--purpose", choices=("train", "eval"), help="only training, or only evaluations")
    verb.add_argument("--cell", metavar="CELL", help="only this cell, as its path has it")
    verb.add_argument("--iteration", metavar="K", help="only this iteration or checkpoint; none for a foreign policy")
    verb.add_argument("--config", metavar="KEY=VALUE", nargs="+", default=[], help="values over the file's, as YAML")
    verb.set_defaults(call=run_score)

    verb = verbs.add_parser("sql", help="query the tables of a run (docs/tables.md)")
    verb.add_argument("run", metavar="RUN", nargs="?", help="name of results/RUN")
    verb.add_argument("query", metavar="QUERY", help="one SQL statement of DuckDB's")
    verb.add_argument(
        "--journal", type=Path, metavar="DIR", help="calls and blobs that `openforge proxy` recorded in DIR"
    )
    style = verb.add_mutually_exclusive_group()
    style.add_argument("--json", dest="format", action="store_const", const="json", help="a list of objects")
    style.add_argument("--csv", dest="format", action="store_const", const="csv", help="CSV with a header")
    verb.set_defaults(call=run_sql, format="table")

    verb = verbs.add_parser("export", help="write a run's episodes in another project's format")
    formats = verb.add_subparsers(dest="format", required=True, metavar="FORMAT")
    action = formats.add_parser("claweval", help="ClawEval's traces, which `claw-eval grade` reads, and batch results")
    action.add_argument("run", metavar="RUN", help="name of results/RUN")
    action.add_argument("folder", metavar="DIR", help="where a folder for each policy and harness is made")
    action.add_argument("--cell", metavar="CELL", help="of this evaluation cell alone")
    action.set_defaults(call=run_export)

    verb = verbs.add_parser("tasks", help="work with task folders")
    actions = verb.add_subparsers(dest="action", required=True, metavar="ACTION")
    action = actions.add_parser(
        "check", help="read task folders, a checkout or a table of tasks; exit 1 if one is wrong"
    )
    action.add_argument(
        "folder",
        metavar="FOLDER",
        help="a task's folder, a folder of them, a checkout of ClawEval or QwenClawBench, or parquet files",
    )
    action.add_argument("--run", metavar="RUN", help="read a table with the columns and verifier of config/RUN.yaml")
    action.add_argument("--no-agents", action="store_true", help="read only; do not run the agents that tasks bring")
    action.set_defaults(call=run_tasks_check)

    verb = verbs.add_parser("episode", help="run one episode by hand, or replay a recorded one (docs/one-episode.md)")
    verb.add_argument("--task", metavar="DIR", help="a task folder in ClawEval's format; with --run a task's id")
    verb.add_argument("--run", metavar="RUN", help="run whose task or episode it is")
    verb.add_argument("--harness", metavar="H", help="name of a harness (docs/harnesses.md)")
    verb.add_argument("--harness-config", metavar="FILE", help="mini_swe_agent's YAML")
    verb.add_argument("--model", metavar="M", help="model folder, bundled name, hub id@revision, RUN@k, or a URL")
    verb.add_argument("--config", metavar="RUN", help="take what is not given here from config/RUN.yaml")
    verb.add_argument("--cell", metavar="CELL", help="... and from this evaluation cell of it")
    verb.add_argument(
        "--limits", metavar="KEY=VALUE", nargs="+", help="turns, tokens, seconds; the task's own hold too"
    )
    verb.add_argument("--keep", action="store_true", help="keep the sandbox's work folder and print where")
    verb.add_argument("--json", metavar="FILE", help="write the episode with its calls and messages")
    verb.add_argument("--replay", metavar="EPISODE", help="drive an episode of --run again from its record; no model")
    verb.set_defaults(call=run_episode)

    verb = verbs.add_parser("proxy", help="record the calls of any agent, without a run (docs/record-any-agent.md)")
    proxy.add_arguments(verb)
    verb.set_defaults(call=proxy.run)

    verb = verbs.add_parser(
        "docs", help="render docs/tables.md, config.md, statuses.md and harnesses.md, and config/schema.json"
    )
    verb.add_argument("--check", action="store_true", help="write nothing; exit 1 if one is stale")
    verb.set_defaults(call=run_docs)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = parser().parse_args(argv)
    try:
        code: int = args.call(args)
        sys.stdout.flush()
        return code
    except (CliError, VerbError, run_lock.RunBusy, config.ConfigError, store.StoreError, tables.TableError) as e:
        print(f"error: {e}", file=sys.stderr)
        return USAGE
    except BrokenPipeError:
        # The reader (head, less) has seen enough.
        _drop_output()
        return 0
    except OSError as e:
        if e.filename is None:
            # No file of ours: the output's disk is full.
            _drop_output()
        print(f"error: {_os_sentence(e)}", file=sys.stderr)
        return USAGE


def _drop_output() -> None:
    """Python would try to write what is left once more at exit, and complain."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _os_sentence(e: OSError) -> str:
    if e.filename is None:
        return f"the output cannot be written: {e.strerror or e}"
    # Of a rename, the second name is the one that was asked for.
    return f"{os.fsdecode(e.filename2 or e.filename)}: {e.strerror}"
