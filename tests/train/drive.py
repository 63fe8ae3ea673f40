"""Runs inside the train environment: jobs on a tiny random model beside the oracle; prints one JSON object.

One process for all of it, since importing veRL costs more than everything else here. `drive.py FOLDER`.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from openforge.train import epoch  # first: it registers the CPU platform before veRL looks for one

import torch  # isort: skip
from safetensors.torch import load_file, save_file  # isort: skip
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, LlamaConfig, LlamaForCausalLM  # isort: skip

from openforge import tables
from openforge.config import RunConfig
from openforge.config_training import Algorithm, Trainer
from openforge.policy.weights import read_checkpoint, write_checkpoint
from openforge.train.job import Job, TrainError

sys.path.insert(0, str(Path(__file__).parent))
from oracle import Critic, Oracle, adapt, advantages, log_probs

Json = dict[str, Any]
VOCABULARY = 61
KINDS = ("kl", "abs", "mse", "low_var_kl", "kl+", "abs+", "low_var_kl+")


def tiny(folder: Path) -> Path:
    """A random untied Llama as checkpoint 0, with weights large enough that its choices are not uniform."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    write_checkpoint(folder, 0)
    return folder


def version(model: Any) -> str:
    return str(read_checkpoint(Path(model.name_or_path))["policy_version"])


def row(model: Any, episode: str, group: str, reward: float, ids: list[int], mask: list[int]) -> Json:
    """A samples row whose recorded log-probs lie off the model's, so that ratios differ from 1 and some
    clip."""
    sample: Json = {
        "sample_id": f"{episode}-{len(ids)}",
        "episode_id": episode,
        "group_id": group,
        "calls": [0],
        "token_ids": ids,
        "loss_mask": mask,
        "rewards": [0.0] * (len(ids) - 1) + [reward],
        "policy_version": version(model),
        "images": [],
    }
    with torch.no_grad():
        exact = iter(log_probs(model, sample, 1.0)[0].tolist())
    noise = np.random.default_rng(len(ids))
    sample["logprobs"] = [next(exact) + float(noise.normal(0, 0.2)) if m else 0.0 for m in mask]
    return sample


def credited(samples: list[Json]) -> list[Json]:
    """Samples with the oracle's advantages and weights by trained tokens."""
    advantage = advantages(samples, True)
    for s in samples:
        whole = sum(sum(x["loss_mask"]) for x in samples if x["episode_id"] == s["episode_id"])
        s["weight"] = sum(s["loss_mask"]) / whole
        s["advantages"] = [advantage[s["episode_id"]] * m for m in s["loss_mask"]]
    return samples


def episodes(model: Any, seed: int, groups: int = 3) -> list[Json]:
    """Groups of 3 episodes that share a few-shot prefix and their group's prompt, with one to three rows
    each."""
    draw = np.random.default_rng(seed)

    def tokens(n: int) -> list[int]:
        return [int(x) for x in draw.integers(0, VOCABULARY, n)]

    shared, samples = tokens(9), []
    for g in range(groups):
        prompt = shared + tokens(4)
        for e in range(3):
            reward = [1.0, 0.0, float(draw.choice([0.0, 0.5, 1.0]))][e]
            first, between, second = tokens(int(draw.integers(2, 6))), tokens(3), tokens(4)
            ids = prompt + first + between + second
            mask = [0] * len(prompt) + [1] * len(first) + [0] * 3 + [1] * 4
            name = f"e{g}.{e}"
            samples.append(row(model, name, f"g{g}", reward, ids, mask))
            for _ in range(int(draw.integers(0, 3))):
                other = prompt[: int(draw.integers(1, 12))] + tokens(5)
                samples.append(row(model, name, f"g{g}", reward, other, [0] * (len(other) - 3) + [1] * 3))
    for i, s in enumerate(samples):
        s["sample_id"] = str(i)
    return credited(samples)


def split(samples: list[Json]) -> list[Json]:
    """The same training with the second response of each two-response row in a row of its own."""
    out = []
    for s in samples:
        ids, mask = s["token_ids"], s["loss_mask"]
        runs = [i for i, m in enumerate(mask) if m and not mask[i - 1]]
        if len(runs) == 1:
            out.append(s)
            continue
        end = next(i for i in range(runs[0], len(ids)) if not mask[i])
        head = {k: s[k][:end] for k in ("token_ids", "loss_mask", "logprobs")}
        tail = [0] * runs[1] + mask[runs[1] :]
        out.append({**s, **head, "rewards": [0.0] * (end - 1) + s["rewards"][-1:], "sample_id": s["sample_id"] + "a"})
        logprobs = [p * m for p, m in zip(s["logprobs"], tail, strict=True)]
        out.append({**s, "loss_mask": tail, "logprobs": logprobs, "sample_id": s["sample_id"] + "b"})
    return credited(out)


