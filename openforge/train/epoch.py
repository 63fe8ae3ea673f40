"""The training job: one iteration through unpatched veRL, from samples and checkpoint k-1 to checkpoint k.

Runs in the train environment as `python -m openforge.train.epoch JOB.json`, or under torchrun. Old log-probs
are the recorded ones (bypass mode) or those of checkpoint k-1, then corrected by veRL's token-level truncated
importance weights. Mini-batches are cut from one seeded permutation of all rows and dealt over the processes,
so their number does not change the result.
"""

from __future__ import annotations

import gc
import math
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

_STARTED = time.time()
# Half a million objects come with the imports; veRL collects garbage at every turn. See main.
gc.disable()
# veRL reads these even where one process is all there is.
for _name, _value in {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}.items():
    os.environ.setdefault(_name, _value)
# veRL warns of every engine that is not installed.
warnings.filterwarnings("ignore")

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from openforge import tables  # noqa: E402
from openforge.config_training import Trainer  # noqa: E402
from openforge.policy.probe import keep_probe, probe_ids, vision_ids  # noqa: E402
from openforge.samples.credit import ESTIMATORS  # noqa: E402
from openforge.samples.images import VisionError  # noqa: E402
from openforge.train import checkpoint, lora, verl_cpu  # noqa: E402
from openforge.train.checks import check_device, check_samples, vocabulary  # noqa: E402
from openforge.train.job import PROGRESS, REFUSED, Job, TrainError, layout_of, lora_of  # noqa: E402
from openforge.train.rows import Row, deal, permutations, row_of  # noqa: E402


def say(line: str) -> None:
    """A progress line of the first process; openforge/train/launch.py hands on what starts so."""
    if int(os.environ["RANK"]) == 0:
        print(f"{PROGRESS}{line}", flush=True)


def start_processes(trainer: Trainer) -> None:
    """The process group and veRL's registries. One process needs no port: its store is in memory.

    Raises:
        TrainError: this process needs a GPU of its own and has none.
    """
    # Before veRL looks: where there is no GPU it would go on with the CPU platform.
    check_device(trainer, os.environ, torch.cuda.device_count())
    from verl.plugin.platform import get_platform

    device = get_platform().device_name
    # veRL's own call would name the CPU twice ("cpu:gloo,cpu:gloo"), which torch refuses.
    backend = "gloo" if device == "cpu" else f"cpu:gloo,{device}:{get_platform().communication_backend_name()}"
    if os.environ["WORLD_SIZE"] == "1":
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group(backend)
    if device != "cpu":
        get_platform().set_device(int(os.environ["LOCAL_RANK"]))
    verl_cpu.register_engines()


# Of veRL's figures on the correction: KL(sampler || trainer) by two estimators, the weights, and the share of them that
# the bound cut.
_CORRECTION = (
    "rollout_corr/kl",
    "rollout_corr/k3_kl",
    "rollout_corr/rollout_is_mean",
    "rollout_corr/rollout_is_max",
    "rollout_corr/rollout_is_ratio_fraction_high",
)


def _spread(value: float, row: Row) -> Any:
    """A value on the trained tokens of a row, float32 (R)."""
    return torch.from_numpy((value * row.mask).astype(np.float32))


