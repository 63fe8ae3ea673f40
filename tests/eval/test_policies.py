"""What `policy=` and server.url name: paths, the policy column, and the server that is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from openforge.config import ConfigError, EvalConfig
from openforge.eval import policies

URL = "http://127.0.0.1:1/v1"


def suite(**over: Any) -> EvalConfig:
    base: dict[str, Any] = {"model": "tiny-random", "tasks": {"source": "tiny"}, "cells": [{"name": "a"}]}
    return EvalConfig.model_validate(base | over)


def test_an_endpoint_is_named_by_policy_or_by_the_server() -> None:
    for config in (suite(policy=URL, server={"model": "m"}), suite(server={"url": URL, "model": "m"})):
        ref = policies.reference(config)
        assert (ref.kind, ref.value, ref.k) == ("url", URL, "none")
        assert policies.name("eval_r", config, None) == f"{URL}#m"
        assert policies.server(config, config.cells[0]).url == URL


def test_two_models_of_one_endpoint_are_two_policies() -> None:
    found = [policies.reference(suite(policy=URL, server={"model": m})).slug for m in ("m", "n")]
    found.append(policies.reference(suite(policy=URL)).slug)
    assert len(set(found)) == 3 and all(s and "/" not in s and "." not in s for s in found)


def test_a_cells_own_server_keeps_the_suites_endpoint() -> None:
    cell = {"name": "a", "server": {"max_model_len": 99}}
    config = suite(
        policy=URL,
        server={"model": "m", "api": "openai", "api_key_env": "K", "replicas": ["http://i/v1"]},
        cells=[cell],
    )
    server = policies.server(config, config.cells[0])
    assert server.replicas == ["http://i/v1"]
    assert (server.url, server.model, server.api, server.api_key_env) == (URL, "m", "openai", "K")
    assert server.max_model_len == 99


def test_sampling_that_a_plain_endpoint_cannot_take_is_refused_before_any_job() -> None:
    cells = [{"name": "a"}, {"name": "b", "sampling": {"min_p": 0.1}}]
    with pytest.raises(ConfigError, match=r"cell b: sampling\.min_p is 0\.1"):
        policies.check(suite(policy=URL, server={"api": "openai"}, cells=cells), Path())
    # Whether vLLM answers is known in the job only.
    policies.check(suite(policy=URL, cells=cells), Path())


@pytest.mark.parametrize("policy", ["models/mine", "/data/models/mine", "org/name@main"])
def test_a_folder_or_hub_id_is_a_model(policy: str) -> None:
    ref = policies.reference(suite(policy=policy))
    assert (ref.kind, ref.value, ref.k, ref.label) == ("model", policy, "none", policy)
