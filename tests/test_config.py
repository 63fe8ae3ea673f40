"""The typed configuration: sentences for wrong keys, YAML's traps, overrides as Snakemake hands them over."""

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from snakemake.cli import parse_config

from openforge import config as c

ROOT = Path(__file__).resolve().parent.parent
TRAIN = "model: tiny-random\niterations: 2\ntasks: {source: tiny}\n"
EVAL = "model: tiny-random\ntasks: {source: tiny}\n"


def load(tmp_path: Path, text: str, name: str = "mine", overrides=None):
    (tmp_path / "config").mkdir(exist_ok=True)
    (tmp_path / "config" / f"{name}.yaml").write_text(text)
    return c.load(name, tmp_path, overrides)


def refused(tmp_path: Path, text: str, name: str = "mine", overrides=None) -> str:
    with pytest.raises(c.ConfigError) as e:
        load(tmp_path, text, name, overrides)
    message = str(e.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "actor: {policy_loss: {loss_mode: dro}}",
            "key 'actor.policy_loss.dro_beta' is required while loss_mode is dro",
        ),
        (
            "actor: {policy_loss: {loss_mode: sapo}}",
            "actor.loss_agg_mode is token-mean, but the loss sapo is a mean over sequences of their means",
        ),
        (
            "actor: {loss_agg_mode: seq-mean-token-sum-norm}",
            "key 'actor.loss_scale_factor' is required while loss_agg_mode is seq-mean-token-sum-norm",
        ),
        (
            "algorithm: {adv_estimator: sft}",
            "algorithm.adv_estimator sft raises the likelihood of successes, with neither ratio nor importance "
            "weights: set actor.policy_loss.loss_mode: gpg and",
        ),
        (
            "actor: {use_dynamic_bsz: false}",
            "key 'actor.ppo_micro_batch_size_per_gpu' is required while use_dynamic_bsz is false",
        ),
        (
            "actor: {optim: {lr_scheduler_type: cosine}}",
            "key 'actor.optim.total_training_steps' is required while lr_scheduler_type is cosine",
        ),
        (
            "algorithm: {adv_estimator: gae}\ncritic: {optim: {lr_scheduler_type: cosine}}",
            "key 'critic.optim.total_training_steps' is required while lr_scheduler_type is cosine",
        ),
        (
            "actor: {optim: {lr_scheduler_type: cosine, total_training_steps: 9, lr_warmup_steps: 9}}",
            "actor.optim.lr_warmup_steps is 9, but the schedule ends after total_training_steps 9",
        ),
    ],
)
def test_a_loss_or_schedule_that_lacks_a_key_names_it(tmp_path, text, sentence):
    assert refused(tmp_path, TRAIN + text).startswith(f"config/mine.yaml: {sentence}")


def test_every_loss_says_which_keys_it_uses():
    from typing import get_args

    from openforge.config_checks import LOSS_KEYS
    from openforge.config_training import Actor, PolicyLoss

    assert set(get_args(PolicyLoss.model_fields["loss_mode"].annotation)) == set(LOSS_KEYS)
    assert {k for keys in LOSS_KEYS.values() for k in keys} <= set(Actor.model_fields)


# ---- keys ----
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("iteration: 3", "config/mine.yaml: unknown key 'iteration'; did you mean 'iterations'?"),
        ("rollout: {nn: 3}", "config/mine.yaml: unknown key 'rollout.nn'; did you mean 'rollout.n'?"),
        (
            "actor: {optim: {learning_rate: 1.0, lr: 1.0}}",
            "config/mine.yaml: unknown key 'actor.optim.learning_rate'; known keys here: "
            "lr, lr_scheduler_type, lr_warmup_steps, ",
        ),
        (
            "cells: [{name: a, harness: {nam: pi}}]",
            "config/mine.yaml: unknown key 'cells[0].harness.nam'; did you mean 'cells[0].harness.name'?",
        ),
        ("policy: x", "config/mine.yaml: unknown key 'policy'; known keys here: "),
    ],
)
def test_an_unknown_key_names_the_nearest(tmp_path, text, sentence):
    assert refused(tmp_path, TRAIN + text).startswith(sentence)


