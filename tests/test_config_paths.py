"""What a configuration names must exist, and a run's past must fit its present: one sentence before any job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from openforge import config_paths
from openforge.config import ConfigError, EvalConfig, RunConfig, load

ROOT = Path(__file__).resolve().parents[1]


def model_folder(folder: Path, without: str = "") -> Path:
    """What a model folder consists of, empty but for the template, less one part."""
    folder.mkdir()
    parts = {
        "config.json": "{}",
        "model.safetensors": "",
        "tokenizer.json": "{}",
        "tokenizer_config.json": json.dumps({} if without == "template" else {"chat_template": "{{ messages }}"}),
    }
    for name, text in parts.items():
        if name != without:
            (folder / name).write_text(text)
    return folder


def run(**over: Any) -> RunConfig:
    base: dict[str, Any] = {"model": "tiny-random", "iterations": 1, "tasks": {"source": "tiny"}}
    return RunConfig.model_validate(base | over)


@pytest.mark.parametrize("name", [p.stem for p in (ROOT / "config").glob("*.yaml")])
def test_every_configuration_here_names_what_exists(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("CLAWEVAL", "QWENCLAW"):
        monkeypatch.setenv(variable, str(ROOT / f"tests/environments/samples/{variable.lower()}_checkout"))
    config_paths.check(name, load(name, ROOT).config, ROOT)


@pytest.mark.parametrize("suite", ["eval_nosuch", "eval_mine", "mine"])
def test_a_suite_that_is_no_other_evaluation_is_refused(suite: str, tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    for name in ("eval_mine", "mine"):
        (tmp_path / "config" / f"{name}.yaml").touch()
    config = EvalConfig.model_validate(
        {"model": "tiny-random", "tasks": {"source": "tiny"}, "suites": [suite], "cells": []}
    )
    with pytest.raises(ConfigError, match=f"suites names '{suite}'; it must be another evaluation"):
        config_paths.check("eval_mine", config, tmp_path)


BARE = {"name": "claude_code", "bare": True}


@pytest.mark.parametrize(
    ("harness", "window", "fits"),
    [
        # Prompts of 12,215, 1,070 and 5,172 tokens were counted; other tokenizers may need a quarter less.
        ({"name": "claude_code"}, 4096, False),
        ({"name": "claude_code"}, 16384, True),
        (BARE, 4096, True),
        (BARE, 512, False),
        ({"name": "codex"}, 2048, False),
        ({"name": "codex"}, 4096, True),
        # Nobody has counted the tools that are named, and a YAML may say anything.
        ({"name": "claude_code", "tools": "Bash"}, 512, True),
        ({"name": "mini_swe_agent", "config": "config/harness/demo.yaml"}, 512, True),
        ({"name": "mini_swe_agent"}, 512, False),
    ],
)
def test_a_window_below_a_harness_first_prompt_is_refused(harness: dict[str, Any], window: int, fits: bool) -> None:
    server = {"max_model_len": window, "chat_template": "openforge/policy/hermes.jinja"}
    short = {"max_tokens": 16}
    trained = run(harness=harness, server=server, sampling=short)
    elsewhere = {"name": "a", "harness": harness, "server": server, "sampling": short}
    cell = run(harness={"name": "pi"}, cells=[elsewhere])
    for config, key in ((trained, "harness"), (cell, r"cells\[0\].harness")):
        if fits:
            config_paths.check("r", config, ROOT)
            continue
        sentence = (
            rf"config/r.yaml: {key}: {harness['name']} begins with about \d+ tokens, but .* is {window}; raise it"
        )
        with pytest.raises(ConfigError, match=sentence):
            config_paths.check("r", config, ROOT)


@pytest.mark.parametrize(
    ("over", "sentence"),
    [
        ({"model": "no/model"}, r"config/r\.yaml: model 'no/model' must be a model folder, a hub id with its revision"),
        ({"tasks": {"source": "nosuch"}}, r"tasks\.source 'nosuch' must be demo, tiny, a folder of task folders, a"),
        ({"tasks": {"source": "empty", "verifier": "v.py"}}, r"'tasks\.verifier' has no effect on task folders"),
        (
            {"tasks": {"source": "t.parquet", "verifier": "v.py"}},
            r"v\.py must be a script, or a folder with verify\.py",
        ),
        ({"harness": {"config": "no.yaml"}}, r"harness\.config 'no\.yaml': .*no\.yaml does not exist"),
        ({"server": {"chat_template": "no.jinja"}}, r"server\.chat_template 'no\.jinja'"),
        ({"harness": {"name": "codex", "instructions": "no.md"}}, r"harness\.instructions 'no\.md': .*does not exist"),
        ({"harness": {"name": "zeroclaw", "binary": "no"}}, r"harness\.binary 'no': .*does not exist"),
        ({"cells": [{"name": "a", "harness": {"config": "no.yaml"}}]}, r"cells\[0\]\.harness\.config"),
        ({"environment": "nosuch"}, r"environment 'nosuch': there is no module openforge\.environments\.nosuch\.env"),
        ({"environment": "no_package.env"}, r"there is no module no_package\.env"),
    ],
)
def test_what_does_not_exist_is_a_sentence(over: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "t.parquet").touch()
    with pytest.raises(ConfigError, match=sentence):
        config_paths.check("r", run(**over), tmp_path)


def test_a_secrets_variable_must_be_set_and_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    server = {"url": "http://h/v1", "api_key_env": "MY_ENDPOINT_KEY"}
    config = EvalConfig.model_validate({"model": "tiny-random", "tasks": {"source": "tiny"}, "server": server})
    for value in (None, " "):
        monkeypatch.delenv("MY_ENDPOINT_KEY", raising=False)
        if value:
            monkeypatch.setenv("MY_ENDPOINT_KEY", value)
        with pytest.raises(ConfigError, match=r"names the environment variable MY_ENDPOINT_KEY, which is not set"):
            config_paths.check_variables("eval_r", config)
    monkeypatch.setenv("MY_ENDPOINT_KEY", "sk")
    config_paths.check_variables("eval_r", config)


def test_the_server_of_sandboxes_is_named_by_a_key_or_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SANDBOX_BASE_URL", raising=False)
    monkeypatch.delenv("MY_KEY", raising=False)
    base = {"model": "m", "tasks": {"source": "demo"}}

    def check(**sandbox: object) -> None:
        config_paths.check_variables("eval_r", EvalConfig.model_validate(base | {"sandbox": sandbox}))

    with pytest.raises(
        ConfigError, match=r"but neither sandbox\.url nor the environment variable SANDBOX_BASE_URL says"
    ):
        check(backend="orchard")
    check(backend="orchard", url="http://127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"sandbox\.api_key_env names the environment variable MY_KEY, which is not"):
        check(backend="orchard", url="http://127.0.0.1:1", api_key_env="MY_KEY")
    monkeypatch.setenv("MY_KEY", "k")
    monkeypatch.setenv("SANDBOX_BASE_URL", "http://127.0.0.1:1")
    check(backend="orchard", api_key_env="MY_KEY")


def test_a_policy_that_is_no_folder_is_a_sentence(tmp_path: Path) -> None:
    model_folder(tmp_path / "mine")
    for policy, right in (("mine", True), ("nosuch", False), ("demo@3", True), ("http://127.0.0.1:1/v1", True)):
        config = EvalConfig.model_validate({"model": "tiny-random", "tasks": {"source": "tiny"}, "policy": policy})
        if right:
            config_paths.check("eval_r", config, tmp_path)
        else:
            with pytest.raises(ConfigError, match="policy 'nosuch'"):
                config_paths.check("eval_r", config, tmp_path)


@pytest.mark.parametrize(
    ("without", "sentence"),
    [
        ("config.json", "lacks config.json"),
        ("model.safetensors", r"lacks weights \(\*\.safetensors\)"),
        ("tokenizer.json", r"lacks a tokenizer \(tokenizer.json, tokenizer.model or vocab.json\)"),
        ("template", r"has no chat template \(.*\); name one with server.chat_template"),
    ],
)
def test_a_model_folder_without_a_part_is_a_sentence(without: str, sentence: str, tmp_path: Path) -> None:
    model_folder(tmp_path / "m", without)
    with pytest.raises(ConfigError, match=rf"config/r\.yaml: model 'm': model folder .*/m {sentence}$"):
        config_paths.check("r", run(model="m"), tmp_path)


def test_a_template_is_needed_only_where_a_server_has_none(tmp_path: Path) -> None:
    model_folder(tmp_path / "m", "template")
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    named = {"chat_template": "t.jinja"}
    config_paths.check("r", run(model="m", server=named, cells=[{"name": "a"}]), tmp_path)
    with pytest.raises(ConfigError, match="no chat template"):
        config_paths.check("r", run(model="m", server=named, cells=[{"name": "a", "server": {}}]), tmp_path)


def test_weights_that_the_index_names_must_be_there(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        ConfigError, match=r"lacks model-2\.safetensors, which its model\.safetensors\.index\.json names"
    ):
        config_paths.check("r", run(model="m"), tmp_path)


@pytest.mark.parametrize(
    ("over", "sentence"),
    [
        ({"data": {"train_split": "trian"}}, "data.train_split is 'trian', a split without tasks; .* train \\(64\\)"),
        ({"tasks": {"source": "tiny", "train": 0}}, "data.train_split is 'train', a split without tasks"),
        ({"cells": [{"name": "a", "split": "unseen"}]}, r"cells\[0\]\.split is 'unseen', a split without tasks"),
        ({"cells": [{"name": "a", "tasks": 65}]}, r"cells\[0\]\.tasks is 65, but split 'heldout' has 64"),
    ],
)
def test_a_split_of_generated_tasks_without_tasks_is_a_sentence(over: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        config_paths.check("r", run(**over), tmp_path)
    # Without an iteration nothing is drawn for training.
    if "cells" not in over:
        config_paths.check("r", run(**over, iterations=0), tmp_path)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("import no_such_library", r"line 1: ModuleNotFoundError: No module named 'no_such_library'"),
        ("x = 1\ndef f(:", "line 2: SyntaxError: invalid syntax"),
        ("x = 1\n\nraise RuntimeError('no\\nkey')", "line 3: RuntimeError: no key"),
    ],
)
def test_a_users_environment_that_cannot_be_imported_is_named_with_its_line(
    text: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    name = f"broken_{abs(hash(text))}"
    (tmp_path / f"{name}_package").mkdir()
    file = tmp_path / f"{name}_package" / "my_env.py"
    file.write_text(text)
    with pytest.raises(ConfigError) as e:
        config_paths.check("r", run(environment=f"{name}_package.my_env"), tmp_path)
    assert str(e.value).endswith(f"cannot be imported: {file}, {sentence}")


@pytest.mark.parametrize("name", ["", "<my_env>", "my-env", "a..b", "../x"])
def test_a_placeholder_is_no_environment(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no import path; it is claw_eval, or"):
        config_paths.check("r", run(environment=name), tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[1]"])
def test_a_damaged_record_of_what_a_run_was_made_with_is_a_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "frozen.json").write_text(text)
    with pytest.raises(ConfigError, match=r"frozen\.json cannot be read .* remove results/r to begin anew"):
        config_paths.check_frozen("r", run(), tmp_path)


def test_a_run_goes_on_only_as_it_was_made(tmp_path: Path) -> None:
    config_paths.check_frozen("r", run(), tmp_path)
    config_paths.freeze(run(), tmp_path)
    config_paths.check_frozen("r", run(iterations=9, actor={"optim": {"lr": 1e-5}}), tmp_path)
    with pytest.raises(ConfigError, match=r"made with seed = 0, now it is 1: copy config/r\.yaml to another run name"):
        config_paths.check_frozen("r", run(seed=1), tmp_path)
    with pytest.raises(ConfigError, match="data"):
        config_paths.check_frozen("r", run(data={"train_batch_size": 3}), tmp_path)


def test_a_key_that_a_run_was_made_without_had_its_default(tmp_path: Path) -> None:
    config_paths.freeze(run(), tmp_path)
    frozen = json.loads((tmp_path / "frozen.json").read_text())
    del frozen["reward"], frozen["algorithm"]["gamma"]
    (tmp_path / "frozen.json").write_text(json.dumps(frozen))
    config_paths.check_frozen("r", run(), tmp_path)
    with pytest.raises(ConfigError, match=r"made with algorithm = .*\"gamma\": 1\.0.*, now it is .*\"gamma\": 0\.5"):
        config_paths.check_frozen("r", run(algorithm={"gamma": 0.5}), tmp_path)
