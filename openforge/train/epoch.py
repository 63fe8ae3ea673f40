"""The training job: one iteration through unpatched veRL, from samples and checkpoint k-1 to checkpoint k.

Runs in the train environment as `python -m openforge.train.epoch JOB.json`, or under torchrun. Old log-probs
are the recorded ones (bypass mode) or those of checkpoint k-1, then corrected by veRL's token-level truncated
importance weights. Mini-batches are cut from one seeded permutation of all rows and dealt over the processes,
so their number does not change the result.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
import warnings
from dataclasses import replace
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
from openforge.config import Algorithm  # noqa: E402
from openforge.policy.probe import write_probe  # noqa: E402
from openforge.samples.credit import ESTIMATORS  # noqa: E402
from openforge.train import checkpoint, verl_cpu  # noqa: E402
from openforge.train.job import PROGRESS, REFUSED, Job, TrainError  # noqa: E402
from openforge.train.rows import Row, deal, episodes, permutations, row_of  # noqa: E402

# veRL's default bound of a token's importance weight (algorithm.rollout_correction.rollout_is_threshold).
IS_THRESHOLD = 2.0


def say(line: str) -> None:
    """A progress line of the first process; openforge/train/launch.py hands on what starts so."""
    if int(os.environ["RANK"]) == 0:
        print(f"{PROGRESS}{line}", flush=True)


def start_processes() -> None:
    """The process group and veRL's registries. One process needs no port: its store is in memory."""
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


def credited(rows: list[Row], algorithm: Algorithm) -> list[Row]:
    """Rows with the advantages of veRL's own estimator, over one row an episode, where the table leaves them to it.

    Raises:
        TrainError: the table has an advantage that is another than veRL's.
    """
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    firsts = episodes(rows)
    rewards = torch.tensor([[r.reward] for r in firsts], dtype=torch.float64)
    groups = np.array([r.group_id for r in firsts], dtype=object)
    by_std = algorithm.norm_adv_by_std_in_grpo
    estimate = get_adv_estimator_fn(algorithm.adv_estimator)
    found, _ = estimate(
        token_level_rewards=rewards,
        response_mask=torch.ones_like(rewards),
        index=groups,
        norm_adv_by_std_in_grpo=by_std,
        config=AlgoConfig(norm_adv_by_std_in_grpo=by_std),
    )
    advantage = {r.episode_id: float(value) for r, value in zip(firsts, found[:, 0], strict=True)}
    if firsts[0].advantages is None:
        return [replace(r, advantages=np.full(len(r.mask), advantage[r.episode_id], np.float32) * r.mask) for r in rows]
    # The last call of an episode has all of its advantage, the others a discounted one.
    stored: dict[str, float] = {}
    for r in rows:
        stored[r.episode_id] = max(stored.get(r.episode_id, 0.0), *r.advantages.tolist(), key=abs)
    within = ESTIMATORS[algorithm.adv_estimator].within
    for row in firsts:
        mates = torch.from_numpy((groups == row.group_id) | (within == "iteration"))
        raw, its = rewards[mates], found[mates]
        # Rewards stand in the table as float32: dividing by a small spread magnifies their rounding.
        noise = 4e-7 * float(raw.abs().max() * (its.max() - its.min()) / (raw.max() - raw.min()))
        if not abs(stored[row.episode_id] - advantage[row.episode_id]) <= 1e-6 + noise:
            raise TrainError(
                f"episode {row.episode_id} of group {row.group_id}: its advantage in the samples table is "
                f"{stored[row.episode_id]:.6f}, but veRL's estimator {algorithm.adv_estimator} gives "
                f"{advantage[row.episode_id]:.6f}; write the samples again"
            )
    return rows