@pytest.mark.parametrize(
    ("text", "key", "shown"),
    [
        ("seed: '1'", "seed", '"1"'),
        ("seed: 1.0", "seed", "1.0"),
        ("seed: true", "seed", "true"),
        ("rollout: {n: 0}", "rollout.n", "0"),
        ("limits: {seconds: -1}", "limits.seconds", "-1"),
        ("limits: {seconds: '60'}", "limits.seconds", '"60"'),
        ("limits: {seconds: true}", "limits.seconds", "true"),
        ("limits: {seconds: .inf}", "limits.seconds", "Infinity"),
        ("limits: {seconds: .nan}", "limits.seconds", "NaN"),
        ("server: {warm: 1}", "server.warm", "1"),
        ("harness: {name: aider}", "harness.name", '"aider"'),
        ("actor: {optim: {betas: [0.9]}}", "actor.optim.betas.1", ""),
        ("actor: {optim: {betas: ['0.9', 0.99]}}", "actor.optim.betas.0", '"0.9"'),
        ("cells: [{name: Held-Out}]", "cells.0.name", '"Held-Out"'),
        ("environment: null", "environment", "null"),
        ("seed: 100000000000000000000000", "seed", "less than 4294967296"),
        ("seed: -1", "seed", "greater than or equal to 0"),
        ("actor: {data_loader_seed: 4294967296}", "actor.data_loader_seed", "less than 4294967296"),
        ("rollout: {quorum: 0}", "rollout.quorum", "greater than 0"),
        ("server: {max_model_len: 8}", "server.max_model_len", "greater than or equal to 64"),
        ("lag: 3", "lag", "less than or equal to 2"),
        ("harness: {name: mini, config: null}", "harness.name", "'mini_swe_agent', 'pi', 'codex'"),
    ],
)
def test_a_mistyped_value_names_key_and_value(tmp_path, text, key, shown):
    message = refused(tmp_path, TRAIN + text)
    assert message.startswith(f"config/mine.yaml: key {key!r} is")
    assert shown in message


@pytest.mark.parametrize("text", ["tasks: 3", "rollout: [1]", "server: text", "actor: {optim: [1]}"])
def test_a_section_must_be_a_mapping(tmp_path, text):
    base = "\n".join(line for line in TRAIN.splitlines() if not line.startswith(text.split(":")[0]))
    assert "must be a mapping of keys, not" in refused(tmp_path, f"{base}\n{text}")


@pytest.mark.parametrize("text", ["rollout: null", "harness:", "actor: {optim: ~}"])
def test_a_section_is_not_null(tmp_path, text):
    dotted = "actor.optim" if "actor" in text else text.split(":")[0]
    message = refused(tmp_path, TRAIN + text)
    assert message == f"config/mine.yaml: {dotted} is null; write its keys, or leave it out for the defaults"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "server: {max_model_len: 512}",
            "sampling.max_tokens is 512, but server.max_model_len is 512, which leaves no token for a prompt",
        ),
        (
            "cells: [{name: a, server: {max_model_len: 256}}]",
            "cells[0].sampling.max_tokens is 512, but cells[0].server.max_model_len is 256",
        ),
        ("cells: [{name: a, sampling: {max_tokens: 2048}}]", "cells[0].sampling.max_tokens is 2048, but server."),
        ("server: {block_size: 16}", "server.block_size is 16; on cpu a multiple of 32 is needed"),
    ],
)
def test_a_window_holds_prompt_and_response(tmp_path, text, sentence):
    assert sentence in refused(tmp_path, TRAIN + text)
    assert load(tmp_path, TRAIN + "server: {device: gpu, block_size: 16}").config.server.block_size == 16


def test_cells_must_be_a_list(tmp_path):
    message = refused(tmp_path, TRAIN + "cells: {name: a}")
    assert message == 'config/mine.yaml: cells must be a list of mappings, not {"name": "a"}'
    assert "cells[1] must be a mapping" in refused(tmp_path, TRAIN + "cells: [{name: a}, b]")