COSINE = {
    "lr": 2e-3,
    "lr_scheduler_type": "cosine",
    "lr_warmup_steps": 3,
    "total_training_steps": 11,
    "min_lr_ratio": 0.1,
    "weight_decay": 0.2,
    "betas": (0.8, 0.9),
    "clip_grad": 0.5,
}


def loss(mode: str, **keys: Any) -> Json:
    return {"loss_mode": mode, **keys}


def config(
    policy_loss: Json | None = None,
    bypass: bool = True,
    temperature: float = 1.0,
    algorithm: Json | None = None,
    critic: Json | None = None,
    **actor: Any,
) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": "tiny-random",
            "iterations": 2,
            "tasks": {"source": "tiny"},
            "sampling": {"temperature": temperature},
            "algorithm": {"rollout_correction": {"bypass_mode": bypass}, **(algorithm or {})},
            **({} if critic is None else {"critic": critic}),
            "trainer": {"threads": 1},
            "actor": {
                "optim": {"lr": 1e-3},
                "ppo_mini_batch_size": 5,
                "ppo_epochs": 2,
                "policy_loss": policy_loss or {},
                **actor,
            },
        }
    )


def job(run: Path, base: Path, k: int, samples: list[Json], settings: RunConfig) -> Job:
    table = run / f"samples{k}.parquet"
    tables.write_table(table, tables.SAMPLES, samples)
    counts = {"total": 5, "trained": 3, "dropped": {"zero_variance": 2}}
    (run / "report.json").write_text(json.dumps(dict.fromkeys(("episodes", "calls", "groups"), counts)))
    return Job(
        run=run.name,
        iteration=k,
        checkpoint_in=str(base if k == 1 else run / f"checkpoints/{k - 1:04d}"),
        state_in=None if k == 1 else str(run / f"state/{k - 1:04d}"),
        samples=str(table),
        checkpoint_out=str(run / f"checkpoints/{k:04d}"),
        state_out=str(run / f"state/{k:04d}"),
        metrics_out=str(run / f"metrics{k}.parquet"),
        config=settings.model_dump(mode="json"),
        config_digest="d",
        base=str(base),
        report=str(run / "report.json"),
    )


def run_job(spec: Job) -> None:
    path = Path(spec.metrics_out).with_suffix(".json")
    spec.write(path)
    epoch.main(path)


def metric(spec: Job, name: str) -> list[float]:
    rows = tables.read_rows(spec.metrics_out, tables.METRICS)
    return [r["value"] for r in sorted(rows, key=lambda r: r["step"]) if r["name"] == name]


def fresh_adapters(base: Path, settings: RunConfig) -> dict[str, Any]:
    """A of each adapted layer as a job begins with it; B is 0."""
    if not settings.actor.model.lora_rank:
        return {}
    from openforge.train.worker import build, weights

    epoch.start_processes(Trainer())
    full = weights(build(base, settings), keep=True)
    torch.distributed.destroy_process_group()
    assert not any(t.any() for name, t in full.items() if ".lora_B" in name)
    return {
        name.removeprefix("base_model.model.").removesuffix(".lora_A.default.weight"): t
        for name, t in full.items()
        if ".lora_A" in name
    }


def fresh_critic(run: Path, base: Path, settings: RunConfig) -> Critic | None:
    """The critic as a job begins with it, in the oracle's hands."""
    if settings.algorithm.adv_estimator != "gae":
        return None
    from openforge.train.critic import build
    from openforge.train.worker import weights

    epoch.start_processes(Trainer())
    worker = build(base, settings)
    worker.engine.module.config.save_pretrained(run / "fresh")
    save_file(weights(worker, keep=True), run / "fresh/model.safetensors", metadata={"format": "pt"})
    torch.distributed.destroy_process_group()
    return Critic(AutoModelForTokenClassification.from_pretrained(run / "fresh"), settings.model_dump(mode="json"))


