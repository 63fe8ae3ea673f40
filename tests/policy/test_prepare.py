"""Preparing models in the serve environment (torch, transformers, gguf)."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from policy_rig import HERE

from openforge import software
from openforge.policy.models import ModelError, prepare
from openforge.policy.weights import read_checkpoint, weights_sha256

pytestmark = pytest.mark.slow

MAKE_TIED = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(1)
c = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                tie_word_embeddings=True)
LlamaForCausalLM(c).bfloat16().save_pretrained(sys.argv[1], max_shard_size=sys.argv[2])
"""
COMPARE = """
import sys, torch
from transformers import AutoModelForCausalLM as A
a, b = (A.from_pretrained(p, dtype=torch.float32) for p in sys.argv[1:3])
ids = torch.arange(20)[None]
assert not b.config.tie_word_embeddings
assert b.lm_head.weight.data_ptr() != b.model.embed_tokens.weight.data_ptr()
print((a(ids).logits - b(ids).logits).abs().max().item())
"""
# llama.cpp's rotation of neighbouring rows, written out; transformers' forward rotates the two halves.
UNPERMUTE = """
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from openforge.policy.gguf_model import unpermute
torch.manual_seed(0)
heads, d, hidden, T = 3, 8, 24, 5
w = torch.randn(heads * d, hidden); x = torch.randn(T, hidden)
angle = torch.arange(T)[:, None] / 10000 ** (torch.arange(0, d, 2) / d)
q = (x @ w.T).view(T, heads, d)
even, odd = q[..., 0::2], q[..., 1::2]; c, s = angle.cos()[:, None], angle.sin()[:, None]
rotated = torch.stack([even * c - odd * s, even * s + odd * c], -1).flatten(-2)
w2 = torch.from_numpy(unpermute(w.numpy(), heads))
q2 = (x @ w2.T).view(1, T, heads, d).transpose(1, 2)
full = torch.cat([angle, angle], -1)[None]
r2, _ = apply_rotary_pos_emb(q2, q2, full.cos(), full.sin())
# Attention sees dot products only: the two orders of a head's dimensions must give the same ones.
mine, theirs = rotated.transpose(0, 1), r2[0]
print((mine @ mine.mT - theirs @ theirs.mT).abs().max().item())
"""

SEE = """
import sys, torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor
see, model = AutoProcessor.from_pretrained(sys.argv[1]), AutoModelForImageTextToText.from_pretrained(sys.argv[1])
talk = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it?"}]}]
text = see.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
said = []
for grey in (0, 200):
    given = see(text=[text], images=[Image.new("RGB", (640, 360), (grey, 90, 30))], return_tensors="pt")
    said.append(model(**given).logits[0, -1].log_softmax(-1))
print(text.replace("\\n", "/"), int((given["input_ids"] == model.config.image_token_id).sum()),
      float((said[0] - said[1]).abs().max()), sep="\\t")
"""


def serve_python(code: str, *args: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1"}
    argv = [str(software.python_of("serve-cpu")), "-c", code, *args]
    return subprocess.run(argv, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout


def test_tied_folder_in_shards_is_untied_and_computes_the_same(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    serve_python(MAKE_TIED, str(source), "5KB")
    assert len(list(source.glob("*.safetensors"))) > 1
    (source / "tokenizer.json").write_text('{"kept": "as it is"}')
    (source / "pytorch_model.bin").write_bytes(b"not copied")
    out.mkdir()
    (out / "stale").touch()
    prepare(str(source), out)
    # bf16 -> fp32 is exact
    assert float(serve_python(COMPARE, str(source), str(out))) == 0
    assert (out / "tokenizer.json").read_text() == '{"kept": "as it is"}'
    assert not (out / "stale").exists() and not (out / "pytorch_model.bin").exists()
    checkpoint = read_checkpoint(out)
    assert checkpoint["source"] == str(source)
    assert checkpoint["policy_version"] == f"0@{weights_sha256(out)}"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]


def test_the_tiny_vision_model_sees(tmp_path: Path) -> None:
    prepare("tiny-random-vl", tmp_path / "vl")
    text, tokens, apart = serve_python(SEE, str(tmp_path / "vl")).rstrip("\n").split("\t")
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    assert text == f"<|im_start|>user/{image}what is it?<|im_end|>/<|im_start|>assistant/"
    # 640 x 360 becomes 640 x 352, 20 x 11 patches of 32 x 32 pixels each.
    assert int(tokens) == 220 and float(apart) > 0.1
    shown = {261, 262, 259, 260}
    assert not shown & set(json.loads((tmp_path / "vl/probe.json").read_text())["ids"])


def test_gguf_query_and_key_rows_are_put_in_transformers_order() -> None:
    assert float(serve_python(UNPERMUTE)) < 1e-4


def test_hub_id_that_cannot_be_fetched_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    with pytest.raises(ModelError, match="'some/model@0123abc' could not be fetched from the hub") as e:
        prepare("some/model@0123abc", tmp_path / "out")
    assert "\n" not in str(e.value) and "Traceback" not in str(e.value)
    assert not (tmp_path / "out").exists()