def test_missing_keys_are_named(tmp_path):
    assert refused(tmp_path, "iterations: 1\ntasks: {source: tiny}") == ("config/mine.yaml: key 'model' is required")
    assert "'tasks.source' is required" in refused(tmp_path, "model: m\niterations: 1\ntasks: {}")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "server: {device: gpu, kv_cache_gb: 2}",
            'key \'server.kv_cache_gb\' has no effect while server.device is "gpu"; remove it or set device to "cpu"',
        ),
        ("server: {tensor_parallel_size: 2}", "key 'server.tensor_parallel_size' has no effect while"),
        (
            "harness: {name: pi, launch: command}",
            "key 'harness.launch' has no effect while harness.name is \"pi\"",
        ),
        ("trainer: {device: gpu, threads: 2}", "key 'trainer.threads' has no effect while"),
        ("actor: {kl_loss_coef: 0.1}", "key 'actor.kl_loss_coef' has no effect while actor.use_kl_loss is false"),
        ("actor: {kl_loss_type: kl}", "key 'actor.kl_loss_type' has no effect while actor.use_kl_loss is false"),
        ("actor: {loss_scale_factor: 9}", "key 'actor.loss_scale_factor' has no effect while actor.loss_agg_mode is"),
        ("actor: {optim: {min_lr_ratio: 0.1}}", "key 'actor.optim.min_lr_ratio' has no effect while"),
        (
            "algorithm: {rollout_correction: {bypass_mode: true, rollout_is_threshold: 3}}",
            "key 'algorithm.rollout_correction.rollout_is_threshold' has no effect while",
        ),
        ("actor: {policy_loss: {dro_beta: 0.1}}", "key 'actor.policy_loss.dro_beta' has no effect while"),
        (
            "actor: {policy_loss: {loss_mode: gspo}, clip_ratio_c: 3}",
            "key 'actor.clip_ratio_c' has no effect while actor.policy_loss.loss_mode is gspo; remove it or set "
            "loss_mode to vanilla or dppo_tv or dppo_kl",
        ),
        (
            "actor: {policy_loss: {loss_mode: gpg}, clip_ratio_low: 0.1}",
            "key 'actor.clip_ratio_low' has no effect while actor.policy_loss.loss_mode is gpg",
        ),
        ("actor: {tau_pos: 2}", "key 'actor.tau_pos' has no effect while actor.policy_loss.loss_mode is vanilla"),
        ("actor: {model: {lora_alpha: 8}}", "key 'actor.model.lora_alpha' has no effect while lora_rank is 0"),
        ("critic: {cliprange_value: 0.1}", "key 'critic' has no effect while algorithm.adv_estimator is grpo"),
        ("algorithm: {adv_estimator: sft, gamma: 0.9}", "key 'algorithm.gamma' has no effect while"),
        ("algorithm: {lam: 0.9}", "key 'algorithm.lam' has no effect while algorithm.adv_estimator is"),
        ("actor: {ppo_micro_batch_size_per_gpu: 2}", "key 'actor.ppo_micro_batch_size_per_gpu' has no effect while"),
        (
            "actor: {clip_ratio: 0.1, clip_ratio_low: 0.2, clip_ratio_high: 0.3}",
            "key 'actor.clip_ratio' has no effect beside clip_ratio_low and clip_ratio_high",
        ),
        ("server: {url: 'http://127.0.0.1:1'}", "server.url is for evaluation"),
        ("sampling: {top_p: 0.9}", "sampling.top_p must be 1.0 in training"),
        ("sampling: {temperature: 0}", "sampling.temperature must be above 0 in training"),
        ("rollout: {n: 1}", "rollout.n must be at least 2"),
        (
            "sandbox: {url: 'http://127.0.0.1:8000'}",
            'key \'sandbox.url\' has no effect while sandbox.backend is "local"; remove it or set backend to "orchard"',
        ),
        ("sandbox: {backend: podman}", "key 'sandbox.image' is required while sandbox.backend is podman"),
        ("sandbox: {api_key_env: KEY}", "key 'sandbox.api_key_env' has no effect while"),
        ("sandbox: {ttl_seconds: 60}", "key 'sandbox.ttl_seconds' has no effect while"),
        ("sandbox: {network_policy: true}", "key 'sandbox.network_policy' has no effect while"),
        ("sandbox: {artifacts: {keep: none, work: true}}", "key 'sandbox.artifacts.work' has no effect while"),
        ("sandbox: {limits: {best_effort: true}}", "key 'sandbox.limits.best_effort' has no effect without a limit"),
        ("sandbox: {warm: 4, max_alive: 4}", "sandbox.max_alive is 4, but sandbox.warm keeps 4 ready, so that no"),
        (
            "sandbox: {backend: orchard, url: 'http://h:80/?api_key=secret'}",
            "sandbox.url at h must be the server's address only",
        ),
        ("sandbox: {backend: orchard, url: 'h:80'}", "sandbox.url 'h:80' must be http://HOST:PORT or https://HOST"),
        ("sandbox: {backend: orchard, api_key_env: 'sk-1'}", "sandbox.api_key_env must be the NAME of an environment"),
        (
            "sandbox: {backend: orchard}\nharness: {launch: fork}",
            "key 'harness.launch' cannot be fork while sandbox.backend is orchard: a process is forked into",
        ),
        (
            "sandbox: {image: x.tar}\ncells: [{name: a, harness: {launch: fork}}]",
            "key 'cells[0].harness.launch' cannot be fork while sandbox.image is set",
        ),
        ("cells: [{name: a}, {name: a}]", "two cells are named 'a'"),
        ("cells: [{name: train}]", "a cell cannot be named 'train'"),
    ],
)
def test_an_ineffective_or_contradictory_key_is_refused(tmp_path, text, sentence):
    assert sentence in refused(tmp_path, TRAIN + text)


