"""The examples of docs/add-an-environment.md, as they stand there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from stub_harness import End, StubHarness

from openforge.environments import create_env, llm_args
from openforge.sandboxes import LocalBackend

DOC = (Path(__file__).resolve().parents[2] / "docs" / "add-an-environment.md").read_text()


@pytest.mark.parametrize(("said", "score"), [("42", 1.0), ("41", 0.0)])
async def test_the_environment_gives_its_verdict(
    backend: LocalBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, score: float
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", DOC, re.S)
    package = f"my_package_{said}"
    (tmp_path / package).mkdir()
    (tmp_path / package / "my_env.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    harness = StubHarness()
    sandbox = await backend.create("e1", binds=harness.binds())
    closed: list[bool] = []

    async def session(exited: bool) -> End:
        closed.append(exited)
        return End()

    task: dict[str, Any] = {"instruction": f"echo {said}", "payload": json.dumps({"right": "42"})}
    result = await create_env(f"{package}.my_env", sandbox).run(
        task=task | {"sampling": {"max_tokens": 16}},
        llm_args=llm_args("http://127.0.0.1:8080/s/e1", "key", "policy", 2048),
        harness=harness,
        harness_options={},
        limits={"turns": 3, "tokens": None, "seconds": 30.0},
        session=session,
    )
    assert (result.status, result.message, closed) == ("completed", None, [True])
    assert json.loads(result.verifier_output or "") == {"score": score, "passed": score == 1.0}
