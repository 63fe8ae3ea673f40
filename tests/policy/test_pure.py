"""The parts of the policy that need no server: command lines, identities, digests, the probe."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from openforge.config import Server
from openforge.policy import process
from openforge.policy.gguf_model import hf_name
from openforge.policy.keeper import memory_need
from openforge.policy.prepare import ModelError, check_folder, prepare
from openforge.policy.probe import PolicyMismatch, compare, probe_ids
from openforge.policy.server import command
from openforge.policy.state import server_key
from openforge.policy.weights import CheckpointError, read_checkpoint, weights_sha256, write_checkpoint


def test_command_on_cpu() -> None:
    cfg = Server(
        max_model_len=4096,
        kv_cache_gb=2,
        chat_template="config/t.jinja",
        tool_call_parser="hermes",
    )
    base = {
        "PATH": "/bin",
        "OPENBLAS_CORETYPE": "x",
        "OPENBLAS_L2_SIZE": "1",
        "OMP_NUM_THREADS": "2",
        "MKL_NUM_THREADS": "2",
    }
    argv, env = command(cfg, Path("/m"), 20001, Path("/v/python"), api_key="k", root=Path("/r"), base=base)
    assert " ".join(argv) == (
        "/v/python -m vllm.entrypoints.openai.api_server --model /m --served-model-name policy --host 127.0.0.1 "
        "--port 20001 --dtype float32 --max-model-len 4096 --max-num-seqs 64 --block-size 32 --generation-config vllm "
        "--logprobs-mode processed_logprobs --no-enable-log-requests --disable-uvicorn-access-log --enforce-eager "
        "--no-enable-chunked-prefill --max-num-batched-tokens 4096 --chat-template /r/config/t.jinja "
        "--enable-auto-tool-choice --tool-call-parser hermes"
    )
    assert env == {
        "PATH": "/bin",
        "VLLM_API_KEY": "k",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


def test_command_on_gpu() -> None:
    cfg = Server(device="gpu", dtype="bfloat16", tensor_parallel_size=2, max_num_seqs=128, block_size=16)
    argv, env = command(cfg, Path("/m"), 20001, Path("/v/python"), api_key="k", base={"OPENBLAS_CORETYPE": "x"})
    assert " ".join(argv) == (
        "/v/python -m vllm.entrypoints.openai.api_server --model /m --served-model-name policy --host 127.0.0.1 "
        "--port 20001 --dtype bfloat16 --max-model-len 2048 --max-num-seqs 128 --block-size 16 "
        "--generation-config vllm --logprobs-mode processed_logprobs --no-enable-log-requests "
        "--disable-uvicorn-access-log --tensor-parallel-size 2"
    )
    assert env == {
        "OPENBLAS_CORETYPE": "x",
        "VLLM_API_KEY": "k",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }


def test_prefill_budget_is_never_below_the_window_or_the_sequences() -> None:
    for cfg, tokens in ((Server(max_model_len=512), "2048"), (Server(max_num_seqs=3000), "3000")):
        argv, _ = command(cfg, Path("/m"), 1, Path("/p"), api_key="k", base={})
        assert argv[argv.index("--max-num-batched-tokens") + 1] == tokens


def test_identity_is_of_one_process_and_not_of_its_pid() -> None:
    child = subprocess.Popen(["sleep", "600"])
    try:
        who = process.identity(child.pid)
        assert who is not None and process.parse(str(who)) == who
        # Field 22 of /proc/PID/stat; `sleep` has no space in its name.
        assert who.started == int(Path(f"/proc/{child.pid}/stat").read_text().split()[21])
        assert process.alive(who)
        assert not process.alive(who._replace(started=who.started - 1))
    finally:
        child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not process.alive(who), "a zombie is no live process"
    child.wait()
    assert not process.alive(who)
    for bad in ("12", "12:", "a:1", ""):
        with pytest.raises(ValueError, match="PID:STARTTIME"):
            process.parse(bad)


def test_end_session_ends_what_ignores_the_signal_and_spares_a_strangers_session() -> None:
    script = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "print(child.pid, flush=True); time.sleep(600)\n"
    )
    leader = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert leader.stdout is not None
    grandchild = process.identity(int(leader.stdout.readline()))
    who = process.identity(leader.pid)
    assert who is not None and grandchild is not None
    process.end_session(who._replace(started=who.started - 1), grace=0.1)
    assert process.alive(who) and process.alive(grandchild), "that session is another's"
    process.end_session(who, grace=0.1)
    assert not process.alive(who) and not process.alive(grandchild)
    assert leader.wait() == -signal.SIGKILL


def test_session_is_found_and_ended_after_its_leader_died() -> None:
    script = "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid, flush=True); sys.stdin.read()"
    leader = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert leader.stdout is not None
    child, who = process.identity(int(leader.stdout.readline())), process.identity(leader.pid)
    assert child is not None and who is not None
    assert leader.stdin is not None
    leader.stdin.close()
    leader.wait(30)
    assert process.session_of(who) == [child]
    process.end_session(who, grace=5)
    assert not process.alive(child)


def test_weights_digest_covers_names_and_bytes(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="safetensors"):
        weights_sha256(tmp_path)
    (tmp_path / "b.safetensors").write_bytes(b"two")
    (tmp_path / "a.safetensors").write_bytes(b"one")
    (tmp_path / "config.json").write_text("{}")
    one, two = hashlib.sha256(b"one").digest(), hashlib.sha256(b"two").digest()
    expected = hashlib.sha256(b"a.safetensors\0" + one + b"b.safetensors\0" + two).hexdigest()
    assert weights_sha256(tmp_path) == expected
    with pytest.raises(CheckpointError, match=r"checkpoint\.json"):
        read_checkpoint(tmp_path)
    write_checkpoint(tmp_path, 3, model="m")
    assert read_checkpoint(tmp_path) == {
        "iteration": 3,
        "policy_version": f"3@{expected}",
        "sha256": expected,
        "model": "m",
    }


def test_probe_prompt_is_fixed() -> None:
    # 7919 i^2 + 104729 i + 17 mod 320, by hand: 17; 112665 mod 320 = 25; 241151 mod 320 = 191
    ids = probe_ids(320)
    assert ids[:3] == [17, 25, 191] and len(ids) == 32
    assert all(0 <= i < 320 for i in ids) and len(set(ids)) > 20
    # No image belongs to a placeholder of one.
    assert probe_ids(320, {17, 25, 24})[:3] == [16, 23, 191]


@pytest.mark.parametrize(
    ("served", "dtype", "fits"),
    [
        ([-1.0, -2.0005], "float32", True),
        ([-1.0, -2.002], "float32", False),
        ([-1.2, -2.0], "bfloat16", True),
        ([-1.4, -2.0], "bfloat16", False),
        ([float("nan"), -2.0], "bfloat16", False),
        ([-1.0, float("-inf")], "float32", False),
        ([-1.0], "float32", False),
    ],
)
def test_probe_comparison(served: list[float], dtype: str, fits: bool) -> None:
    if fits:
        assert compare([-1.0, -2.0], served, dtype, "p") < 0.3
    else:
        with pytest.raises(PolicyMismatch, match=r"^p: "):
            compare([-1.0, -2.0], served, dtype, "p")


def _policy(folder: Path, **config: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64, **config}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"x" * 1000)
    return folder


def test_server_key_knows_what_a_running_server_cannot_change(tmp_path: Path) -> None:
    a = _policy(tmp_path / "a", transformers_version="5.19.0")
    b = _policy(tmp_path / "b", transformers_version="5.10.4")
    (b / "model.safetensors").write_bytes(b"y")
    key = server_key(Server(), a)
    assert key == server_key(Server(warm=False), b), "other weights, same server"
    (tmp_path / "t.jinja").write_text("one")
    templated = Server(chat_template="t.jinja")
    others = {server_key(templated, a, tmp_path)}
    (tmp_path / "t.jinja").write_text("two")
    others |= {server_key(templated, a, tmp_path), server_key(Server(max_model_len=4096), a)}
    others.add(server_key(Server(), _policy(tmp_path / "c", hidden_size=128)))
    (b / "tokenizer.json").write_text('{"other": 1}')
    others.add(server_key(Server(), b))
    assert len(others) == 5 and key not in others


def test_memory_need_counts_cache_and_weights(tmp_path: Path) -> None:
    a = _policy(tmp_path / "a")
    more = memory_need(Server(kv_cache_gb=3), a) - memory_need(Server(kv_cache_gb=1), a)
    assert more == 2 * 2**30
    small = memory_need(Server(), a)
    (a / "more.safetensors").write_bytes(b"x" * 5000)
    assert memory_need(Server(), a) - small == 10000


@pytest.mark.parametrize(
    ("missing", "named"),
    [("config.json", "config.json"), ("model.safetensors", "weights"), ("tokenizer.json", "a tokenizer")],
)
def test_folder_that_lacks_a_part_is_refused_in_one_sentence(tmp_path: Path, missing: str, named: str) -> None:
    folder = _policy(tmp_path / "m")
    assert check_folder(folder) == [folder / "model.safetensors"]
    (folder / missing).unlink()
    with pytest.raises(ModelError, match=f"model folder {folder} lacks {named}") as e:
        check_folder(folder)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("some/model", "names no revision"),
        ("some/model@", "names no revision"),
        ("no_such_folder", "is no folder, no hub id@revision and none of smollm2-135m-instruct, tiny-random"),
        ("/no/such", "is no folder"),
    ],
)
def test_model_that_is_nothing_is_refused_and_leaves_nothing(tmp_path: Path, model: str, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        prepare(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_gguf_names() -> None:
    assert hf_name("blk.12.attn_output.weight") == "model.layers.12.self_attn.o_proj.weight"
    assert hf_name("blk.0.ffn_norm.weight") == "model.layers.0.post_attention_layernorm.weight"
    assert hf_name("token_embd.weight") == "model.embed_tokens.weight"
