"""Run by the serve environment's Python in slow tests: makes checkpoints and scores tokens with transformers.

usage: checkpoints.py perturb BASE NAME...  folders beside BASE: its weights with noise on all, the output head too;
                                            the one named "tied" has no output head of its own
       checkpoints.py score < JSON          [[folder, prompt ids, response ids], ...] -> logprobs of each response
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from openforge.policy.probe import write_probe
from openforge.policy.weights import write_checkpoint


def perturb(base: Path, out: Path, seed: int, tied: bool) -> None:
    shutil.copytree(base, out, ignore=shutil.ignore_patterns("*.safetensors", "probe.json", "checkpoint.json"))
    torch.manual_seed(seed)
    weights = load_file(base / "model.safetensors")
    weights = {k: w + 0.05 * w.std(correction=0) * torch.randn_like(w) for k, w in weights.items()}
    config = json.loads((base / "config.json").read_text())
    if tied:
        del weights["lm_head.weight"]
        (out / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    write_probe(AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32), out)
    # The running server is the untied base's: it must be asked to swap and not be replaced by another one.
    (out / "config.json").write_text(json.dumps(config))
    write_checkpoint(out, seed)


def score() -> None:
    asked = json.load(sys.stdin)
    out: dict[int, list[float]] = {}
    for folder in {f for f, _, _ in asked}:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for i, (f, prompt, response) in enumerate(asked):
            if f == folder:
                with torch.no_grad():
                    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
                out[i] = torch.log_softmax(logits, -1).gather(1, torch.tensor(response)[:, None])[:, 0].tolist()
    print(json.dumps([out[i] for i in range(len(asked))]))


if sys.argv[1] == "perturb":
    base = Path(sys.argv[2])
    for seed, name in enumerate(sys.argv[3:], 1):
        perturb(base, base.with_name(name), seed, tied=name == "tied")
else:
    score()