def test_an_ineffective_key_of_a_folder_of_tasks(tmp_path):
    message = refused(tmp_path, "model: m\niterations: 1\ntasks: {source: folder/tasks, train: 3}")
    assert "key 'tasks.train' has no effect while tasks.source is \"folder/tasks\"" in message


def test_an_evaluation_suite_has_its_own_keys(tmp_path):
    loaded = load(tmp_path, EVAL + "policy: demo@3", "eval_mine")
    assert isinstance(loaded.config, c.EvalConfig)
    assert loaded.config.policy == "demo@3"
    assert "unknown key 'iterations'" in refused(tmp_path, EVAL + "iterations: 3", "eval_mine")
    assert "'cells[0].at' has no effect" in refused(tmp_path, EVAL + "cells: [{name: a, at: last}]", "eval_mine")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("policy: demo@3\nserver: {url: 'http://h/v1'}", "name two policies; remove one"),
        ("policy: ''", "key 'policy' is \"\""),
        ("policy: ftp://h/v1", "the endpoint 'ftp://h/v1' must be http://HOST:PORT/v1"),
        ("server: {model: m}", "key 'server.model' has no effect without an endpoint"),
        ("server: {api: openai}", "key 'server.api' has no effect without an endpoint"),
        ("server: {replicas: ['http://h/v1']}", "key 'server.replicas' has no effect without an endpoint"),
        ("policy: http://h/v1\nserver: {replicas: ['h:8000']}", "the endpoint 'h:8000' must be http://HOST:PORT/v1"),
        ("policy: http://h/v1\nserver: {replicas: http://i/v1}", "key 'server.replicas'"),
        ("cells: [{name: a, server: {replicas: ['http://h']}}]", "'cells[0].server.replicas' has no effect: all cells"),
        ("policy: demo@3\nserver: {api_key_env: K}", "key 'server.api_key_env' has no effect without an endpoint"),
        ("server: {url: 'http://h/v1', dtype: float32}", "key 'server.dtype' has no effect while server.url is"),
        ("cells: [{name: a, server: {url: 'http://h/v1'}}]", "key 'cells[0].server.url' has no effect: all cells"),
        ("cells: [{name: a, server: {model: m}}]", "key 'cells[0].server.model' has no effect: all cells"),
        ("tasks: {source: tiny, verifier: v.py}", "key 'tasks.verifier' has no effect on the generated tasks 'tiny'"),
        ("tasks: {source: t.parquet, verifier_seconds: 3}", "'tasks.verifier_seconds' has no effect without"),
        ("tasks: {source: t.parquet, columns: {instructon: p}}", "did you mean 'tasks.columns.instruction'?"),
        ("tasks: {source: t.parquet, columns: {task_id: 3}}", "key 'tasks.columns.task_id' is 3"),
    ],
)
def test_what_an_evaluation_cannot_mean_is_a_sentence(tmp_path, text, sentence):
    base = EVAL if "tasks:" not in text else "model: tiny-random\n"
    assert sentence in refused(tmp_path, base + text, "eval_mine")


