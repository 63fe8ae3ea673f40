"""What a session may be opened with: the body of POST /sessions, filled with defaults and checked."""

from __future__ import annotations

import math
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from openforge.config import Sampling
from openforge.config_reading import show
from openforge.proxy.calls import Json

_NAME = re.compile(r"[A-Za-z0-9_~-][A-Za-z0-9._~-]{0,199}")


@dataclass(frozen=True)
class Config:
    """What a session is opened with (the body of POST /sessions).

    Attributes:
        secret: the API key of the harness.
        sampling: fields of tables.SAMPLING, sent with every call.
        turns, tokens: budgets in answered calls and sampled tokens; None for none.
        deadline_seconds: seconds from now within which the policy server may be asked.
        policy_version: version that answers, recorded with every call.
        model: name that the policy server knows it by.
        context_window: tokens of prompt and response together.
        seed: of the episode's sampling; None where the policy server is not told one.
    """

    episode_id: str
    secret: str = field(repr=False)
    sampling: Json
    turns: int | None
    tokens: int | None
    deadline_seconds: float
    policy_version: str
    model: str
    context_window: int
    seed: int | None = None

    @classmethod
    def read(cls, body: Mapping[str, Any], model: str) -> Config:
        """What `check` has let pass; `model` where it names none."""
        limits = body.get("limits") or {}
        return cls(
            episode_id=str(body["episode_id"]),
            secret=str(body["secret"]),
            sampling=dict(body["sampling"]),
            turns=limits.get("turns"),
            tokens=limits.get("tokens"),
            deadline_seconds=float(body["deadline_seconds"]),
            policy_version=str(body["policy_version"]),
            model=str(body.get("model") or model),
            context_window=int(body["context_window"]),
            seed=None if body.get("seed") is None else int(body["seed"]),
        )


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _name(value: Any) -> bool:
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


def _secret(value: Any) -> bool:
    return isinstance(value, str) and bool(value) and value.isascii() and value.isprintable() and " " not in value


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# Key -> (what it must be, its test, whether it may be null or missing).
_KEYS: dict[str, tuple[str, Callable[[Any], bool], bool]] = {
    "episode_id": ("1 to 200 letters, digits and . _ ~ - (it is part of a URL), no . first", _name, False),
    "secret": ("the harness's API key: printable ASCII without spaces", _secret, False),
    "sampling": ("an object", lambda v: isinstance(v, dict) and bool(v), False),
    "limits": ("an object", lambda v: isinstance(v, dict), True),
    "deadline_seconds": ("a number of seconds above 0", lambda v: v == math.inf or (_number(v) and v > 0), False),
    "policy_version": ("a text", _text, False),
    "context_window": ("a number of tokens, 1 or more", _count, False),
    "model": ("a text", _text, True),
    "seed": ("a whole number", _whole, True),
}
_LIMITS = ("turns", "tokens")


def filled(body: Json, defaults: Json | None) -> Json:
    """`body` over `defaults`, the sampling by field; with defaults, a missing name and key are drawn.

    None of the defaults apply where there are none: a rollout job leaves nothing open.
    """
    if defaults is None:
        return body
    given = {**defaults, **body}
    if isinstance(body.get("sampling"), dict):
        given["sampling"] = {**defaults["sampling"], **body["sampling"]}
    given.setdefault("episode_id", fresh_name())
    given.setdefault("secret", secrets.token_urlsafe(24))
    return given


def fresh_name() -> str:
    """A session's name that sorts by time."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"


def check(given: Mapping[str, Any]) -> None:
    """Refuse what a session cannot be opened with.

    Raises:
        ValueError: one sentence that names the key and what would be right.
    """
    for key in given:
        if key not in _KEYS:
            raise ValueError(f"key {key!r} is unknown; a session is opened with {', '.join(_KEYS)}")
    for key, (what, good, optional) in _KEYS.items():
        value = given.get(key)
        if value is None and not optional:
            raise ValueError(f"key {key!r} is required to open a session: {what}")
        if value is not None and not good(value):
            shown = "" if key == "secret" else f" is {value!r}; it"
            raise ValueError(f"key {key!r}{shown} must be {what}")
    for key, value in (given.get("limits") or {}).items():
        if key not in _LIMITS or (value is not None and not _count(value)):
            raise ValueError(f"limits.{key} is {value!r}; limits are turns and tokens, each a number above 0 or null")
    for key in given["sampling"]:
        if key not in Sampling.model_fields:
            raise ValueError(f"sampling.{key} is unknown; fields are {', '.join(Sampling.model_fields)}")
    try:
        # The ranges of a run's own sampling. Its defaults fill nothing here.
        Sampling.model_validate(given["sampling"])
    except ValidationError as e:
        wrong = e.errors()[0]
        said = wrong["msg"].replace("Input should", "it must", 1)
        raise ValueError(f"sampling.{wrong['loc'][0]} is {show(wrong['input'])}; {said}") from None