def gathered(value: Any) -> list[Any]:
    """What the processes that hold outputs of their replica have (the others: None), on every process."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, value)
    return [p for p in parts if p is not None]


class Epoch:
    """One process's view of the job: rows, worker, and the columns that go with each row."""

    def __init__(self, job: Job) -> None:
        self.job, self.config = job, job.typed
        self.world = dist.get_world_size()
        samples = tables.read_rows(job.samples, tables.SAMPLES)
        check_samples(job, samples)
        self.rows = [row_of(s) for s in samples]
        self.lengths = [len(r.token_ids) for r in self.rows]
        from openforge.train.images import load

        self.images = load(Path(job.checkpoint_in), self.rows, job.blobs, job.samples)
        # The engine that shares prefixes is registered for the CPU only, and is for language models.
        on_cpu = self.config.trainer.device == "cpu"
        self.shared = self.config.actor.use_shared_prefix and on_cpu and self.images is None
        self.size = self.config.actor.ppo_micro_batch_size_per_gpu or 1
        self.metrics: list[dict[str, Any]] = []
        self.critic: Any = None
        self.returns: dict[str, list[Any]] = {}
        estimator = ESTIMATORS[self.config.algorithm.adv_estimator]
        if not estimator.critic and estimator.within != "episode":
            from openforge.train.advantages import credited

            self.rows = credited(self.rows, self.config.algorithm)

    def note(self, step: int, values: dict[str, float]) -> None:
        self.metrics += [
            {"iteration": self.job.iteration, "step": step, "name": k, "value": float(v)} for k, v in values.items()
        ]

    def share(self, worker: Any, indices: list[int]) -> tuple[list[int], int]:
        """The rows of a global batch that are this replica's, and how many of them (the last ones) only even out the
        replicas."""
        from openforge.train.worker import replica

        mine_is, replicas = replica(worker)
        hands = deal(indices, self.lengths, replicas)
        mine, most = hands[mine_is], max(map(len, hands))
        if not self.config.actor.use_dynamic_bsz:
            # veRL cuts equal micro-batches only.
            most = -(-most // self.size) * self.size
        filler = min(indices, key=lambda i: self.lengths[i])
        return mine + [filler] * (most - len(mine)), most - len(mine)

    def data(self, indices: list[int], pad: int, columns: dict[str, list[Any]], **settings: Any) -> Any:
        from openforge.train.worker import batch

        actor = self.config.actor
        return batch(
            [self.rows[i] for i in indices],
            {name: [values[i] for i in indices] for name, values in columns.items()},
            pad,
            self.images,
            temperature=self.config.sampling.temperature,
            shared_prefix=self.shared,
            entropy_grad=actor.entropy_coeff != 0.0,
            **settings,
        )

    def columns(self, worker: Any, reference: list[Any] | None) -> dict[str, list[Any]]:
        """What a row's loss needs beside its tokens, a tensor over the response a row; `reference` are the log-probs
        of checkpoint 0 where there is a KL term."""
        columns: dict[str, list[Any]] = {"advantages": self._advantages()}
        if self.config.algorithm.rollout_correction.bypass_mode:
            columns["old_log_probs"] = [torch.from_numpy(r.recorded) for r in self.rows]
        else:
            columns["old_log_probs"] = self.infer(worker, "log_probs")
            columns["rollout_is_weights"] = self._importance(columns["old_log_probs"])
        if self.config.actor.loss_agg_mode == "seq-mean-token-mean":
            # A mean over a sequence's tokens would weigh an episode by its rows: rows count by their share of its
            # tokens. The other modes add tokens up, where every token counts once already.
            columns["row_weights"] = [_spread(r.weight, r) for r in self.rows]
        if reference is not None:
            columns["ref_log_prob"] = reference
        return columns

    def _advantages(self) -> list[Any]:
        """Advantages over the responses; with a critic they are estimated here, and its own targets with them."""
        if self.critic is None:
            return [torch.from_numpy(r.advantages) for r in self.rows]
        from openforge.train.critic import estimate

        values = self.infer(self.critic, "values")
        advantages, returns = estimate(self.rows, values, self.config.algorithm)
        self.returns = {"values": values, "returns": returns}
        return advantages

    def infer(self, worker: Any, output: str) -> list[Any]:
        """What the worker's weights give for all rows (`log_probs`, `values`), a tensor (R) a row, on every process."""
        from openforge.train.worker import infer

        mine, _ = self.share(worker, list(range(len(self.rows))))
        found = infer(worker, self.data(mine, 0, {}), output)
        parts = gathered(None if found is None else dict(zip(mine, found, strict=True)))
        merged = {i: t for part in parts for i, t in part.items()}
        # Values between trained tokens are context: 0, as in the table.
        return [merged[i] * torch.from_numpy(self.rows[i].mask) for i in range(len(self.rows))]

    def _step(self, worker: Any, data: Any, lengths: list[int], indices: list[int]) -> dict[str, float]:
        """An optimizer step; its metrics, on every process."""
        from openforge.train.worker import replica, step

        values = step(worker, data, lengths, sum(self.rows[i].weight for i in indices))
        if replica(worker)[1] < self.world:
            values = gathered(values)[0]
        assert values is not None
        return values

    def _importance(self, old: list[Any]) -> list[Any]:
        from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

        def padded(values: list[Any]) -> Any:
            return torch.nn.utils.rnn.pad_sequence(values, batch_first=True)

        threshold = self.config.algorithm.rollout_correction.rollout_is_threshold
        weights, _, metrics = compute_rollout_correction_and_rejection_mask(
            old_log_prob=padded(old),
            rollout_log_prob=padded([torch.from_numpy(r.recorded) for r in self.rows]),
            response_mask=padded([torch.from_numpy(r.mask).float() for r in self.rows]),
            rollout_is="token",
            rollout_is_threshold=threshold,
        )
        self.note(-1, {k: v for k, v in metrics.items() if k in _CORRECTION})
        whole = weights.batch["rollout_is_weights"]
        return [whole[i, : len(r.mask)].clone() for i, r in enumerate(self.rows)]

    def steps(self, worker: Any, columns: dict[str, list[Any]]) -> None:
        """All optimizer steps of the iteration."""
        from openforge.train.worker import replica

        actor = self.config.actor
        seed = (actor.data_loader_seed, self.job.iteration)
        plan = permutations(len(self.rows), actor.ppo_mini_batch_size, actor.ppo_epochs, seed)
        # A figure to watch where it has no weight; on a GPU, its graph through the vocabulary would cost memory.
        entropy = actor.entropy_coeff != 0.0 or self.config.trainer.device == "cpu"
        for n, indices in enumerate(plan):
            started, before = time.time(), _computed(worker)
            mine, pad = self.share(worker, indices)
            data = self.data(mine, pad, columns, calculate_entropy=entropy)
            hands = deal(indices, self.lengths, replica(worker)[1])
            lengths = [self.lengths[i] for hand in hands for i in hand]
            values = self._step(worker, data, lengths, indices)
            trained = sum(int(self.rows[i].mask.sum()) for i in indices)
            self._finite(values, n, len(plan), indices)
            if self.critic is not None:
                data = self.data(mine, pad, self.returns)
                theirs = self._step(self.critic, data, lengths, indices)
                self._finite(theirs, n, len(plan), indices)
                values |= {k if k[:7] == "critic/" else f"critic/{k}": v for k, v in theirs.items() if k != "loss"}
            seconds = time.time() - started
            values |= {
                "training/rows": len(indices),
                "training/trained_tokens": trained,
                "perf/tokens": sum(lengths),
                "perf/computed_tokens": _computed(worker) - before,
                "perf/seconds": seconds,
                "perf/throughput": sum(lengths) / seconds,
            }
            self.note(n, values)
            say(
                f"step {n + 1}/{len(plan)} loss {values['loss']:+.5f} grad_norm {values['grad_norm']:.4f} "
                f"{len(indices)} rows {sum(lengths) / seconds:.0f} tok/s"
            )

    def _finite(self, values: dict[str, float], n: int, steps: int, indices: list[int]) -> None:
        """Stop before anything is written where a step gave no number: veRL would skip it and go on."""
        if math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"]):
            return
        ids = sorted(self.rows[i].sample_id for i in indices)
        more = f" and {len(ids) - 3} more" if len(ids) > 3 else ""
        raise TrainError(
            f"iteration {self.job.iteration}, step {n + 1} of {steps}: the loss is {values['loss']}, the gradient norm "
            f"{values['grad_norm']}, on samples {', '.join(ids[:3])}{more}; nothing was written, checkpoint "
            f"{self.job.iteration - 1} stays: lower actor.optim.lr or look at these rows"
        )


def _computed(worker: Any) -> int:
    """Tokens that went through the model so far; 0 throughout with an engine that does not count them."""
    return int(getattr(worker.engine, "computed_tokens", 0))


def save(job: Job, worker: Any, values: Any, metrics: list[dict[str, Any]]) -> None:
    """Write state, metrics and checkpoint beside their places and rename them; the checkpoint comes last."""
    if dist.get_rank():
        with tempfile.TemporaryDirectory() as unused:
            _parts(job, worker, values, None, Path(unused))
        dist.barrier()
        return
    with checkpoint.folder_beside(Path(job.checkpoint_out)) as model:
        with checkpoint.folder_beside(Path(job.state_out)) as state:
            checkpoint.copy_companions(Path(job.checkpoint_in), model)
            _parts(job, worker, values, state, model)
            version = checkpoint.write_card(model, job, trained=True)
            shape = {"lora": lora_of(job.typed), "layout": layout_of(job.typed)}
            checkpoint.write_state_card(state, job, version, dist.get_world_size(), **shape)
        tables.write_table(job.metrics_out, tables.METRICS, metrics)
    dist.barrier()


def _parts(job: Job, worker: Any, values: Any, state: Path | None, model: Path) -> None:
    """What every process takes part in: the state's shards, the whole weights, the probe's forward.

    `state` is the first process's, the others are told it; what they write into `model` is of no use.
    """
    from safetensors.torch import save_file

    from openforge.train.worker import weights

    where = [None if state is None else str(state)]
    dist.broadcast_object_list(where, src=0)
    worker.save_checkpoint(where[0], global_step=job.iteration)
    if values is not None:
        from openforge.train import critic

        critic.save(values, state, where[0], job.iteration)
    full, options = weights(worker, keep=state is not None), job.typed.actor.model
    if state is not None:
        if options.lora_rank:
            lora.save(worker.engine.module, full, state / lora.ADAPTER)
            full = lora.merged(full, options.lora_alpha / options.lora_rank)
        save_file(full, model / "model.safetensors", metadata={"format": "pt"})
    keep_probe(model, *_probe(job, worker))


def _probe(job: Job, worker: Any) -> tuple[list[int], list[float]]:
    """The probe's ids, and the log-probs that the worker's engine gives for those after the first, on every process."""
    from transformers import AutoConfig

    from openforge.train.images import load
    from openforge.train.worker import batch, infer

    source = Path(job.checkpoint_in)
    ids = probe_ids(vocabulary(source), vision_ids(AutoConfig.from_pretrained(source)))
    ones: Any = np.ones(len(ids) - 1, np.float32)
    row = Row("", "", "", np.asarray(ids, np.int64), ones.astype(np.int64), ones, ones, 0.0, 1.0, "")
    # Every replica scores the same row.
    limits = {"use_dynamic_bsz": True, "max_token_len_per_gpu": len(ids)}
    # A model that sees takes positions in three dimensions, whether a row shows something or not.
    images = load(source, [], [], job.samples)
    data = batch([row], {}, 0, images, temperature=1.0, shared_prefix=False, entropy_grad=False, **limits)
    found = infer(worker, data, "log_probs")
    scored: list[float] = gathered(None if found is None else found[0].tolist())[0]
    return ids, scored


def _base(job: Job) -> Path:
    assert job.base is not None  # openforge/train/job.py: needs_base
    return Path(job.base)


def _workers(job: Job) -> tuple[Any, Any]:
    """The policy of checkpoint k-1 and, where the estimator has one, the critic, with the optimizers of state k-1
    where anything was trained yet."""
    from openforge.train.worker import build, resume

    adapters = job.typed.actor.model.lora_rank > 0
    state = Path(job.state_in) if job.state_in is not None and checkpoint.world_size(Path(job.state_in)) else None
    model = _base(job) if adapters else Path(job.checkpoint_in)
    worker = build(model, job.typed, state / lora.ADAPTER if adapters and state is not None else None)
    if state is not None:
        resume(worker, state, job.typed.actor.optim)
    if not ESTIMATORS[job.typed.algorithm.adv_estimator].critic:
        return worker, None
    from openforge.train import critic

    whole = Path(job.checkpoint_in) if state is None else state / checkpoint.CRITIC
    values = critic.build(whole, job.typed)
    if state is not None:
        resume(values, whole, job.typed.critic.optim)
    return worker, values


def main(path: Path) -> None:
    """Run the job of a JSON file."""
    job = Job.read(path)
    torch.set_num_threads(job.typed.trainer.threads)
    start_processes(job.typed.trainer)
    from openforge.train.worker import build

    # What was imported stays: collections need not walk through it again.
    gc.freeze()
    gc.enable()
    imported = time.time()
    epoch = Epoch(job)
    reference = None
    if epoch.config.actor.use_kl_loss:
        # Gone again before the policy is loaded: two models are never in memory at once.
        reference = epoch.infer(build(_base(job), epoch.config, reference=True), "log_probs")
        gc.collect()
    worker, epoch.critic = _workers(job)
    loaded = time.time()
    say(f"{len(epoch.rows)} rows; imports {imported - _STARTED:.1f} s, model {loaded - imported:.1f} s")
    columns = epoch.columns(worker, reference)
    recomputed = time.time()
    epoch.steps(worker, columns)
    stepped = time.time()
    rows = epoch.rows
    epoch.note(
        -1,
        {
            "training/rows": len(rows),
            "training/episodes": len({r.episode_id for r in rows}),
            "training/rows_per_episode": len(rows) / len({r.episode_id for r in rows}),
            "training/staleness": sum(r.staleness(job.iteration) for r in rows) / len(rows),
            "training/trained_tokens": sum(int(r.mask.sum()) for r in rows),
            "training/images": sum(len(r.images) for r in rows),
            "training/length_mean": sum(epoch.lengths) / len(rows),
            "training/length_max": max(epoch.lengths),
            "timing/imports": imported - _STARTED,
            "timing/load": loaded - imported,
            "timing/old_log_probs": recomputed - loaded,
            "timing/steps": stepped - recomputed,
            "perf/peak_memory_gb": verl_cpu.peak_bytes() / 2**30,
            **job.counted(),
        },
    )
    save(job, worker, epoch.critic, epoch.metrics)
    say(f"saved in {time.time() - stepped:.1f} s; {time.time() - _STARTED:.1f} s in all")
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except (TrainError, VisionError) as e:
        print(f"{REFUSED}{e}", flush=True)
        sys.exit(2)