@pytest.mark.parametrize(
    "text",
    [
        "policy: https://user:sk-canary@h/v1",
        "policy: https://h/v1?key=sk-canary",
        "server: {url: 'https://sk-canary@h/v1'}",
        "server: {url: 'https://h/v1', replicas: ['https://sk-canary@i/v1']}",
        "server: {url: 'https://h/v1', api_key_env: sk-canary}",
    ],
)
def test_a_key_in_the_configuration_is_refused_and_not_shown(tmp_path, text):
    message = refused(tmp_path, EVAL + text, "eval_mine")
    assert "server.api_key_env" in message and "sk-canary" not in message


def test_an_endpoint_may_be_the_url_or_the_policy(tmp_path):
    for text in ("server: {url: 'http://h/v1', model: m}", "policy: http://h/v1\nserver: {model: m, api: vllm}"):
        assert load(tmp_path, EVAL + text, "eval_mine").config.server.model == "m"
    over = {"policy": "http://h/v1", "server": {"api_key_env": "K"}}
    assert load(tmp_path, EVAL, "eval_mine", over).config.server.api_key_env == "K"


def test_whole_numbers_are_floats_too(tmp_path):
    loaded = load(tmp_path, TRAIN + "limits: {seconds: 60}\nactor: {optim: {lr: 1, betas: [0, 0.5]}}")
    assert (loaded.config.limits.seconds, type(loaded.config.limits.seconds)) == (60.0, float)
    assert loaded.config.actor.optim.betas == (0.0, 0.5)


# ---- YAML ----
@pytest.mark.parametrize(
    ("written", "lr"),
    [("1e-5", 1e-5), ("1E-5", 1e-5), ("1.e-5", 1e-5), ("2.5e-06", 2.5e-6), (".5", 0.5), ("3", 3.0)],
)
def test_learning_rates_as_people_write_them(tmp_path, written, lr):
    assert load(tmp_path, TRAIN + f"actor: {{optim: {{lr: {written}}}}}").config.actor.optim.lr == lr


@pytest.mark.parametrize("written", ["0002", "010", "0x10", "1:30", "1e2", "one"])
def test_an_ambiguous_number_is_refused_not_reread(tmp_path, written):
    """YAML 1.1 reads 010 as 8 and 1:30 as 90."""
    assert refused(tmp_path, TRAIN + f"seed: {written}").startswith("config/mine.yaml: key 'seed' is")


@pytest.mark.parametrize("word", ["yes", "no", "on", "off", "Yes", "NO", "y"])
def test_yes_and_no_are_words(tmp_path, word):
    """YAML 1.1 reads them as booleans: a split called `no` would become False."""
    text = TRAIN + f"data: {{train_split: {word}}}"
    assert load(tmp_path, text).config.data.train_split == word
    assert f"key 'server.warm' is \"{word}\"" in refused(tmp_path, TRAIN + f"server: {{warm: {word}}}")
    assert f"unknown key '{word}'" in refused(tmp_path, TRAIN + f"{word}: 1")


@pytest.mark.parametrize(("word", "value"), [("true", True), ("False", False), ("TRUE", True)])
def test_booleans(tmp_path, word, value):
    assert load(tmp_path, TRAIN + f"server: {{warm: {word}}}").config.server.warm is value


def test_a_date_is_text(tmp_path):
    assert load(tmp_path, TRAIN + "data: {train_split: 2026-01-02}").config.data.train_split == "2026-01-02"


def test_a_repeated_key_is_refused_with_its_line(tmp_path):
    assert "key 'iterations' stands twice (line 4)" in refused(tmp_path, TRAIN + "iterations: 3")
    assert "key 'n' stands twice (line 6)" in refused(tmp_path, TRAIN + "rollout:\n  n: 2\n  n: 3")


@pytest.mark.parametrize("key", ["true", "1e3", "007", "~", "2026-01-02"])
def test_a_key_is_shown_as_it_was_written(tmp_path, key):
    assert f"unknown key {key!r}" in refused(tmp_path, TRAIN + f"{key}: 1")


def test_anchors_and_merge_keys(tmp_path):
    text = TRAIN + "rollout: &r {n: 4, shards: 2}\n"
    cells = "cells:\n  - &a {name: a, n: 2, split: s}\n  - {<<: *a, name: b}\n"
    first, second = load(tmp_path, text + cells).config.cells
    assert (second.name, second.n, second.split, first.name) == ("b", 2, "s", "a")


