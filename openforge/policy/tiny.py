"""The bundled models with random weights, always the same ones: for tests and for trying a configuration out.

Runs in a serve environment (torch, transformers, tokenizers).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = Path(__file__).with_name("hermes.jinja")
# The same, with images in what users and tools say.
CHAT_TEMPLATE_IMAGES = Path(__file__).with_name("hermes_images.jinja")
SOURCE = "random weights, seed 0"
_TURNS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def _tokenizer(special: Sequence[str], template: Path, window: int) -> Any:
    """A byte-level tokenizer without merges, with `special` tokens and those of Hermes-style tool calls."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytelevel = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    bytelevel.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytelevel.decoder = decoders.ByteLevel()
    bytelevel.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in special])
    bytelevel.add_tokens([AddedToken(s, special=False, normalized=False) for s in ("<tool_call>", "</tool_call>")])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytelevel, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=window
    )
    tokenizer.chat_template = template.read_text()
    return tokenizer


def _text(tokenizer: Any) -> dict[str, Any]:
    """What both models' configurations say of the tokenizer and the window."""
    return {
        "vocab_size": (len(tokenizer) + 63) // 64 * 64,
        "max_position_embeddings": tokenizer.model_max_length,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }


def tiny(out: Path) -> str:
    """A Llama of 3.3 M parameters; returns where it came from."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _tokenizer(_TURNS, CHAT_TEMPLATE, 4096)
    torch.manual_seed(0)
    config = LlamaConfig(
        **_text(tokenizer),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(out)
    tokenizer.save_pretrained(out)
    return SOURCE


def tiny_vl(out: Path) -> str:
    """A Qwen3-VL of 0.8 M parameters with the image processor of the published ones; returns where it came from."""
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    tokenizer = _tokenizer((*_TURNS, *_VISION), CHAT_TEMPLATE_IMAGES, 8192)
    torch.manual_seed(0)
    text = {
        **_text(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "tie_word_embeddings": False,
        # Large enough that an image makes a difference to what is said of it.
        "initializer_range": 0.1,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_section": [12, 10, 10],
            "mrope_interleaved": True,
        },
    }
    patches = {"patch_size": 16, "temporal_patch_size": 2}
    vision = {
        **patches,
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": 128,
        "spatial_merge_size": 2,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [0],
        "initializer_range": 0.1,
    }
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(_VISION))
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    )
    model = Qwen3VLForConditionalGeneration(config).float()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    processor = {
        **patches,
        "merge_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "processor_class": "Qwen3VLProcessor",
    }
    kinds = {
        "preprocessor_config.json": {
            "size": {"shortest_edge": 65536, "longest_edge": 16777216},
            "image_processor_type": "Qwen2VLImageProcessorFast",
        },
        # Without one Qwen3-VL's processor cannot be made, whether videos come or not.
        "video_preprocessor_config.json": {
            "size": {"shortest_edge": 4096, "longest_edge": 25165824},
            "video_processor_type": "Qwen3VLVideoProcessor",
        },
    }
    for name, kind in kinds.items():
        (out / name).write_text(json.dumps(processor | kind, indent=1) + "\n")
    return SOURCE
