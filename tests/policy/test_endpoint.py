"""Attaching to someone else's endpoint: which model, which fields, which key, and a sentence where it cannot be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from plain_stub import PlainStub

from openforge.config import Server
from openforge.policy.endpoint import Endpoint, attach
from openforge.policy.server import ServerError

SAID: list[str] = []


@pytest.fixture
async def stub() -> AsyncIterator[PlainStub]:
    SAID.clear()
    one = PlainStub()
    await one.start()
    yield one
    await one.stop()


async def attached(stub: PlainStub, **server: Any) -> Endpoint:
    cfg = Server(url=stub.url, **server)
    return await asyncio.to_thread(attach, cfg, f"none@{stub.url}", SAID.append)


def listed(*names: str, owner: str = "someone", **more: Any) -> list[dict[str, Any]]:
    return [{"id": n, "owned_by": owner, **more} for n in names]


async def test_one_model_of_a_plain_endpoint(stub: PlainStub) -> None:
    one = await attached(stub, max_model_len=4096)
    assert (one.model, one.api, one.context_window, one.base_url) == ("gpt-x", "openai", 4096, stub.url)
    assert one.policy_version == f"none@{stub.url}" and stub.heads == [None]


async def test_vllm_is_known_by_its_list_of_models(stub: PlainStub) -> None:
    stub.models = listed("other", "policy", owner="vllm", max_model_len=777)
    one = await attached(stub)
    assert (one.model, one.api, one.context_window) == ("policy", "vllm", 777)
    assert (await attached(stub, api="openai")).api == "openai"
    stub.models = listed("a")
    assert (await attached(stub, api="vllm")).api == "vllm"


async def test_several_models_need_a_name(stub: PlainStub) -> None:
    stub.models = listed("a", "b")
    with pytest.raises(ServerError, match=r"lists several models \(a, b\); name the one to ask for in server\.model"):
        await attached(stub)
    assert (await attached(stub, model="b")).model == "b" and not SAID
    assert (await attached(stub, model="c")).model == "c" and "does not list the model c" in SAID[0]
    stub.models = listed(*(f"m{i}" for i in range(30)))
    with pytest.raises(ServerError, match=r"m19 and 10 more"):
        await attached(stub)


@pytest.mark.parametrize("models", [None, []])
async def test_without_a_list_the_name_is_required(stub: PlainStub, models: list[Any] | None) -> None:
    stub.models = models
    with pytest.raises(ServerError, match=r"lists no models; name the one to ask for in server\.model"):
        await attached(stub)
    assert (await attached(stub, model="m")).model == "m"


async def test_the_key_comes_from_the_variable_named(stub: PlainStub, monkeypatch: pytest.MonkeyPatch) -> None:
    stub.key = "sk-right"
    monkeypatch.setenv("MY_KEY", "sk-right\n")
    one = await attached(stub, api_key_env="MY_KEY")
    assert one.api_key == "sk-right" and "sk-right" not in repr(one)
    with pytest.raises(ServerError, match=r"refuses a request without a key \(see server\.api_key_env\)"):
        await attached(stub)
    monkeypatch.setenv("MY_KEY", "sk-wrong")
    with pytest.raises(ServerError, match="refuses the key in MY_KEY") as refused:
        await attached(stub, api_key_env="MY_KEY")
    assert "sk-wrong" not in str(refused.value)
    monkeypatch.setenv("MY_KEY", "sk-\u00fc")
    with pytest.raises(ServerError, match="no HTTP header can carry"):
        await attached(stub, api_key_env="MY_KEY")
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(ServerError, match="names MY_KEY, which is not set"):
        await attached(stub, api_key_env="MY_KEY")


async def test_nobody_there_is_a_sentence() -> None:
    with pytest.raises(ServerError, match="cannot be reached"):
        await asyncio.to_thread(attach, Server(url="http://127.0.0.1:1/v1"), "none@x", SAID.append)


async def test_sglang_is_known_by_its_list_of_models_too(stub: PlainStub) -> None:
    stub.models = listed("m", owner="sglang", max_model_len=777, root="org/m")
    one = await attached(stub)
    assert (one.api, one.context_window) == ("vllm", 777)


async def test_replicas_serve_the_same_model(stub: PlainStub) -> None:
    stub.models = listed("m", owner="vllm", max_model_len=777)
    other = PlainStub()
    other.models = listed("m", owner="vllm", max_model_len=777, root="org/m")
    await other.start()
    dead = "http://127.0.0.1:9"
    try:
        one = await attached(stub, replicas=[f"{other.url}/", dead])
        assert (one.base_url, one.replicas, one.context_window) == (stub.url, (other.url, f"{dead}/v1"), 777)
        assert len(SAID) == 1 and SAID[0].startswith(f"server.replicas {dead}: {dead}/v1/models cannot be reached")
        for key, values in (("root", ("org/m", "org/n")), ("max_model_len", (777, 555))):
            stub.models = listed("m", owner="vllm", **{"max_model_len": 777, key: values[0]})
            other.models = listed("m", owner="vllm", **{"max_model_len": 777, key: values[1]})
            told = f"server.replicas: {other.url} serves m with {key} {values[1]}, {stub.url} with {values[0]}; "
            with pytest.raises(ServerError, match=told):
                await attached(stub, replicas=[other.url])
        other.models = listed("n", owner="vllm")
        with pytest.raises(ServerError, match=f"server.replicas: {other.url} does not list m, which {stub.url} serves"):
            await attached(stub, replicas=[other.url])
    finally:
        await other.stop()
