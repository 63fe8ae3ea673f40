"""Run by the serve environment's Python in slow tests: makes checkpoints and scores tokens with transformers.

usage: checkpoints.py perturb BASE   BASE with noise on every weight, the output head too: folders 1, 2, tied beside
       checkpoints.py score < JSON   [[folder, prompt ids, response ids], ...] -> logprobs of each response
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
    out, loaded, model = [], None, None
    for folder, prompt, response in json.load(sys.stdin):
        if folder != loaded:
            loaded, model = folder, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        out.append(torch.log_softmax(logits, -1).gather(1, torch.tensor(response)[:, None])[:, 0].tolist())
    print(json.dumps(out))


if sys.argv[1] == "perturb":
    base = Path(sys.argv[2])
    for seed, name in enumerate(("1", "2", "tied"), 1):
        perturb(base, base.with_name(name), seed, tied=name == "tied")
else:
    score()
