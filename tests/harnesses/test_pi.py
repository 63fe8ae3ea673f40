"""pi for real, against scripted streamed answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from capture import Capture, bash_call, text

from openforge import harnesses
from openforge.sandboxes import LocalBackend

pytestmark = pytest.mark.slow


async def test_pi_calls_a_tool_natively_and_answers(backend: LocalBackend, context: Any) -> None:
    pi = harnesses.get("pi")
    capture = Capture([bash_call("echo from pi > made.txt; cat note.txt"), text("I am done.")])
    sandbox = await backend.create("e1", binds=pi.binds())
    assert await pi.place(sandbox) == "0.73.1"
    await sandbox.upload_content(b"what the note says\n", "note.txt")
    # An instruction that pi's own command line would take for a file and an option.
    ctx = context(base_url=await sandbox.route(capture), instruction="@note.txt --help me: read the note.")
    ended = await pi.run(sandbox, ctx)
    output = await pi.output(sandbox, ctx, ended)
    assert (ended.exit_code, output.error, output.answer) == (0, None, "I am done."), ended.log.decode()
    assert await sandbox.download_content("made.txt") == b"from pi\n"

    first, second = (json.loads(b) for b in capture.bodies["e1"])
    assert first["stream"] is True and first["model"] == "policy"
    assert {t["function"]["name"] for t in first["tools"]} == {"read", "bash", "edit", "write"}
    assert first["messages"][0]["role"] == "system"
    assert first["messages"][-1]["content"] == [{"type": "text", "text": ctx.instruction}] or (
        first["messages"][-1]["content"] == ctx.instruction
    )
    assert second["messages"][: len(first["messages"])] == first["messages"]
    assert second["messages"][-1]["role"] == "tool"
    assert "what the note says" in json.dumps(second["messages"][-1])
    assert capture.keys == {"Bearer secret-key"}
    await capture.close()


async def test_an_error_of_the_model_server_is_an_error_though_pi_exits_with_0(
    backend: LocalBackend, context: Any
) -> None:
    pi = harnesses.get("pi")
    capture = Capture([text("never asked for")])
    sandbox = await backend.create("e1", binds=pi.binds())
    base_url = await sandbox.route(capture)
    ended = await pi.run(sandbox, context(base_url=f"{base_url}/nowhere"))
    output = pi.read_output(ended, None)
    assert ended.exit_code == 0
    assert output.error is not None and "404" in output.error
    await capture.close()