def critic_of(spec: Job, critic: Critic, samples: list[Json]) -> Json:
    """Differences of the last iteration's value losses and of the critic's values to the oracle's."""
    found, ours = metric(spec, "critic/vf_loss"), critic.losses[-8:]
    folder = Path(spec.state_out) / "critic"
    written = Critic(AutoModelForTokenClassification.from_pretrained(folder), spec.config)
    fresh = Critic(
        AutoModelForTokenClassification.from_pretrained(Path(spec.state_out).parents[1] / "fresh"), spec.config
    )
    with torch.no_grad():
        after, saved, before = (torch.cat([c.values(s) for s in samples]) for c in (critic, written, fresh))
    return {
        "vf_loss": max(abs(a - b) / max(1.0, b) for a, b in zip(found, ours, strict=True)),
        "vf_losses": ours,
        "values": float((after - saved).abs().max()),
        "values_moved": float((before - saved).abs().max()),
        "critic_lr": metric(spec, "critic/lr"),
        "critic_clipped": max(metric(spec, "critic/vf_clipfrac")),
    }


def against_oracle(run: Path, base: Path, iterations: list[list[Json]], settings: RunConfig) -> Json:
    """Chained jobs and the oracle on the same samples: differences, relative where values are above 1."""
    model = AutoModelForCausalLM.from_pretrained(base)
    starts = fresh_adapters(base, settings)
    if starts:
        adapt(model, starts, settings.actor.model.lora_alpha / settings.actor.model.lora_rank)
    critic = fresh_critic(run, base, settings)
    oracle = Oracle(model, settings.model_dump(mode="json"), critic)
    worst: Json = {"loss": 0.0, "grad_norm": 0.0, "steps": 0, "lr": []}
    apart: list[float] = []
    losses: list[float] = []
    for k, samples in enumerate(iterations, 1):
        if critic is not None:
            samples = [{**s, "advantages": None} for s in samples]
        if settings.algorithm.adv_estimator == "sft":
            samples = [{**s, "advantages": [float(m) for m in s["loss_mask"]]} for s in samples]
        spec = job(run, base, k, samples, settings)
        run_job(spec)
        expected = oracle.iteration(k, samples)
        loss, norm = metric(spec, "loss"), metric(spec, "grad_norm")
        worst["steps"] += len(loss)
        assert len(loss) == len(expected)
        apart += [abs(a - b[0]) for a, b in zip(loss, expected, strict=True)]
        losses += [abs(b[0]) for b in expected]
        far = [abs(a - b[1]) / max(1.0, b[1]) for a, b in zip(norm, expected, strict=True)]
        worst["grad_norm"] = max(worst["grad_norm"], *far)
        worst["lr"] += metric(spec, "lr")
        worst |= {name: max(metric(spec, name), default=None) for name in WATCHED}
    written = AutoModelForCausalLM.from_pretrained(Path(spec.checkpoint_out))
    first = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        after, ours, before = (
            torch.cat([log_probs(m, s, 1.0)[0] for s in iterations[-1]]) for m in (model, written, first)
        )
    worst["log_probs"] = float((after - ours).abs().max())
    worst["moved"] = float((before - ours).abs().max())
    # Sums cancel, so that what a loss is exact to goes by the largest.
    worst |= {"first_loss": apart[0] / max(1, losses[0]), "loss": max(apart) / max(1, *losses), "smallest": min(losses)}
    if critic is not None:
        worst |= critic_of(spec, critic, iterations[-1])
    worst |= adapter_of(spec, model, starts)
    worst["untied"] = "lm_head.weight" in load_file(Path(spec.checkpoint_out) / "model.safetensors")
    return worst


def adapter_of(spec: Job, model: Any, starts: dict[str, Any]) -> Json:
    """Layers that are adapted, and the largest difference of the checkpoint's merged weights to the oracle's."""
    if not starts:
        return {"adapted": 0, "adapter": sorted(p.name for p in Path(spec.state_out).glob("adapter/*"))}
    written = load_file(Path(spec.checkpoint_out) / "model.safetensors")
    apart = [float((written.pop(f"{name}.weight") - model.get_submodule(name).weight).abs().max()) for name in starts]
    before = load_file(Path(spec.base or "") / "model.safetensors")
    return {
        "adapted": len(starts),
        "merged": max(apart),
        "others_kept": all(torch.equal(t, before[name]) for name, t in written.items()),
        "adapter": sorted(p.name for p in Path(spec.state_out).glob("adapter/*")),
    }


MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
WATCHED = (
    "actor/pg_clipfrac",
    "actor/entropy",
    "actor/kl_loss",
    "rollout_corr/kl",
    "rollout_corr/rollout_is_ratio_fraction_high",
    "training/staleness",
    "training/rows_per_episode",
    "samples/episodes",
    "samples/dropped/groups/zero_variance",
)