@pytest.mark.parametrize(
    "text",
    [
        "a: [",
        "- 1",
        "3",
        "",
        "a: b: c",
        "? [a]\n: 1",
        "? {a: 1}\n: 1",
        "a: &x [*x]",
        "a: !!python/object:os.system x",
        "a: !!timestamp 2026-99-99",
        "\x00",
        "a: !!binary ===",
        "seed: " + "9" * 5000,
        "[" * 2000,
    ],
)
def test_what_is_no_mapping_is_a_sentence(tmp_path, text):
    assert "mine.yaml" in refused(tmp_path, text)


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "mine.yaml").write_bytes(b"model: \xff\xfe")
    with pytest.raises(c.ConfigError, match="is not readable YAML"):
        c.load("mine", tmp_path)


def test_an_unknown_run_names_those_that_exist(tmp_path):
    load(tmp_path, TRAIN, "one")
    with pytest.raises(c.ConfigError, match=r"two\.yaml does not exist; configurations there: one"):
        c.load("two", tmp_path)
    with pytest.raises(c.ConfigError, match=r"run name '../x' must match"):
        c.load("../x", tmp_path)


# ---- overrides, parsed by Snakemake itself ----
@pytest.mark.parametrize(
    ("option", "key", "value"),
    [
        ("iterations=8", "iterations", 8),
        ("actor={optim: {lr: 1e-5}}", "actor.optim.lr", 1e-5),
        ("actor={optim: {betas: [0.8, 0.95]}}", "actor.optim.betas", (0.8, 0.95)),
        ("limits={seconds: 60, turns: 3}", "limits.turns", 3),
        ("server={warm: false}", "server.warm", False),
        ("server={warm: 'False'}", "server.warm", False),
        ("limits={turns: null}", "limits.turns", None),
        ("harness={config: null}", "harness.config", None),
        ("model=some/folder", "model", "some/folder"),
        ("cells=[{name: a, n: 8, sampling: {temperature: 0}}]", "cells", None),
    ],
)
def test_overrides_are_typed_and_laid_over(tmp_path, option, key, value):
    loaded = load(tmp_path, TRAIN + "limits: {turns: 5}\n", overrides=parse_config([option]))
    got = loaded.config
    if key == "cells":
        assert (got.cells[0].n, got.cells[0].sampling.temperature) == (8, 0.0)
        assert loaded.origins["cells[0].n"] == "--config"
        return
    for part in key.split("."):
        got = getattr(got, part)
    assert got == value
    assert loaded.origins[key] == "--config"
    assert loaded.config.tasks.source == "tiny"
    assert loaded.origins["tasks.source"] == "config/mine.yaml"


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        (
            "iteration=8",
            "--config over config/mine.yaml: unknown key 'iteration'; did you mean 'iterations'?",
        ),
        ("iterations=x", "--config over config/mine.yaml: key 'iterations' is \"x\""),
        ("iterations=2.5", "--config over config/mine.yaml: key 'iterations' is 2.5"),
        ("iterations=True", "--config over config/mine.yaml: key 'iterations' is true"),
        ("model=12", "--config over config/mine.yaml: key 'model' is 12"),
        ("server={device: gpu}", "key 'server.kv_cache_gb' has no effect while server.device is \"gpu\""),
        ("actor={optim: {lr: 010}}", "key 'actor.optim.lr' is \"010\""),
        ("rollout=3", "rollout must be a mapping of keys, not 3"),
        ("iterations=", "--config iterations= is empty; give it a value, or write iterations=null"),
        ("iterations=null", "key 'iterations' is null"),
    ],
)
def test_a_wrong_override_is_a_sentence(tmp_path, option, sentence):
    text = TRAIN + "server: {kv_cache_gb: 2}\n"
    assert sentence in refused(tmp_path, text, overrides=parse_config([option]))


# ---- origins and describe ----
def test_describe_shows_every_value_with_its_origin(tmp_path):
    loaded = load(tmp_path, TRAIN + "cells: [{name: a}]\nactor: {optim: {lr: 1e-3}}\n", overrides={"iterations": 5})
    lines = {line.split()[0]: line.split() for line in c.describe(loaded).splitlines()}
    assert lines["iterations"] == ["iterations", "5", "--config"]
    assert lines["actor.optim.lr"] == ["actor.optim.lr", "0.001", "config/mine.yaml"]
    assert lines["actor.optim.weight_decay"] == ["actor.optim.weight_decay", "0.01", "default"]
    assert lines["cells[0].name"] == ["cells[0].name", '"a"', "config/mine.yaml"]
    assert lines["cells[0].n"] == ["cells[0].n", "1", "default"]
    assert set(lines) == set(loaded.origins)


