"""Episodes of claw_eval in real sandboxes; the agent is a shell script (a stub harness), hostile where it can be."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from stub_harness import End

from openforge.environments import UnknownEnvironment, create_env
from openforge.rollout.status import ENDS

# Passes if /workspace/result.txt holds the expected text; reads the expected text from its own folder.
CHECK = """
import json, pathlib
expected = pathlib.Path("expected.txt").read_text()
result = pathlib.Path("/workspace/result.txt")
passed = result.is_file() and result.read_text() == expected
print("not the verdict")
print(json.dumps({"score": float(passed), "passed": passed, "left": sorted(p.name for p in result.parent.iterdir())}))
"""


def verdict(result: Any) -> Any:
    assert ENDS[result.status].verified, (result.status, result.message)
    return json.loads(result.verifier_output)


async def test_a_solved_task_passes_and_doing_nothing_does_not(episode: Any) -> None:
    solved = await episode("cat in.txt in.txt > result.txt", CHECK, files={"in.txt": "ab"}, expected="abab")
    assert (solved.status, solved.message, solved.harness_exit) == ("completed", None, 0)
    assert verdict(solved) == {"score": 1.0, "passed": True, "left": ["in.txt", "result.txt"]}
    assert solved.exited is True and solved.harness_version == "1"
    assert set(solved.seconds) == {"setup", "agent", "verify"}
    nothing = await episode("true", CHECK, files={"in.txt": "ab"}, expected="abab")
    assert nothing.status == "completed" and verdict(nothing)["score"] == 0.0


async def test_files_stand_in_folders_with_their_modes_before_the_agent_starts(episode: Any) -> None:
    done = await episode("stat -c %a a/b/in.txt > result.txt", CHECK, files={"a/b/in.txt": "x"}, expected="644\n")
    assert verdict(done)["passed"] is True


async def test_the_answer_is_handed_to_a_verifier_that_asks_for_it(episode: Any) -> None:
    code = "import json, sys\nanswer = open(sys.argv[1]).read()\n"
    code += "print(json.dumps({'score': 1, 'passed': answer == 'hi\\n'}))"
    done = await episode("echo hi", code, command=("python3", "-I", "verify.py", "{answer}"))
    assert done.answer == "hi\n" and verdict(done)["passed"] is True


DAEMON = """
cat > /tmp/watch.py <<'END'
import glob, os, shutil, time
for signal in range(1, 65):
    try:
        import signal as s; s.signal(signal, s.SIG_IGN)
    except (OSError, ValueError): pass
open("/workspace/watching", "w").close()
while True:
    for path in glob.glob("/tmp/verifier*/*") + glob.glob("/grader*/*"):
        shutil.copy(path, "/workspace/stolen-" + os.path.basename(path))
    open("/workspace/beat", "a").write(".")
    time.sleep(0.01)
END
setsid python3 /tmp/watch.py > /dev/null 2>&1 < /dev/null &
while [ ! -e /workspace/watching ]; do :; done
"""


async def test_a_daemon_of_the_agent_is_dead_before_the_verifier_enters(episode: Any) -> None:
    slow = CHECK.replace("passed =", "import time; time.sleep(0.3)\npassed =")
    done = await episode(DAEMON, slow, expected="secret answer")
    assert verdict(done)["passed"] is False
    assert verdict(done)["left"] == ["beat", "watching"]
    beats = await done.sandbox.download_content("beat")
    ps = await done.sandbox.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    assert b"watch.py" not in ps.stdout
    assert await done.sandbox.download_content("beat") == beats


@pytest.mark.parametrize(
    "plant",
    [
        "ln -s /proc/self/cwd/expected.txt result.txt",
        "ln -s /proc/self/cwd x; ln -s x/expected.txt result.txt",
        "ln -s ../proc/self/cwd/expected.txt result.txt; chmod 500 .",
        "mkdir d; ln -s /proc/self/cwd/expected.txt d/r; chmod 000 d; ln -s d/r result.txt",
        "for i in $(seq 9); do mkdir -p /tmp/verifier-$i; done; ln -s /tmp result.txt",
    ],
)
async def test_a_planted_link_never_leads_to_the_expected_result(episode: Any, plant: str) -> None:
    done = await episode(plant, CHECK, expected="secret answer")
    assert verdict(done)["passed"] is False
    # Only the link was the trick: the verifier does pass who writes the text.
    honest = await episode("printf 'secret answer' > result.txt", CHECK, expected="secret answer")
    assert verdict(honest)["passed"] is True


async def test_links_inside_the_work_folder_stay(episode: Any) -> None:
    done = await episode("echo -n ab > a; ln -s a result.txt", CHECK, expected="ab")
    assert verdict(done)["passed"] is True


async def test_a_named_pipe_does_not_hold_the_verifier(episode: Any) -> None:
    code = CHECK.replace("result.is_file()", "result.exists()")
    done = await episode("mkfifo result.txt", code, expected="x", verifier_seconds=10)
    assert verdict(done)["passed"] is False


PASS = 'print(\'{\\"score\\": 1.0, \\"passed\\": true}\')'


@pytest.mark.parametrize(
    "command", [("python3", "-I", "verify.py"), ("python3", "verify.py"), ("bash", "-c", "python3 verify.py")]
)
async def test_planted_modules_and_start_files_are_not_run(episode: Any, command: tuple[str, ...]) -> None:
    plant = f"""