def whole_batch(run: Path, base: Path, samples: list[Json], mode: str) -> list[float]:
    """Loss and gradient norm of one step over all rows."""
    scale = {"loss_scale_factor": 16} if mode.endswith("norm") else {}
    settings = config(
        loss_agg_mode=mode, ppo_mini_batch_size=100, ppo_epochs=1, entropy_coeff=0.1, use_kl_loss=True, **scale
    )
    spec = job(run, base, 1, samples, settings)
    run_job(spec)
    return metric(spec, "loss") + metric(spec, "grad_norm")


def kl_kinds(run: Path, base: Path, samples: list[Json]) -> Json:
    """One step with each estimator of the KL from another model: differences of loss and gradient norm to the oracle,
    and the gradient norm."""
    other, near = tiny(run / "other"), AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        for p in near.parameters():
            p += 0.02 * torch.randn_like(p)
    near.save_pretrained(other)
    out = {}
    for kind in KINDS:
        settings = config(use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type=kind, ppo_mini_batch_size=100, ppo_epochs=1)
        spec = replace(job(run / kind.replace("+", "_plus"), base, 1, samples, settings), base=str(other))
        run_job(spec)
        oracle = Oracle(AutoModelForCausalLM.from_pretrained(base), settings.model_dump(mode="json"))
        oracle.reference = AutoModelForCausalLM.from_pretrained(other)
        ((loss, norm),) = oracle.iteration(1, samples)
        (found,), (found_norm,) = metric(spec, "loss"), metric(spec, "grad_norm")
        out[kind] = [abs(found - loss) / max(1.0, abs(loss)), abs(found_norm - norm) / norm, norm]
    return out


def diverging(run: Path, base: Path, samples: list[Json], **actor: Any) -> Json:
    """A learning rate that leaves no number: the sentence, and what was written."""
    spec = job(run, base, 1, samples, config(optim={"lr": 1e38}, **actor))
    try:
        run_job(spec)
    except TrainError as e:
        torch.distributed.destroy_process_group()
        return {"refused": str(e), "written": sorted(p.name for p in run.glob("*/*"))}
    return {"refused": None}


def engines(run: Path, base: Path, samples: list[Json]) -> Json:
    """Log-probs and entropies of trained tokens, shared prefixes against veRL's own engine, in small
    micro-batches."""
    from tensordict import NonTensorData
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import response_from_nested

    from openforge.train.rows import row_of
    from openforge.train.worker import batch, build

    epoch.start_processes(Trainer())
    worker = build(base, config(ppo_max_token_len_per_gpu=60))
    rows, found, cost = [row_of(s) for s in samples], {}, {}
    for shared in (True, False):
        data = batch(rows, {}, 0, temperature=0.7, shared_prefix=shared, calculate_entropy=True, compute_loss=False)
        tu.assign_non_tensor(data, global_token_num=NonTensorData([len(r.token_ids) for r in rows]))
        before = worker.engine.computed_tokens
        out, mask = worker.infer_batch(data), data["response_mask"]
        cost[shared] = worker.engine.computed_tokens - before
        found[shared] = {
            name: response_from_nested(tu.get(out, name), mask).values() * mask.values()
            for name in ("log_probs", "entropy")
        }
    torch.distributed.destroy_process_group()
    return {
        "log_probs": float((found[True]["log_probs"] - found[False]["log_probs"]).abs().max()),
        "entropy": float((found[True]["entropy"] - found[False]["entropy"]).abs().max()),
        "largest": float(found[False]["log_probs"].abs().max()),
        "computed": cost[True],
        "raw": cost[False],
    }


def verl_advantages(samples: list[Json]) -> Json:
    """veRL's estimator against the oracle with and without std, and the job's sentence for a wrong one."""
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    from openforge.train.advantages import credited
    from openforge.train.rows import row_of

    reward = {s["episode_id"]: (s["rewards"][-1], s["group_id"]) for s in samples}
    worst = 0.0
    for norm in (True, False):
        found, _ = get_adv_estimator_fn("grpo")(
            token_level_rewards=torch.tensor([[r] for r, _ in reward.values()]),
            response_mask=torch.ones(len(reward), 1),
            index=np.array([g for _, g in reward.values()], dtype=object),
            norm_adv_by_std_in_grpo=norm,
        )
        ours = advantages(samples, norm)
        worst = max(worst, *(abs(float(f) - ours[e]) for f, e in zip(found[:, 0], reward, strict=True)))
    rows = [row_of(s) for s in samples]
    credited(rows, Algorithm())
    try:
        credited(rows, Algorithm(norm_adv_by_std_in_grpo=False))
    except TrainError as e:
        return {"worst": worst, "refused": str(e)}
    return {"worst": worst, "refused": None}


