"""A session's key stands in nothing that is kept of an episode."""

from __future__ import annotations

import json

from openforge.environments import EnvCallResult
from openforge.rollout.attempt import hide


def test_the_key_is_hidden_in_what_tools_services_and_files_say() -> None:
    key = "sk-of-one-episode"
    told = json.dumps({"text": f"my key is {key}"})
    result = EnvCallResult(
        answer=key,
        audit=told,
        snapshot=told,
        verifier_output=told,
        harness_log=key.encode(),
        dispatches=[{"tool": "add", "arguments": told, "status": 200, "response": told, "latency": 0.1}],
    )
    hide(result, key)
    assert key not in repr(result)
    assert result.dispatches is not None and result.dispatches[0]["status"] == 200
    assert json.loads(result.dispatches[0]["arguments"]) == {"text": "my key is [session key]"}
