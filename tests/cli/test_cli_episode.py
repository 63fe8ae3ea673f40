"""`openforge episode`: bad input is one sentence, before anything is started."""

from __future__ import annotations

from pathlib import Path

import made_run
import pytest

from openforge import cli, tables


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A task without verifier, a good one, a model folder without tokenizer, and a run of one task and no episode."""
    (tmp_path / "Snakefile").touch()
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "r.yaml").write_text(
        "model: tiny-random\niterations: 1\ntasks: {source: tiny}\ncells: [{name: by_hand}]\n"
    )
    task = "task_id: x\nprompt: {text: do it}\n"
    for name, more in (("bare", ""), ("good", "verifier: {command: ['true'], timeout_seconds: 5}\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "task.yaml").write_text(task + more)
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "model" / name).write_text("{}")
    tables.write_table(tmp_path / "results/r/tasks.parquet", tables.TASKS, [made_run.task("t", "copy", "train")])
    monkeypatch.chdir(tmp_path)
    return tmp_path


NAMES = "mini_swe_agent, pi, codex, claude_code, openclaw, opencode, qwen_code, zeroclaw, scripted"
GOOD = ("--task", "good", "--harness", "mini_swe_agent", "--model", "tiny-random")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "--task is needed (a task folder, or with --run a task's id), or --replay EPISODE_ID"),
        (["--task", "none"], "--task none: there is no such task folder (a task's id needs --run RUN)"),
        (["--task", "config"], "config is no task folder: it holds no task.yaml"),
        (["--task", "bare"], "bare/task.yaml: key 'verifier' is required (a mapping)"),
        (["--task", "good"], f"--harness is needed, one of {NAMES}, or --config RUN whose harness is taken"),
        (["--task", "good", "--harness", "aider"], f"there is no harness 'aider'; harnesses: {NAMES}"),
        (["--task", "good", "--harness", "pi"], "--model is needed, or --config RUN whose model is taken"),
        (
            ["--task", "good", "--harness", "claude_code", "--model", "tiny-random"],
            "claude_code begins with about 12215 tokens, but server.max_model_len is 2048; raise it, or take a harness "
            "or options with a shorter prompt (docs/harnesses.md)",
        ),
        ([*GOOD, "--harness-config", "none.yaml"], "--harness-config none.yaml: there is no such file"),
        (
            [*GOOD, "--harness", "pi", "--harness-config", "Snakefile"],
            "--harness-config has no effect with pi, which takes no configuration file",
        ),
        (
            [*GOOD, "--model", "nobody"],
            "--model 'nobody' must be a model folder, a hub id with its revision (OWNER/NAME@REVISION), RUN@k, a URL, "
            "or one of smollm2-135m-instruct, tiny-random, tiny-random-vl",
        ),
        ([*GOOD, "--model", "r@x"], "policy 'r@x': RUN@k needs a checkpoint's number, e.g. r@3"),
        (
            [*GOOD, "--model", "r@3"],
            "policy r@3: results/r/checkpoints/0003 does not exist; train it first: snakemake train_r",
        ),
        ([*GOOD, "--model", "model"], "a tokenizer (tokenizer.json, tokenizer.model or vocab.json)"),
        ([*GOOD, "--limits", "turns=many"], "--limits 'turns=many': 'many' must be a number above 0"),
        ([*GOOD, "--limits", "turns"], "--limits 'turns' must be KEY=VALUE with a key of turns, tokens, seconds"),
        ([*GOOD, "--json", "none/e.json"], "/none does not exist"),
        ([*GOOD, "--cell", "heldout"], "--cell needs --config RUN, the configuration whose cell it is"),
        ([*GOOD, "--config", "r", "--cell", "heldout"], "config/r.yaml has no cell 'heldout'; its cells: by_hand"),
        (["--task", "t", "--run", "other"], "there is no run 'other' in results/; runs there: r"),
        (["--task", "u", "--run", "r"], "run r has no task 'u'; it has 1, one of them is 't'"),
        (["--replay", "e"], "--replay needs --run RUN, the run whose episode it is"),
        (["--replay", "e", "--run", "r"], "run r has no episode 'e'; it has 0 episodes"),
        (
            ["--replay", "e", "--run", "r", "--model", "m"],
            "--model has no effect with --replay: what is replayed is the record's",
        ),
    ],
)
def test_bad_input_is_one_sentence(
    inputs: Path, capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    assert cli.main(["episode", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.endswith(f"{sentence}\n") and err.count("\n") == 1


def test_an_endpoint_that_does_not_answer_is_one_sentence_and_1(
    inputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["episode", "--task", "good", "--harness", "pi", "--model", "http://127.0.0.1:9/v1"]
    assert cli.main(words) == 1
    assert capsys.readouterr().err.startswith(
        "error: server.url http://127.0.0.1:9/v1: http://127.0.0.1:9/v1/models cannot be reached: "
    )
