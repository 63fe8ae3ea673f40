"""What a training epoch costs: merged rows against one row a call, the job against a plain loop, more episodes.

    python benchmarks/training.py --json out.json [--episodes 8] [--turns 10]

A small random Llama on one CPU thread, each case a process of its own in the environment train-cpu. CPU times are those
of the optimizer steps, the lower of two rounds; importing veRL and loading the model are left out.

`merge`: rows of whole episodes against one row a call, both through veRL's own engine (the one that shares prefixes
would merge the calls by itself): tokens, CPU, and the largest difference of a step's gradient, relative to its largest
component. `overhead_cpu`: the job's steps, with the keys that it has by default, over those of a plain PyTorch loop on
the same rows, less 1; `overhead_verl`: likewise through veRL's own engine. `growth`: CPU of four times the episodes
over four times the CPU. `peak_mb`: resident memory of the job. Micro-batches are of one merged row, as the loop's.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from openforge.software import python_of
from openforge.train import launch

Json = dict[str, Any]
PROMPT, RESPONSE, RESULT = 120, 16, 24
VOCABULARY, GROUP, ROUNDS, LR = 4096, 4, 2, 1e-5
MERGED, CALLS = "merged.parquet", "calls.parquet"


# ---- in the training environment ----
def prepare(folder: Path, episodes: int, turns: int) -> Json:
    """The model as checkpoint 0, and the same episodes as tables of merged rows, of a row a call, and four times."""
    import numpy as np
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from openforge import tables
    from openforge.policy.weights import write_checkpoint

    torch.manual_seed(0)
    shape = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 8}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=4, tie_word_embeddings=False, **shape)
    )
    model.save_pretrained(folder / "0000")
    version = write_checkpoint(folder / "0000", 0)["policy_version"]
    draw = np.random.default_rng(0)
    for name, count in (("", episodes), ("4x-", 4 * episodes)):
        whole, apart = [], []
        for e in range(count):
            if e % GROUP == 0:
                prompt = draw.integers(0, VOCABULARY, PROMPT).tolist()
            ids, mask = list(prompt), [0] * PROMPT
            for _ in range(turns):
                ids += draw.integers(0, VOCABULARY, RESPONSE + RESULT).tolist()
                mask += [1] * RESPONSE + [0] * RESULT
            ids, mask = ids[:-RESULT], mask[:-RESULT]
            row = _row(model, f"e{e}", f"g{e // GROUP}", float(e % 2), ids, mask, version)
            whole.append(row)
            for t in range(turns):
                end = PROMPT + t * (RESPONSE + RESULT) + RESPONSE
                own = [0] * (end - RESPONSE) + [1] * RESPONSE
                cut = {c: [x * m for x, m in zip(row[c][:end], own, strict=True)] for c in ("logprobs", "advantages")}
                last = {"token_ids": ids[:end], "loss_mask": own, "rewards": [0.0] * (end - 1) + [float(e % 2)]}
                apart.append({**row, **cut, **last, "sample_id": f"e{e}.{t}", "weight": 1 / turns})
        tables.write_table(folder / f"{name}{MERGED}", tables.SAMPLES, whole)
        tables.write_table(folder / f"{name}{CALLS}", tables.SAMPLES, apart)
    return {}


def _row(model: Any, episode: str, group: str, reward: float, ids: list[int], mask: list[int], version: str) -> Json:
    import torch

    with torch.no_grad():
        logp = torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1], -1)
    chosen = [0.0, *logp.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()]
    return {
        "sample_id": episode,
        "episode_id": episode,
        "group_id": group,
        "calls": [0],
        "token_ids": ids,
        "loss_mask": mask,
        "logprobs": [p * m for p, m in zip(chosen, mask, strict=True)],
        "rewards": [0.0] * (len(ids) - 1) + [reward],
        # Half of a group's episodes have 1, the others 0.
        "advantages": [(reward - 0.5) * m for m in mask],
        "weight": 1.0,
        "policy_version": version,
        "images": [],
    }


def _job(folder: Path, table: str, shared: bool, mini_batch: int, tokens: int) -> Any:
    from openforge.config import RunConfig
    from openforge.train.job import Job

    config = RunConfig.model_validate(
        {
            "model": "tiny-random",
            "iterations": 1,
            "tasks": {"source": "tiny"},
            "algorithm": {"norm_adv_by_std_in_grpo": False, "rollout_correction": {"bypass_mode": True}},
            "trainer": {"threads": 1},
            # No clipping: the gradients of the two tables are compared.
            "actor": {
                "optim": {"lr": LR, "clip_grad": 1e9},
                "ppo_mini_batch_size": mini_batch,
                "ppo_max_token_len_per_gpu": tokens,
                "use_shared_prefix": shared,
            },
        }
    )
    none = str(folder / "unused")
    paths = {"checkpoint_out": none, "state_out": none, "metrics_out": none, "state_in": None}
    return Job(
        run="benchmark",
        iteration=1,
        checkpoint_in=str(folder / "0000"),
        samples=str(folder / table),
        config=config.model_dump(mode="json"),
        config_digest="",
        **paths,
    )


def job(folder: Path, table: str, shared: bool, mini_batch: int, tokens: int) -> Json:
    """CPU seconds, tokens and peak of the job's optimizer steps on a table; its first gradient goes to a file."""
    from openforge.train import epoch  # first: it registers the CPU platform

    import torch  # isort: skip
    from openforge.train.worker import build  # isort: skip

    epoch.start_processes()
    spec = _job(folder, table, shared, mini_batch, tokens)
    made = epoch.Epoch(spec)
    worker = build(Path(spec.checkpoint_in), spec.typed)
    first: dict[str, Any] = {}

    def keep(*_: Any) -> None:
        for name, p in worker.engine.module.named_parameters():
            first.setdefault(name, p.grad.full_tensor().clone())

    worker.engine.optimizer.register_step_pre_hook(keep)
    columns, seconds = made.columns(worker, None), []
    for _ in range(ROUNDS):
        began = time.process_time()
        made.steps(worker, columns)
        seconds.append(time.process_time() - began)
    steps = [m for m in made.metrics if m["name"] == "perf/computed_tokens"]
    torch.save(first, folder / "gradient.pt")
    return {"cpu": min(seconds), "tokens": sum(m["value"] for m in steps) / ROUNDS, "peak_mb": _peak()}


