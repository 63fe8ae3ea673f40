"""The mock renders and tokenizes as transformers does with the tiny model's own files."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from scripted_policy import END, Turn, encode, render

from openforge import software

TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": 'Runs <it> & says "é"',
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}
CALL = Turn(name="bash", arguments={"command": "echo 'a' > b; é <x> \\ \"y\"", "n": 1.5, "deep": {"k": [True, None]}})
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Sys ü\n"},
    {"role": "user", "content": "hi \n there\t🙂"},
    CALL.message("c1"),
    {"role": "tool", "content": "ok\n\n", "tool_call_id": "c1"},
    {"role": "system", "content": "In between."},
    {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]},
    {"role": "assistant", "content": "done "},
    {"role": "user", "content": "again"},
]
# Run by the Python of the serving environment: tokens of each [messages, tools] as transformers gives them.
ORACLE = """
import json, sys
from pathlib import Path
from openforge.policy.tiny import tiny
from transformers import AutoTokenizer
tiny(Path(sys.argv[1]))
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
asked = json.load(sys.stdin)
ask = dict(add_generation_prompt=True, tokenize=True, return_dict=False)
print(json.dumps([tokenizer.apply_chat_template(m, tools=t, **ask) for m, t in asked]))
"""


@pytest.mark.slow
def test_prompts_are_those_of_transformers(tmp_path: Path) -> None:
    cases = [(TALK[:n], tools) for n in (2, 4, 6, 8) for tools in (None, [TOOL])]
    python = software.python_of("serve-cpu")
    asked = json.dumps([[list(map(parsed, talk)), tools] for talk, tools in cases])
    env = {"PYTHONPATH": str(software.ROOT), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"}
    command = [str(python), "-c", ORACLE, str(tmp_path / "tiny")]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    oracle = json.loads(done.stdout.splitlines()[-1])
    assert [encode(render(talk, tools)) for talk, tools in cases] == oracle


def parsed(message: dict[str, Any]) -> dict[str, Any]:
    """A message as vLLM hands it to the template: joined text parts, parsed arguments."""
    content = message["content"]
    if isinstance(content, list):
        content = "\n".join(p["text"] for p in content)
    calls = [c["function"] for c in message.get("tool_calls", [])]
    read = [{"function": {**f, "arguments": json.loads(f["arguments"])}} for f in calls]
    return {**message, "content": content, "tool_calls": read}


@pytest.mark.parametrize("spaces", [(",", ":"), (", ", ": "), (",\n", ": ")])
def test_an_echo_in_whatever_json_renders_to_what_was_sampled(spaces: tuple[str, str]) -> None:
    echo = CALL.message("renamed")
    echo["tool_calls"][0]["function"]["arguments"] = json.dumps(CALL.arguments, separators=spaces)
    prompt, after = TALK[:2], [echo, TALK[3]]
    sampled = encode(render(prompt, [TOOL])) + encode(CALL.sampled + END)
    assert encode(render(prompt + after, [TOOL]))[: len(sampled)] == sampled


def test_one_id_a_byte_and_one_a_special_token() -> None:
    # Published by the byte-level alphabet: printable characters first, in their order; then the five special tokens.
    assert encode("!A~") == [0, ord("A") - ord("!"), ord("~") - ord("!")]
    assert encode("<|im_start|><|im_end|><tool_call>") == [257, 258, 259]
    assert len(encode("é🙂\n")) == 2 + 4 + 1 and len(set(encode("".join(map(chr, range(128)))))) == 128