def main(folder: Path) -> Json:
    torch.use_deterministic_algorithms(True)
    base = tiny(folder / "base")
    model = AutoModelForCausalLM.from_pretrained(base)
    two = [episodes(model, 1), episodes(model, 2)]
    means = "seq-mean-token-mean"
    cases = {
        "bypass": config(),
        "plain_engine": config(use_shared_prefix=False),
        "recomputed": config(bypass=False, temperature=0.7, loss_agg_mode=means, entropy_coeff=0.01),
        "token_sum": config(loss_agg_mode="seq-mean-token-sum", clip_ratio_high=0.28, clip_ratio_c=1.5),
        "dr_grpo": config(loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=16, clip_ratio=0.1),
        "gspo": config(loss("gspo"), loss_agg_mode=means, clip_ratio_low=0.05, clip_ratio_high=0.08),
        "sapo": config(loss("sapo"), loss_agg_mode=means, tau_pos=0.9, tau_neg=1.5),
        "cispo": config(loss("cispo"), clip_ratio_high=0.3, clip_ratio_low=10.0),
        "gpg": config(loss("gpg"), bypass=False, loss_agg_mode="token-sum"),
        "dro": config(loss("dro", dro_beta=0.5), loss_agg_mode=means),
        "dppo_tv": config(loss("dppo_tv"), clip_ratio=0.05, clip_ratio_c=1.2),
        "dppo_kl": config(loss("dppo_kl"), clip_ratio=0.01),
        "kl_loss": config(use_kl_loss=True, kl_loss_coef=0.5, loss_agg_mode=means, entropy_coeff=-0.01),
        "schedule": config(optim=COSINE),
        "lora": config(bypass=False, model={"lora_rank": 4, "lora_alpha": 8}, use_kl_loss=True, optim={"lr": 1e-2}),
        "lora_some": config(
            model={"lora_rank": 2, "target_modules": ["q_proj", "down_proj"], "enable_gradient_checkpointing": True}
        ),
        "gae": config(
            algorithm={"adv_estimator": "gae", "gamma": 0.95, "lam": 0.9},
            critic={"optim": {"lr": 1e-3}, "cliprange_value": 0.3},
        ),
        "gae_means": config(
            bypass=False, algorithm={"adv_estimator": "gae"}, model={"lora_rank": 4}, loss_agg_mode=means
        ),
        "sft": config(loss("gpg"), algorithm={"adv_estimator": "sft"}),
        "checkpointing": config(model={"enable_gradient_checkpointing": True}),
        "micro_rows": config(use_dynamic_bsz=False, ppo_micro_batch_size_per_gpu=2),
        "micro_tokens": config(bypass=False, ppo_max_token_len_per_gpu=40, loss_agg_mode=means),
    }
    out: Json = {name: against_oracle(folder / name, base, two, settings) for name, settings in cases.items()}
    out["engines"] = engines(folder, base, two[0])
    out["advantages"] = verl_advantages(two[0])
    out["kl"] = kl_kinds(folder / "kl", base, two[0])
    out["diverging"] = diverging(folder / "diverging", base, two[0])
    out["diverging_at_last"] = diverging(
        folder / "diverging_at_last", base, two[0], ppo_mini_batch_size=100, ppo_epochs=1
    )
    out["rows"] = {}
    for mode in MODES:
        merged = whole_batch(folder / f"merged-{mode}", base, two[0], mode)
        out["rows"][mode] = [merged, whole_batch(folder / f"split-{mode}", base, split(two[0]), mode)]
    again = job(folder / "again", base, 1, two[0], config())
    run_job(again)
    out["repeat"] = [
        json.loads((p / "checkpoints/0001/checkpoint.json").read_text())["sha256"]
        for p in (folder / "bypass", folder / "again")
    ]
    return out


if __name__ == "__main__":
    if len(sys.argv) > 2:  # under torchrun: the given jobs one after the other, in one process group
        faulthandler.dump_traceback_later(300, exit=True)
        epoch.start_processes(Trainer())
        epoch.start_processes = torch.distributed.destroy_process_group = lambda *_: None
        for given in sys.argv[1:]:
            epoch.main(Path(given))
        sys.exit()
    target = Path(sys.argv[1])
    (target / "result.json").write_text(json.dumps(main(target)))