# ---- a source by its variable ----
def test_the_variable_of_a_source_is_read(tmp_path, monkeypatch):
    text = "model: tiny-random\ntasks: {source: $MINE}\n"
    monkeypatch.setenv("MINE", "/data/mine")
    assert load(tmp_path, text, "eval_mine").config.tasks.source == "/data/mine"
    for value in ("", None):
        monkeypatch.setenv("MINE", "") if value == "" else monkeypatch.delenv("MINE")
        with pytest.raises(c.NoSource, match=r"tasks\.source is \$MINE, and no environment variable MINE names"):
            load(tmp_path, text, "eval_mine")


@pytest.mark.parametrize(("text", "names"), [("[eval_a]", ["eval_a"]), ("3", []), ("[1]", [])])
def test_the_further_suites_of_a_file(tmp_path, text, names):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "eval_mine.yaml").write_text(EVAL + f"suites: {text}\n")
    assert c.suites("eval_mine", tmp_path) == names and c.suites("eval_nosuch", tmp_path) == []


# ---- rendered documents ----
def test_committed_documents_are_as_rendered():
    done = subprocess.run(
        [sys.executable, "-m", "openforge", "docs", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_every_committed_configuration_loads_and_fits_the_schema(monkeypatch):
    for name in ("CLAWEVAL", "QWENCLAW"):
        monkeypatch.setenv(name, "somewhere")
    schema = json.loads((ROOT / "config" / "schema.json").read_text())
    names = c.runs(ROOT)
    assert names
    for name in names:
        c.load(name, ROOT)
        jsonschema.validate(c.read_yaml(ROOT / "config" / f"{name}.yaml"), schema)


def test_the_schema_refuses_what_the_reader_refuses():
    schema = c.schema()
    good = yaml.safe_load(TRAIN)
    jsonschema.validate(good, schema)
    for wrong in ({"iteration": 3}, {"seed": "x"}, {"rollout": {"n": 0}}, {"harness": {"name": "aider"}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(good | wrong, schema)


def test_every_key_has_a_sentence():
    def walk(model, where=""):
        for key, field in model.model_fields.items():
            assert field.description and field.description.rstrip().endswith("."), f"{where}{key}"
            sub = c.reading.section(field.annotation)
            if sub is not None:
                walk(sub, f"{where}{key}.")

    walk(c.RunConfig)
    walk(c.EvalConfig)


# ---- any input at all ----
SECTIONS = [
    "",
    "tasks",
    "rollout",
    "harness",
    "limits",
    "server",
    "data",
    "sampling",
    "algorithm",
    "actor",
    "trainer",
]
KEYS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.sampled_from(SECTIONS), key=KEYS, value=st.one_of(st.none(), st.integers(), st.text(max_size=5)))
def test_any_unknown_key_is_a_sentence(tmp_path, where, key, value):
    data = yaml.safe_load(TRAIN)
    inside = data.setdefault(where, {}) if where else data
    model = c.RunConfig if not where else c.reading.section(c.RunConfig.model_fields[where].annotation)
    if key in model.model_fields:
        key += "?"
    inside[key] = value
    message = refused(tmp_path, yaml.safe_dump(data))
    dotted = f"{where}.{key}" if where else key
    assert f"unknown key {dotted!r}" in message or "not readable YAML" in message


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.binary(max_size=4),
    st.dates(),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.one_of(st.sampled_from(list(c.Cell.model_fields)), LEAVES), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=st.sampled_from([*c.RunConfig.model_fields]), value=TREES, over=st.booleans())
def test_any_value_loads_or_is_a_sentence(tmp_path, key, value, over):
    data = yaml.safe_load(TRAIN)
    try:
        if over:
            load(tmp_path, TRAIN, overrides={key: value})
        else:
            load(tmp_path, yaml.dump(data | {key: value}))
    except c.ConfigError as e:
        assert str(e)
