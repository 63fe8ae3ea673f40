"""Real vLLM on CPU: what it records is what a transformers forward of the served checkpoint gives, swaps or not."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from policy_rig import HERE, kept, until

from openforge import software
from openforge.config import Server
from openforge.policy import keeper, process
from openforge.policy.lease import Endpoint, PolicyMismatch, lease
from openforge.policy.models import prepare
from openforge.policy.state import places
from openforge.policy.weights import read_checkpoint

pytestmark = pytest.mark.slow

CALLS = [
    {"seed": 1, "temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 1.0, "tools": [{"type": "function", "function": {"name": "bash", "parameters": {}}}]},
]


def serve_python(*args: str, stdin: str = "") -> str:
    env = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1"}
    argv = [str(software.python_of("serve-cpu")), str(HERE / "checkpoints.py"), *args]
    return subprocess.run(argv, env=env, input=stdin, stdout=subprocess.PIPE, text=True, check=True).stdout


def record(endpoint: Endpoint) -> list[dict[str, Any]]:
    """Chat completions as the proxy asks for them: prompt ids, response ids, logprobs."""
    out = []
    for call in CALLS:
        body = {"model": endpoint.model, "max_tokens": 24, "logprobs": True, "return_token_ids": True, **call}
        body["messages"] = [{"role": "user", "content": "Name three colours of the sky at noon."}]
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        answer = httpx.post(f"{endpoint.base_url}/chat/completions", json=body, headers=headers, timeout=120)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        logprobs = [t["logprob"] for t in choice["logprobs"]["content"]]
        assert len(logprobs) == len(choice["token_ids"])
        out.append({"prompt": answer.json()["prompt_token_ids"], "response": choice["token_ids"], "logprobs": logprobs})
    return out


def differences(pairs: list[tuple[list[dict[str, Any]], Path]]) -> list[float]:
    """For each (recorded calls, folder), the largest difference to a transformers forward of the folder."""
    asked = [[str(folder), r["prompt"], r["response"]] for recorded, folder in pairs for r in recorded]
    scored = iter(json.loads(serve_python("score", stdin=json.dumps(asked))))
    out = []
    for recorded, _ in pairs:
        both = [(r["logprobs"], next(scored)) for r in recorded]
        out.append(max(abs(a - b) for mine, theirs in both for a, b in zip(mine, theirs, strict=True)))
    return out


def engine(state: Path) -> process.Identity:
    """vLLM's engine process."""
    (place,) = places(state)
    server = place.read()[1]
    assert server is not None
    named = [w for w in process.session_of(server) if b"EngineCore" in Path(f"/proc/{w.pid}/cmdline").read_bytes()]
    return named[0]


def test_a_killed_and_a_hung_engine_come_back_under_the_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "BEAT_SECONDS", 1.0)
    monkeypatch.setattr(keeper, "HEARTBEAT_SECONDS", 20.0)
    base, state = tmp_path / "base", tmp_path / "state"
    prepare("tiny-random", base)
    cfg = Server(max_model_len=512, max_num_seqs=8)
    with subprocess.Popen(["sleep", "600"]) as child:
        owner = process.identity(child.pid)
        assert owner is not None
        monkeypatch.setenv("OPENFORGE_OWNER", str(owner))
        with kept(cfg, base, state, software.ROOT, owner) as (endpoint, keeping):
            headers = {"Authorization": f"Bearer {endpoint.api_key}"}
            body = {"model": endpoint.model, "prompt": "a", "max_tokens": 1}

            def answers() -> bool:
                try:
                    answer = httpx.post(f"{endpoint.base_url}/completions", json=body, headers=headers, timeout=2)
                except httpx.HTTPError:
                    return False
                return answer.status_code == 200

            for number in (signal.SIGKILL, signal.SIGSTOP):
                assert answers()
                before, server = engine(state), keeping.server
                os.kill(before.pid, number)
                until(lambda: not process.alive(before), "the end of the broken engine", 300)  # noqa: B023
                # Not only an answer: it comes before the keeper's own probe of the new server has one.
                until(lambda: keeping.server not in (None, server), "another server", 300)  # noqa: B023
                until(answers, "an answer at the same address", 300)
                assert engine(state) != before
    shutil.rmtree(base)


@pytest.mark.parametrize("model", ["tiny-random", "smollm2-135m-instruct"])
def test_recorded_logprobs_are_the_served_checkpoints_over_swaps(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENFORGE_OWNER", str(process.this()))
    base = tmp_path / "base"
    prepare(model, base)
    assert json.loads((base / "config.json").read_text())["tie_word_embeddings"] is False
    # What a tied checkpoint does is a matter of the server and not of the model: shown once, on the small one.
    names = ["1", "2", *(["tied"] if model == "tiny-random" else [])]
    serve_python("perturb", str(base), *names)
    folders, tied = [base, tmp_path / "1", tmp_path / "2"], tmp_path / "tied"
    cfg = Server(
        max_model_len=512,
        max_num_seqs=8,
        chat_template="openforge/policy/hermes.jinja",
        tool_call_parser="hermes",
    )

    def take(folder: Path) -> Any:
        version = read_checkpoint(folder)["policy_version"]
        return lease(cfg, folder, version, state_dir=tmp_path / "state", job="test")

    try:
        servers, recorded = set(), []
        for folder in folders:
            with take(folder) as endpoint:
                recorded.append(record(endpoint))
                servers |= {place.read() for place in places(tmp_path / "state")}
        assert len(servers) == 1, "the weights were swapped in one server"
        # A checkpoint without a head of its own leaves vLLM's CPU head as it was, with HTTP 200 all along.
        if "tied" in names:
            with pytest.raises(PolicyMismatch, match="serves other weights"), take(tied):
                pass
    finally:
        for place in places(tmp_path / "state"):
            keeper, server = place.read()
            for who in filter(None, (keeper, server)):
                process.end_session(who)
    # The same measure against the checkpoint before tells them apart: it would have seen old weights.
    own = list(zip(recorded, folders, strict=True))
    stale = list(zip(recorded[1:], folders[:-1], strict=True))
    found = differences(own + stale)
    assert max(found[:3]) < 1e-3, found
    assert min(found[3:]) > 1e-2, found
    for folder in folders:  # gigabytes that pytest would keep
        shutil.rmtree(folder)
