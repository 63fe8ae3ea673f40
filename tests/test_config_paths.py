"""What a configuration names must exist, and a run's past must fit its present: one sentence before any job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from openforge import config_paths
from openforge.config import ConfigError, EvalConfig, RunConfig, load

ROOT = Path(__file__).resolve().parents[1]


def run(**over: Any) -> RunConfig:
    base: dict[str, Any] = {"model": "tiny-random", "iterations": 1, "tasks": {"source": "tiny"}}
    return RunConfig.model_validate(base | over)


@pytest.mark.parametrize("name", [p.stem for p in (ROOT / "config").glob("*.yaml")])
def test_every_configuration_here_names_what_exists(name: str) -> None:
    config_paths.check(name, load(name, ROOT).config, ROOT)


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


def test_a_policy_that_is_no_folder_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for policy, right in (("mine", True), ("nosuch", False), ("demo@3", True), ("http://127.0.0.1:1/v1", True)):
        config = EvalConfig.model_validate({"model": "tiny-random", "tasks": {"source": "tiny"}, "policy": policy})
        if right:
            config_paths.check("eval_r", config, tmp_path)
        else:
            with pytest.raises(ConfigError, match="policy 'nosuch'"):
                config_paths.check("eval_r", config, tmp_path)


def test_a_run_goes_on_only_as_it_was_made(tmp_path: Path) -> None:
    config_paths.check_frozen("r", run(), tmp_path)
    config_paths.freeze(run(), tmp_path)
    config_paths.check_frozen("r", run(iterations=9, actor={"optim": {"lr": 1e-5}}), tmp_path)
    with pytest.raises(ConfigError, match=r"made with seed = 0, now it is 1: copy config/r\.yaml to another run name"):
        config_paths.check_frozen("r", run(seed=1), tmp_path)
    with pytest.raises(ConfigError, match="data"):
        config_paths.check_frozen("r", run(data={"train_batch_size": 3}), tmp_path)