for where in . $HOME /tmp; do
  for name in json pathlib sitecustomize usercustomize; do echo "{PASS}; raise SystemExit" > $where/$name.py; done
done
mkdir -p $HOME/.local/lib/python3.11/site-packages $HOME/bin
cp usercustomize.py $HOME/.local/lib/python3.11/site-packages/
printf '#!/bin/sh\\necho planted\\n' > python3; chmod +x python3; cp python3 $HOME/bin/; cp python3 /tmp/
echo 'echo planted' > $HOME/.bashrc; cp $HOME/.bashrc $HOME/.bash_profile
"""
    done = await episode(plant, CHECK, command=command, expected="secret answer")
    assert verdict(done)["passed"] is False


async def test_an_agent_out_of_time_is_killed_verified_and_rewarded(episode: Any) -> None:
    done = await episode("echo -n ab > result.txt; sleep 1000", CHECK, expected="ab", seconds=1.0)
    assert (done.status, done.harness_exit, done.exited) == ("agent_timeout", None, False)
    assert done.message == "the harness was killed after 1 s"
    assert verdict(done)["score"] == 1.0


async def test_a_harness_error_is_verified_and_rewarded(episode: Any) -> None:
    done = await episode("echo -n ab > result.txt; exit 3", CHECK, expected="ab")
    assert (done.status, done.harness_exit, done.exited) == ("agent_error", 3, True)
    assert verdict(done)["score"] == 1.0


async def test_what_the_proxy_says_comes_first(episode: Any) -> None:
    spent = await episode("exit 3", CHECK, expected="ab", end=End(budget_exhausted=True))
    assert spent.status == "budget_exhausted" and verdict(spent)["score"] == 0.0
    lost = await episode("exit 3", CHECK, end=End(budget_exhausted=True, policy_failed="no answer in 60 s"))
    assert (lost.status, lost.message) == ("policy_failed", "no answer in 60 s")
    assert lost.verifier_output is None and not ENDS[lost.status].verified and "verify" not in lost.seconds


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise ValueError('broken check')", "the verifier exited with code 1: .*ValueError: broken check"),
        ('import os; print(\'{"score": 1, "passed": true}\', flush=True); os.abort()', "exited with code -6"),
        ("print()", "printed no line"),
        ("print('all good')", "is not JSON"),
        ('print(\'{"score": 2, "passed": true}\')', "the verifier's score is 2"),
        ("print('{\"score\": 1}')", "the verifier's passed is None"),
    ],
)
async def test_a_broken_verifier_is_no_reward_of_0(episode: Any, code: str, message: str) -> None:
    done = await episode("true", code)
    assert done.status == "verifier_failed" and done.verifier_output is None
    assert re.search(message, done.message, re.DOTALL)


async def test_a_verifier_out_of_time_is_no_reward_of_0(episode: Any) -> None:
    done = await episode("true", "import time; time.sleep(1000)", verifier_seconds=1.0)
    assert (done.status, done.verifier_output) == ("verifier_timeout", None)
    assert done.message == "the verifier was killed after 1 s"


def test_an_environment_that_does_not_exist_is_named() -> None:
    with pytest.raises(UnknownEnvironment, match=r"'no_such': there is no module openforge\.environments\.no_such"):
        create_env("no_such", None)  # type: ignore[arg-type]
    with pytest.raises(UnknownEnvironment, match=r"json/decoder\.py has no create_env\(sandbox\)"):
        create_env("json.decoder", None)  # type: ignore[arg-type]