def plain(folder: Path, table: str, mini_batch: int) -> Json:
    """CPU seconds of a plain PyTorch loop over the rows: PPO's clipped loss, a row a time, AdamW a mini-batch."""
    import torch
    from transformers import AutoModelForCausalLM

    from openforge import tables

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder / "0000", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    rows, seconds = tables.read_rows(folder / table, tables.SAMPLES), []
    for _ in range(ROUNDS):
        began = time.process_time()
        for start in range(0, len(rows), mini_batch):
            chosen = rows[start : start + mini_batch]
            total = sum(sum(r["loss_mask"]) for r in chosen)
            for r in chosen:
                ids = torch.tensor([r["token_ids"]])
                mask, old, a = (torch.tensor(r[c])[1:].float() for c in ("loss_mask", "logprobs", "advantages"))
                logp = torch.log_softmax(model(ids).logits[0, :-1], -1)
                now = logp.gather(1, ids[0, 1:, None])[:, 0]
                entropy = -(logp.detach().exp() * logp.detach()).sum(-1)  # the job reports it too
                ratio = ((now - old) * mask).exp()
                loss = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a) * mask
                (loss.sum() / total).backward()
                del entropy
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            optimizer.step()
            optimizer.zero_grad()
        seconds.append(time.process_time() - began)
    return {"cpu": min(seconds)}


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def difference(folder: Path) -> Json:
    """Of two cases' gradients, relative to the largest component."""
    import torch

    one, two = (torch.load(folder / f"{name}.pt") for name in ("merged", "calls"))
    largest = max(float(g.abs().max()) for g in one.values())
    return {"largest": largest, "apart": max(float((one[n] - two[n]).abs().max()) for n in one) / largest}


# ---- outside ----
def inside(folder: Path, case: str, *arguments: Any) -> Json:
    """Run a case in the training environment."""
    words = [str(python_of("train-cpu")), __file__, "--inside", str(folder), case, json.dumps(arguments)]
    done = subprocess.run(words, env=launch.environment(1), stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout[-2000:] + done.stderr[-4000:])
    result: Json = json.loads(done.stdout.splitlines()[-1])
    return result


def measure(episodes: int, turns: int) -> Json:
    with tempfile.TemporaryDirectory() as d:
        folder = Path(d)
        inside(folder, "prepare", episodes, turns)
        row = PROMPT + turns * (RESPONSE + RESULT)
        # One step over the whole table, so that both gradients are of the same episodes.
        merged = inside(folder, "job", MERGED, False, episodes, row)
        (folder / "gradient.pt").rename(folder / "merged.pt")
        calls = inside(folder, "job", CALLS, False, episodes * turns, row)
        (folder / "gradient.pt").rename(folder / "calls.pt")
        ours = inside(folder, "job", MERGED, True, GROUP, row)
        more = inside(folder, "job", f"4x-{MERGED}", True, GROUP, row)
        verl = inside(folder, "job", MERGED, False, GROUP, row)
        loop = inside(folder, "plain", MERGED, GROUP)
        apart = inside(folder, "difference")
    return {
        "episodes": episodes,
        "turns": turns,
        "merge": {
            "token_ratio": calls["tokens"] / merged["tokens"],
            "cpu_ratio": calls["cpu"] / merged["cpu"],
            "grad_max_diff": apart["apart"],
        },
        "overhead_cpu": ours["cpu"] / loop["cpu"] - 1,
        "overhead_verl": verl["cpu"] / loop["cpu"] - 1,
        "peak_mb": ours["peak_mb"],
        "growth": more["cpu"] / (4 * ours["cpu"]),
    }


def main() -> None:
    if sys.argv[1:2] == ["--inside"]:
        cases = {"prepare": prepare, "job": job, "plain": plain, "difference": difference}
        print(json.dumps(cases[sys.argv[3]](Path(sys.argv[2]), *json.loads(sys.argv[4]))))
        return
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--json", type=Path, help="write the figures here")
    p.add_argument("--episodes", type=int, default=8)
    p.add_argument("--turns", type=int, default=10)
    a = p.parse_args()
    found = measure(a.episodes, a.turns)
    for name, value in found.items():
        for key, number in value.items() if isinstance(value, dict) else [("", value)]:
            print(f"{name + ('.' if key else '') + key:22} {number:.4g}")
    if a.json:
        a.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
