"""The jobs of a run by what they write, as the rules plan them: a job is left while its file does not stand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pyarrow.parquet as pq

from openforge import harnesses, tasks
from openforge import plan as planning
from openforge.config import Cell, EvalConfig, RunConfig
from openforge.config_paths import last_finished
from openforge.environments.claw_eval.folder import FolderError
from openforge.eval import policies
from openforge.tables import ROLLOUTS, TASKS, check_file, partition_path
from openforge.verbs import VerbError

GENERATED = ("demo", "tiny")


@dataclass(frozen=True)
class Job:
    """One job.

    Attributes:
        rule: its rule's name.
        output: the file that says it is finished.
        purpose, cell, iteration, shard: where it has them; `cell` as it stands in paths.
    """

    rule: str
    output: Path
    purpose: str = ""
    cell: str = ""
    iteration: int | None = None
    shard: int = 0

    @property
    def done(self) -> bool:
        return self.output.exists()


class Jobs:
    """The jobs of a run.

    Attributes:
        all: every one, finished or not, without those that build software environments.
    """

    def __init__(self, run: str, config: RunConfig | EvalConfig, root: Path) -> None:
        self.run, self.config, self.root = run, config, root
        self.run_dir = root / "results" / run
        self.all = self._list()

    def left(self) -> list[Job]:
        """Those whose file does not stand; the report is made anew with any other."""
        left = [j for j in self.all if not j.done]
        return [j for j in self.all if not j.done or (left and j.rule == "write_report")]

    def software(self, left: Sequence[Job]) -> list[str]:
        """Software environments that these jobs need and that are not built."""
        names = set()
        for job in left:
            if job.rule in ("prepare", "prepare_policy"):
                names.add("serve-cpu")
            elif job.rule == "rollout":
                cell = self.cell(job)
                server = policies.server(self.config, cell)
                names |= set() if server.url else {f"serve-{server.device}"}
                names |= set(harnesses.software_of((cell or self.config).harness.name))
            elif job.rule == "train" and isinstance(self.config, RunConfig):
                names.add(f"train-{self.config.trainer.device}")
        return sorted(n for n in names if not (self.root / ".software" / n / "ready.json").exists())

    def cell(self, job: Job) -> Cell | None:
        """The configured cell of an evaluation's job, None in training."""
        return next((c for c in self.config.cells if c.name == job.cell.split(".")[0]), None)

    def episodes(self, job: Job) -> int:
        """Rollouts that a rollout job runs: those of its table, or of the one that will be planned.

        Raises:
            VerbError: the tasks cannot be counted; one sentence.
            TableError: a table that stands cannot be read.
        """
        table = self.run_dir / partition_path("rollouts", job.purpose, job.cell, job.iteration)
        if table.exists():
            check_file(table, ROLLOUTS)
            rows = pq.read_table(table, columns=["shard", "reserve"], partitioning=None).to_pylist()
            # Of the reserve nobody knows how much will run.
            return sum(r["shard"] == job.shard and not r["reserve"] for r in rows)
        cell = self.cell(job)
        if cell is not None:
            return cell.n * (self.splits[cell.split] if cell.tasks is None else cell.tasks)
        assert isinstance(self.config, RunConfig)
        batch, shards_ = self.config.data.train_batch_size, planning.shards(self.config, None)
        return self.config.rollout.n * sum(g * shards_ // batch + 1 == job.shard for g in range(batch))

    @cached_property
    def splits(self) -> Counter[str]:
        """Tasks by split: of the table that stands, or as they will be made."""
        table, source = self.run_dir / "tasks.parquet", self.config.tasks
        if table.exists():
            check_file(table, TASKS)
            return Counter(pq.read_table(table, columns=["split"])["split"].to_pylist())
        if source.source in GENERATED:
            return Counter({"train": source.train, "heldout": source.heldout, "unseen": source.unseen})
        try:
            # A source that is not generated is read where it is; the folder is for those that are.
            has = tasks.configured(self.config)
            rows = tasks.raw_tasks(source, self.config.environment, self.run_dir / "tasks", self.root, has)
        except (tasks.TasksError, FolderError) as e:
            raise VerbError(str(e)) from None
        return Counter(r["split"] for r in rows)

    def _list(self) -> list[Job]:
        tasks_ = Job("tasks", self.run_dir / "tasks.parquet")
        report = Job("write_report", self.run_dir / "report" / "index.html")
        middle = self._training() if isinstance(self.config, RunConfig) else self._policy(self.config)
        return [tasks_, *middle, *self._evaluations(), report]

    def _training(self) -> list[Job]:
        assert isinstance(self.config, RunConfig)
        checkpoints = self.run_dir / "checkpoints"
        # Checkpoint 0 is evaluated or trained from.
        wanted = self.config.iterations or self.config.cells
        found = [Job("prepare", checkpoints / "0000" / "checkpoint.json")] if wanted else []
        shards = planning.shards(self.config, None)
        for k in range(1, self.config.iterations + 1):
            found += self._rollouts("train", "train", k, shards)
            path = self.run_dir / partition_path("samples", "train", "train", k)
            found.append(Job("samples", path, "train", "train", k))
            found.append(Job("train", checkpoints / f"{k:04d}" / "checkpoint.json", "train", "train", k))
        return found

    def _policy(self, config: EvalConfig) -> list[Job]:
        ref = policies.reference(config)
        if ref.kind != "model" or not config.cells:
            return []
        return [Job("prepare_policy", self.run_dir / "policies" / ref.slug / "checkpoint.json")]

    def _evaluations(self) -> list[Job]:
        found = []
        for cell, k in self._points():
            found += self._rollouts("eval", cell, k, 1)
            part = Path(f"cell={cell}", f"iteration={'none' if k is None else f'{k:04d}'}")
            found.append(Job("eval", self.run_dir / "eval" / part / "eval.json", "eval", cell, k))
        return found

    def _points(self) -> list[tuple[str, int | None]]:
        """(cell as in paths, checkpoint) of every evaluation."""
        if isinstance(self.config, RunConfig):
            last = max(self.config.iterations, last_finished(self.run_dir))
            return [(c.name, k) for c in self.config.cells for k in policies.evaluated(c, last)]
        ref = policies.reference(self.config)
        k = None if ref.k == "none" else int(ref.k)
        return [(c.name if ref.slug == "base" else f"{c.name}.{ref.slug}", k) for c in self.config.cells]

    def _rollouts(self, purpose: str, cell: str, k: int | None, shards: int) -> list[Job]:
        def path(table: str, shard: int | None = None) -> Path:
            return self.run_dir / partition_path(table, purpose, cell, k, shard)

        return [
            Job("plan", path("rollouts"), purpose, cell, k),
            *(Job("rollout", path("episodes", s), purpose, cell, k, s) for s in range(1, shards + 1)),
            Job("score", path("scores"), purpose, cell, k),
        ]