class Epoch:
    """One process's view of the job: rows, worker, and the columns that go with each row."""

    def __init__(self, job: Job) -> None:
        self.job, self.config = job, job.typed
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.rows = [row_of(s) for s in tables.read_rows(job.samples, tables.SAMPLES)]
        self.lengths = [len(r.token_ids) for r in self.rows]
        # The engine that shares prefixes is registered for the CPU only.
        self.shared = self.config.actor.use_shared_prefix and self.config.trainer.device == "cpu"
        self.metrics: list[dict[str, Any]] = []
        longest = max(self.lengths)
        if longest > self.config.actor.ppo_max_token_len_per_gpu:
            raise TrainError(
                f"{job.samples}: a row of {longest} tokens does not fit actor.ppo_max_token_len_per_gpu "
                f"({self.config.actor.ppo_max_token_len_per_gpu}); write the samples again"
            )
        self.rows = credited(self.rows, self.config.algorithm)

    def note(self, step: int, values: dict[str, float]) -> None:
        self.metrics += [
            {"iteration": self.job.iteration, "step": step, "name": k, "value": float(v)} for k, v in values.items()
        ]

    def share(self, indices: list[int]) -> tuple[list[int], int]:
        """This process's rows of a global batch, and how many of them (the last ones) only even out the
        ranks."""
        hands = deal(indices, self.lengths, self.world)
        mine, most = hands[self.rank], max(map(len, hands))
        filler = min(indices, key=lambda i: self.lengths[i])
        return mine + [filler] * (most - len(mine)), most - len(mine)

    def data(self, indices: list[int], pad: int, columns: dict[str, list[Any]], **settings: Any) -> Any:
        from openforge.train.worker import batch

        actor = self.config.actor
        return batch(
            [self.rows[i] for i in indices],
            {name: [values[i] for i in indices] for name, values in columns.items()},
            pad,
            temperature=self.config.sampling.temperature,
            shared_prefix=self.shared,
            entropy_grad=actor.entropy_coeff != 0.0,
            **settings,
        )

    def columns(self, worker: Any) -> dict[str, list[Any]]:
        """Advantages and old log-probs over the responses, a tensor a row; importance weights where
        decoupled."""
        columns: dict[str, list[Any]] = {"advantages": [self._advantage(r) for r in self.rows]}
        if self.config.algorithm.rollout_correction.bypass_mode:
            columns["old_log_probs"] = [torch.from_numpy(r.recorded) for r in self.rows]
            return columns
        columns["old_log_probs"] = self._recomputed(worker)
        columns["rollout_is_weights"] = self._importance(columns["old_log_probs"])
        return columns

    def _advantage(self, row: Row) -> Any:
        # A mean over a sequence's tokens would weigh an episode by its rows: rows count by their share of its
        # tokens. The other modes add tokens up, where every token counts once already. The clipped objective
        # is linear in a positive factor on the advantage, so the factor goes there.
        factor = row.weight if self.config.actor.loss_agg_mode == "seq-mean-token-mean" else 1.0
        return torch.from_numpy((row.advantages * factor * row.mask).astype(np.float32))

    def _recomputed(self, worker: Any) -> list[Any]:
        from openforge.train.worker import log_probs

        mine, _ = self.share(list(range(len(self.rows))))
        parts: list[Any] = [None] * self.world
        dist.all_gather_object(parts, dict(zip(mine, log_probs(worker, self.data(mine, 0, {})), strict=True)))
        merged = {i: t for part in parts for i, t in part.items()}
        # Values between trained tokens are context: 0, as in the table.
        return [merged[i] * torch.from_numpy(self.rows[i].mask) for i in range(len(self.rows))]

    def _importance(self, old: list[Any]) -> list[Any]:
        from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

        def padded(values: list[Any]) -> Any:
            return torch.nn.utils.rnn.pad_sequence(values, batch_first=True)

        weights, _, metrics = compute_rollout_correction_and_rejection_mask(
            old_log_prob=padded(old),
            rollout_log_prob=padded([torch.from_numpy(r.recorded) for r in self.rows]),
            response_mask=padded([torch.from_numpy(r.mask).float() for r in self.rows]),
            rollout_is="token",
            rollout_is_threshold=IS_THRESHOLD,
        )
        keep = ("rollout_corr/kl", "rollout_corr/k3_kl", "rollout_corr/rollout_is_mean", "rollout_corr/rollout_is_max")
        self.note(-1, {k: v for k, v in metrics.items() if k in keep})
        whole = weights.batch["rollout_is_weights"]
        return [whole[i, : len(r.mask)].clone() for i, r in enumerate(self.rows)]

    def steps(self, worker: Any, columns: dict[str, list[Any]]) -> None:
        """All optimizer steps of the iteration."""
        from openforge.train.worker import step

        actor = self.config.actor
        seed = (actor.data_loader_seed, self.job.iteration)
        plan = permutations(len(self.rows), actor.ppo_mini_batch_size, actor.ppo_epochs, seed)
        entropy = actor.entropy_coeff != 0.0 or self.shared
        for n, indices in enumerate(plan):
            started, before = time.time(), _computed(worker)
            mine, pad = self.share(indices)
            data = self.data(mine, pad, columns, calculate_entropy=entropy)
            hands = deal(indices, self.lengths, self.world)
            lengths = [self.lengths[i] for hand in hands for i in hand]
            values = step(worker, data, lengths, sum(self.rows[i].weight for i in indices))
            trained = sum(int(self.rows[i].mask.sum()) for i in indices)
            apart, most = values.pop("diff_sum"), values.pop("diff_max")
            if n == 0:
                # Before the first update the trainer is checkpoint k-1: its distance from the sampler's
                # log-probs.
                values |= {"training/logprob_diff_mean": apart / trained, "training/logprob_diff_max": most}
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


