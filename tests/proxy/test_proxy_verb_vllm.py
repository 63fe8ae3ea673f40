"""`openforge proxy` before a real vLLM with the tiny random model: what the server tells is what is recorded."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from test_proxy_verb import Verb, exported

from openforge import cli
from openforge.config import Server as ServerConfig
from openforge.policy.models import prepare
from openforge.policy.server import Server
from openforge.policy.weights import read_checkpoint

pytestmark = pytest.mark.slow


def test_window_name_and_root_are_the_servers_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare("tiny-random", tmp_path / "tiny")
    version = read_checkpoint(tmp_path / "tiny")["policy_version"]
    config = ServerConfig(max_model_len=512, max_num_seqs=16)
    server = Server.start(config, tmp_path / "tiny", version, log=tmp_path / "vllm.log")
    url = f"http://127.0.0.1:{server.port}/v1"
    try:
        words = ("--upstream", url, "--key-env", "VLLM_KEY", "--session", "try", "--max-tokens", "8")
        verb = Verb(*words, "--port", "0", "--journal", str(tmp_path / "calls"), VLLM_KEY=server.api_key)
        assert verb.lines[0] == f"recording policy at {url} (vllm, 512 tokens)\n"
        env = exported(tmp_path / "calls" / "try.env")
        headers = {"authorization": f"Bearer {env['OPENAI_API_KEY']}"}
        body = {"model": "any", "messages": [{"role": "user", "content": "hi"}]}
        answer = httpx.post(
            f"{env['OPENAI_BASE_URL']}/chat/completions", headers=headers, json=body, timeout=120
        ).json()
        close = f"{verb.base}/sessions/try/close"
        control = {"authorization": f"Bearer {verb.key}"}
        assert httpx.post(close, headers=control, json={"harness_exited": True}).status_code == 200
        assert verb.end()[0] == 0
    finally:
        server.stop()
    assert cli.main(["sql", "--journal", str(tmp_path / "calls"), "select * from calls", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["trainable"], row["reason"], row["policy_version"]) == (True, None, f"policy@{tmp_path / 'tiny'}")
    assert row["prompt_tokens"] == len(row["prompt_suffix_ids"]) == answer["usage"]["prompt_tokens"]
    assert len(row["response_token_ids"]) == len(row["logprobs"]) == answer["usage"]["completion_tokens"] <= 8
