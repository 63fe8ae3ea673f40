"""A simulated user: a model that plays a persona and answers the agent, for a few rounds."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx

from openforge.environments.claw_eval.setup import User

TRIES, BACK_OFF, SECONDS = 4, 1.0, 120.0  # a request; the pause is doubled each time
TOKENS = 1024  # of a message
DONE = "[DONE]"
# What may pass: too many requests, a timeout, a server's own trouble.
_PASSING = (408, 409, 425, 429)

_PROMPT = """\
You play a person who talks with an assistant. Stay in character, and write only what this person says next.

The person:
{persona}

Say only what the person would know, and only what was asked for; never do the assistant's work. When the assistant
has done what the person wanted, or nothing is left to say, answer with {done} and nothing else."""


class UserFailed(RuntimeError):
    """The simulated user's model gave no message; the message says why. It is infrastructure, never a reward of 0."""


class Said(NamedTuple):
    """A message of the conversation, by the `agent` or the `user`."""

    by: str
    text: str


@dataclass(frozen=True)
class Model:
    """An OpenAI-compatible endpoint that plays users.

    Attributes:
        url: without /v1.
        api_key: None where it wants none.
    """

    url: str
    model: str
    api_key: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, judge: Mapping[str, Any] | None) -> Model | None:
        """The endpoint that a judge's configuration names: url, model, api_key_env; None without one."""
        if not judge or not judge.get("url"):
            return None
        name = judge.get("api_key_env")
        return cls(str(judge["url"]).rstrip("/").removesuffix("/v1"), str(judge["model"]), os.environ.get(name or ""))

    async def next(self, user: User, conversation: Sequence[Said]) -> str | None:
        """What the user says next; None if they are content.

        Raises:
            UserFailed: no usable answer after some tries.
        """
        # To the model, what the person said is its own.
        roles = {"user": "assistant", "agent": "user"}
        messages = [{"role": "system", "content": _PROMPT.format(persona=user.persona, done=DONE)}]
        # Some templates want a user's message first, and some of the endpoints refuse any other order.
        messages.append({"role": "user", "content": "(The conversation begins.)"})
        messages += [{"role": roles[said.by], "content": said.text} for said in conversation]
        body = {"model": self.model, "messages": messages, "temperature": 0.0, "max_tokens": TOKENS}
        text = await self._ask(body)
        return None if DONE in text else text

    async def _ask(self, body: Mapping[str, Any]) -> str:
        headers = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        why, pause = "", BACK_OFF
        async with httpx.AsyncClient(timeout=SECONDS, headers=headers, trust_env=False) as client:
            for left in reversed(range(TRIES)):
                try:
                    answer = await client.post(f"{self.url}/v1/chat/completions", json=body)
                    if answer.status_code == 200:
                        return _text(answer)
                    why = f"status {answer.status_code}: {answer.text[:200]}"
                    if answer.status_code not in _PASSING and answer.status_code < 500:
                        break
                except (httpx.HTTPError, ValueError) as e:
                    why = f"{type(e).__name__}: {e}"
                if left:
                    await asyncio.sleep(pause)
                    pause *= 2
        raise UserFailed(f"the simulated user's model {self.model} at {self.url} gave no message: {why}")


def _text(answer: httpx.Response) -> str:
    """Raises `ValueError` for an answer without a text."""
    try:
        text = answer.json()["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError) as e:
        raise ValueError(f"no chat completion: {answer.text[:200]}") from e
    if not isinstance(text, str) or not text.strip():
        raise ValueError("an empty message")
    return text.strip()


def retold(instruction: str, conversation: Sequence[Said]) -> str:
    """The instruction for a harness that begins anew: the task, and what was said since."""
    names = {"agent": "You", "user": "User"}
    said = "\n\n".join(f"{names[s.by]}: {s.text}" for s in conversation[1:])
    return (
        f"{instruction}\n\nYou have worked on this before, and what you did stands. The conversation since then, which "
        f"you now go on with by answering the user's last message:\n\n{said}"
    )