def _computed(worker: Any) -> int:
    """Tokens that went through the model so far; 0 throughout with an engine that does not count them."""
    return int(getattr(worker.engine, "computed_tokens", 0))


def save(job: Job, worker: Any, metrics: list[dict[str, Any]]) -> None:
    """Write state, metrics and checkpoint beside their places and rename them; the checkpoint comes last."""
    if dist.get_rank():
        with tempfile.TemporaryDirectory() as unused:
            _parts(job, worker, None, Path(unused))
        dist.barrier()
        return
    with checkpoint.folder_beside(Path(job.checkpoint_out)) as model:
        with checkpoint.folder_beside(Path(job.state_out)) as state:
            checkpoint.copy_companions(Path(job.checkpoint_in), model)
            _parts(job, worker, state, model)
            version = checkpoint.write_card(model, job, trained=True)
            checkpoint.write_state_card(state, job, version, dist.get_world_size())
        tables.write_table(job.metrics_out, tables.METRICS, metrics)
    dist.barrier()


def _parts(job: Job, worker: Any, state: Path | None, model: Path) -> None:
    """What every process takes part in: the state's shards, the whole weights, the probe's forward.

    `state` is the first process's, the others are told it; what they write into `model` is of no use.
    """
    from safetensors.torch import save_file

    from openforge.train.worker import weights

    where = [None if state is None else str(state)]
    dist.broadcast_object_list(where, src=0)
    worker.save_checkpoint(where[0], global_step=job.iteration)
    full = weights(worker)
    if state is not None:
        save_file(full, model / "model.safetensors", metadata={"format": "pt"})
    write_probe(worker.engine.module, model)


def main(path: Path) -> None:
    """Run the job of a JSON file."""
    job = Job.read(path)
    torch.set_num_threads(job.typed.trainer.threads)
    start_processes()
    from openforge.train.worker import build, resume

    # What was imported stays: collections need not walk through it again.
    gc.freeze()
    gc.enable()
    imported = time.time()
    epoch = Epoch(job)
    worker = build(Path(job.checkpoint_in), epoch.config)
    if job.state_in is not None and checkpoint.world_size(Path(job.state_in)):
        resume(worker, Path(job.state_in), epoch.config)
    loaded = time.time()
    say(f"{len(epoch.rows)} rows; imports {imported - _STARTED:.1f} s, model {loaded - imported:.1f} s")
    columns = epoch.columns(worker)
    recomputed = time.time()
    epoch.steps(worker, columns)
    stepped = time.time()
    rows = epoch.rows
    epoch.note(
        -1,
        {
            "training/rows": len(rows),
            "training/episodes": len({r.episode_id for r in rows}),
            "training/trained_tokens": sum(int(r.mask.sum()) for r in rows),
            "training/length_mean": sum(epoch.lengths) / len(rows),
            "training/length_max": max(epoch.lengths),
            "timing/imports": imported - _STARTED,
            "timing/load": loaded - imported,
            "timing/old_log_probs": recomputed - loaded,
            "timing/steps": stepped - recomputed,
            "perf/peak_memory_gb": verl_cpu.peak_bytes() / 2**30,
        },
    )
    save(job, worker, epoch.metrics)
    say(f"saved in {time.time() - stepped:.1f} s; {time.time() - _STARTED:.1f} s in all")
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except TrainError as e:
        print(f"{REFUSED}{e}", flush=True)
        sys.exit(2)
