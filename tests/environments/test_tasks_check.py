"""`openforge tasks check` on the three formats, and the agents that tasks bring, in real sandboxes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from openforge import cli

SAMPLES = Path(__file__).parent / "samples"
VERIFY = """\
import json, pathlib, sys
work = pathlib.Path(sys.argv[1])
done = (work / "out.txt").exists() and (work / "out.txt").read_text() == "42"
print(json.dumps({"score": float(done), "passed": done}))
"""


def checked(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str]]:
    code = cli.main(["tasks", "check", *arguments])
    out, err = capsys.readouterr()
    assert err == ""
    return code, out.splitlines()


@pytest.fixture
def task(tmp_path: Path) -> Path:
    base = tmp_path / "answer"
    (base / "verifier").mkdir(parents=True)
    (base / "agents").mkdir()
    (base / "verifier" / "verify.py").write_text(VERIFY)
    verifier = {"command": ["python3", "-I", "verify.py", "{workspace}"], "files": ["verify.py"], "timeout_seconds": 30}
    data = {"task_id": "answer", "prompt": {"text": "Write 42 to out.txt."}, "verifier": verifier}
    (base / "task.yaml").write_text(yaml.safe_dump(data))
    (base / "agents" / "reference.sh").write_text("printf 42 > out.txt\n")
    (base / "agents" / "cheat.sh").write_text("touch out.txt\n")
    return base


def test_agents_that_score_as_they_must(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert checked(capsys, str(task)) == (
        0,
        [
            f"{task}: ok, task answer",
            f"{task}: agents score as they must (reference 1, nothing 0, cheat 0)",
        ],
    )
    assert checked(capsys, str(task), "--no-agents") == (0, [f"{task}: ok, task answer"])


def test_a_verifier_that_can_be_cheated_and_one_that_gives_no_verdict_are_named(
    task: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (task / "verifier" / "verify.py").write_text(VERIFY.replace(' and (work / "out.txt").read_text() == "42"', ""))
    code, lines = checked(capsys, str(task))
    told = 'agent cheat must score 0: the verifier said {"score": 1.0, "passed": true}'
    assert (code, lines[-1]) == (1, f"{task}: {told}")
    (task / "verifier" / "verify.py").write_text("print('fine')\n")
    code, lines = checked(capsys, str(task))
    assert code == 1 and lines[-1].count("it ended as verifier_failed (the verifier's line is not JSON") == 3


def test_a_verifier_that_rewards_doing_nothing_is_found_without_a_script_for_it(
    task: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (task / "verifier" / "verify.py").write_text('print(\'{"score": 1, "passed": true}\')\n')
    (task / "agents" / "cheat.sh").unlink()
    code, lines = checked(capsys, str(task))
    told = 'agent nothing must score 0: the verifier said {"score": 1, "passed": true}'
    assert (code, lines[-1]) == (1, f"{task}: {told}")


def test_checkouts_of_both_benchmarks_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    base = SAMPLES / "claweval_checkout"
    code, lines = checked(capsys, str(base))
    assert code == 0 and len(lines) == 10
    assert lines[0] == (
        f"{base}/tasks/C01en_haggle: ok, task C01en_haggle (a run needs a judge and a model for its simulated user)"
    )
    assert lines[-1] == (f"{base}: warning: unsupported tasks, which a run leaves out: 3; tasks that are left: 6")
    base = SAMPLES / "qwenclaw_checkout"
    code, lines = checked(capsys, str(base))
    assert (
        code == 0 and lines[1] == f"{base}/tasks/task_00002_letter.md: ok, task task_00002_letter (a run needs a judge)"
    )
