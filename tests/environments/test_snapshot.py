"""What is looked at after the agent's death: commands, files, the grader's late ones; and where the grader runs."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from openforge.environments.claw_eval.evidence import TREE
from openforge.environments.claw_eval.setup import Setup, Snapshot, Tree, digest

TELL = """
import json, pathlib, sys
at = pathlib.Path(sys.argv[1])
print(json.dumps({"score": 1, "passed": True, "snapshot": json.loads((at / "snapshot.json").read_text())}))
"""
COMMAND = ("python3", "-I", "verify.py", "{evidence}")


def asked(*files: str, commands: tuple[str, ...] = ()) -> Setup:
    return Setup(snapshot=Snapshot(commands, files, 2.0))


async def looked(episode: Any, agent: str, setup: Setup, **more: Any) -> dict[str, Any]:
    done = await episode(agent, TELL, command=COMMAND, setup=setup, **more)
    assert done.status == "completed", done.message
    seen: dict[str, Any] = json.loads(done.verifier_output)["snapshot"]
    assert json.loads(done.snapshot) == seen
    return seen


async def test_files_are_kept_by_path_and_pattern(episode: Any) -> None:
    agent = "echo é > a.txt; printf '\\377' > b.bin; mkdir -p out/x; echo 1 > out/1.csv; echo 2 > out/x/2.csv"
    seen = await looked(episode, agent, asked("a.txt", "/workspace/b.bin", "out/**/*.csv", "none.txt"))
    assert seen == {
        "file:a.txt": {"encoding": "utf-8", "content": "é\n"},
        "file:/workspace/b.bin": {"encoding": "base64", "content": base64.b64encode(b"\xff").decode()},
        "file:/workspace/out/1.csv": {"encoding": "utf-8", "content": "1\n"},
        "file:/workspace/out/x/2.csv": {"encoding": "utf-8", "content": "2\n"},
        "file:none.txt": {"error": "no such file"},
    }


async def test_commands_run_in_the_work_folder_and_may_make_the_files(episode: Any) -> None:
    commands = ("cat a.txt; echo told >&2; exit 3", "cp a.txt copy.txt", "sleep 1000")
    seen = await looked(episode, "echo mine > a.txt", asked("copy.txt", commands=commands))
    assert seen[f"cmd:{commands[0]}"] == {"exit_code": 3, "stdout": "mine\n", "stderr": "told\n"}
    assert seen[f"cmd:{commands[2]}"] == {"error": "it was killed after 2 s"}
    assert seen["file:copy.txt"]["content"] == "mine\n"


@pytest.mark.parametrize("plant", ["ln -s /etc/passwd a.txt", "mkfifo a.txt", "mkdir a.txt", "ln -s /dev/zero a.txt"])
async def test_what_is_no_file_of_the_work_folder_is_not_read(episode: Any, plant: str) -> None:
    (entry,) = (await looked(episode, plant, asked("a.txt"))).values()
    assert entry in ({"error": "no such file"}, {"error": "Is a directory"})


async def test_the_agents_home_does_not_change_what_a_command_does(episode: Any) -> None:
    plant = "mkdir -p ~/.local/bin; printf '#!/bin/sh\\necho planted' > ls; chmod +x ls; cp ls ~/.local/bin/ls"
    seen = await looked(episode, plant, asked(commands=("ls",)))
    assert seen["cmd:ls"]["stdout"] == "ls\n"


async def test_late_files_enter_after_the_agent_and_before_the_snapshot(episode: Any) -> None:
    setup = Setup(snapshot=Snapshot(("sh check.sh",), (), 5.0), late=("check.sh",), local=("key.txt",))
    more = {"late/check.sh": "cat a.txt", "local/key.txt": "secret"}
    agent = "ls /workspace > a.txt; echo 'echo planted' > check.sh"
    seen = await looked(episode, agent, setup, grader=more)
    assert seen["cmd:sh check.sh"]["stdout"] == "a.txt\n", "the agent saw no grader, and its own one was replaced"
    assert seen["local_file:key.txt"] == {"encoding": "base64", "content": base64.b64encode(b"secret").decode()}


async def test_a_grader_that_needs_no_work_folder_runs_out_of_its_reach(episode: Any, tmp_path: Path) -> None:
    source = tmp_path / "lib"
    source.mkdir()
    (source / "rules.py").write_text("PASS = True\n")
    tree = Tree(str(source), "lib", digest(source))
    code = f"""
import json, os, sys
sys.path.insert(0, "{TREE}/lib")
import rules
print(json.dumps({{"score": 1, "passed": rules.PASS, "left": os.listdir("/workspace")}}))
"""
    setup = Setup(grading="companion", tree=(tree,))
    done = await episode("touch mine.txt", code, command=("{python}", "-I", "verify.py"), setup=setup)
    assert json.loads(done.verifier_output)["left"] == []
