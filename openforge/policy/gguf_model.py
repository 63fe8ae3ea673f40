"""A llama-architecture GGUF file as a folder of HF weights; transformers reads such files but cannot save them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LAYER_WEIGHTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
TOP_WEIGHTS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def hf_name(name: str) -> str:
    """HF's name of a GGUF tensor, e.g. blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight."""
    if name in TOP_WEIGHTS:
        return TOP_WEIGHTS[name]
    _, layer, rest = name.split(".", 2)
    return f"model.layers.{layer}.{LAYER_WEIGHTS[rest.removesuffix('.weight')]}.weight"


def unpermute(weight: Any, heads: int) -> Any:
    """Undo llama.cpp's row order of a query or key matrix.

    llama.cpp rotates neighbouring rows of a head, transformers its two halves. `weight` has shape
    (heads * d, hidden).
    """
    d = weight.shape[0] // heads
    return weight.reshape(heads, d // 2, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def convert(file: Path, out: Path) -> None:
    """Write `file` as float32 weights, config.json, generation_config.json and tokenizer into `out`.

    Raises:
        ValueError: the file's architecture is not llama.
    """
    import numpy as np
    import torch
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    reader = GGUFReader(file)

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    if field("general.architecture") != "llama":
        raise ValueError(f"{file} holds architecture {field('general.architecture')!r}; only llama is converted")
    heads, kv_heads = field("llama.attention.head_count"), field("llama.attention.head_count_kv")
    weights = {}
    for tensor in reader.tensors:
        w = dequantize(tensor.data, tensor.tensor_type)
        if tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
            w = unpermute(w, heads if tensor.name.endswith("attn_q.weight") else kv_heads)
        weights[hf_name(tensor.name)] = torch.from_numpy(np.ascontiguousarray(w)).float()
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    special = {
        f"{k}_token_id": field(f"tokenizer.ggml.{n}_token_id")
        for k, n in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": weights["model.embed_tokens.weight"].shape[0],
        "hidden_size": field("llama.embedding_length"),
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": field("llama.context_length"),
        "rms_norm_eps": float(field("llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": float(field("llama.rope.freq_base")),
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "attention_bias": False,
        "mlp_bias": False,
        **special,
        "dtype": "float32",
    }
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (out / "generation_config.json").write_text(json.dumps(special) + "\n")
    AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name).save_pretrained(out)
